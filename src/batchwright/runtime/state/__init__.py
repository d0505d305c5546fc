"""State on disk: checkpoints, the ledger of trained samples, and the audit of both."""
