"""Checkpoints of other frameworks, read and written as data: nothing in them is executed."""
