"""Names of optimizers, slots, losses and schedules in each framework, without importing it."""
