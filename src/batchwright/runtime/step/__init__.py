"""One optimizer step: the gradient of the whole global batch, however it was split."""
