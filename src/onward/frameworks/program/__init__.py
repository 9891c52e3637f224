"""Programs of other frameworks that are written from a model: what all of their writers have in common.

A framework's own part is a dialect: how calls are recorded and spelled, what a layer is, and where state is held.
"""
