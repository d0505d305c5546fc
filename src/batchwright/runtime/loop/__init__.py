"""The training loop: `train(task, schedule, settings)`."""
