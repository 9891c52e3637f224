"""Marks of tests."""

from __future__ import annotations

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    """Mark a test, a module (`pytestmark = needs("torch")`) or a parameter that cannot run without these modules."""
    return pytest.mark.needs(*modules)
