"""What runs inside a training process: the global order, sampler, loader and step. Needs torch and numpy."""
