"""Folders that tests read."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
CHECKPOINTS = TESTS / "recorded"
"""Checkpoints that frameworks wrote, and the scripts that made them write these."""
