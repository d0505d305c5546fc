"""Which samples each rank reads in each step: one global order, cut into shares and micro batches."""
