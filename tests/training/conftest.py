from __future__ import annotations

from pathlib import Path

import pytest
from runs import filled


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two models, and data for each."""
    monkeypatch.chdir(filled(tmp_path))
    return tmp_path
