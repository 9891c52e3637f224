"""A training run as a Python program of its own: a graph as a function, with the source of what it calls.

The operators that a program calls are those of the engine: their source is copied from there, with everything that it
mentions, so that a program computes what the engine does, and can be read and changed.
"""
