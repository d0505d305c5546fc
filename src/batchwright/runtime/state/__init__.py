"""What survives a process: checkpoints, the ledger of samples, and the audit of both."""
