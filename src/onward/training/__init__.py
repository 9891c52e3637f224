"""Runs: data, the loop, callbacks, folders, logs and reports."""
