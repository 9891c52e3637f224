"""What each framework calls optimizers, slots, losses and schedules, as rows that import nothing of it."""
