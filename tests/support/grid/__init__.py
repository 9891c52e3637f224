"""What every framework makes of every optimizer, loss and schedule, in both directions, found out by trying it.

A cell of the grid is a tiny run that is converted after a few steps and goes on on both sides. `conversion_grid.py`
tries cells, `outcomes.json` remembers what came of them, and docs/frameworks/grid.md has the tables that say so.
"""
