"""Training: data, the loop, the log of a run and what is made of it."""
