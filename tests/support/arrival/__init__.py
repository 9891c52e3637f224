"""Whatever is in a training model arrives in a framework, or is refused by its name: features, targets, and both tried.

A feature is something that a training model can have: a loss, an optimizer, dropout, a second step. A target is
something that goes on with a training model: an engine, or what a converter makes of it.
"""
