"""Engine `slurm`: launches as jobs, supervised from a login node or as a chain of jobs."""
