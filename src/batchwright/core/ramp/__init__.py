"""A batch that grows: rules, the schedule they compile to, and the learning rate beside it."""
