"""One optimizer step: the gradient of the whole global batch, at any split into micro batches and ranks."""
