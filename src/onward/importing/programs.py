"""Files of programs that `onward convert` wrote, whose state goes back into the training model."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from onward.checkpoint.formats.keras import read_zipped_json
from onward.checkpoint.pytorch.archive import is_torch_file, read_torch_file
from onward.checkpoint.tf.tensor_bundle import read_bundle
from onward.frameworks.run_files import Framework
from onward.model.storage.containers import BAD_ZIP

_PARTS = {"module", "optimizer", "scheduler"}, {"module"}
"""Content of a state file of a run, and of a model, beside constants."""


def framework_of(path: Path) -> Framework | None:
    """Return the framework of a program of Onward; None for other files."""
    if path.is_dir():
        if (path / "saved_model.pb").is_file():
            variables = path / "variables" / "variables"
            variables_tree = read_bundle(variables) if variables.with_suffix(".index").is_file() else {}
            return "tensorflow" if any(key.startswith("state/") for key in variables_tree) else None
        has_program = any((path / name).is_file() for name in ("run.py", "model.py"))
        return "jax" if has_program and (path / "state.safetensors").is_file() else None
    if path.suffix == ".keras":
        return "keras" if _has_own_classes(path) else None
    tree = read_torch_file(path) if is_torch_file(path) else None
    return "torch" if isinstance(tree, Mapping) and {*tree} - {"constants"} in _PARTS else None


def _has_own_classes(path: Path) -> bool:
    """True if the model has a class that a program registers."""
    try:
        with zipfile.ZipFile(path) as archive:
            config = read_zipped_json(archive, archive.getinfo("config.json"))
    except (KeyError, *BAD_ZIP):
        return False
    return ">" in str(config.get("registered_name"))
