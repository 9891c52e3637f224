"""The rooms of the frameworks have the same files, in which the same functions have the same jobs."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

ROOMS = ("torch", "keras", "jax", "tensorflow")
FUNCTIONS: dict[str, dict[str, list[str]]] = {
    "capture": {"from_{room}": []},
    "forward": {"to_{room}": ["training"]},
    "optimizer": {"read_optimizer": [], "make_optimizer": ["run"]},
    "schedule": {"read_schedule": [], "make_schedule": []},
    "loss": {"read_loss": [], "make_loss": []},
    "probe": {},
    "program": {"write": ["model", "path"], "restore": ["path", "like"]},
}
"""File -> its function -> the parameters that it begins with."""
LACKING = {
    ("jax", "loss"): "a loss is part of the captured function, and `to_jax` returns one function",
    ("tensorflow", "optimizer"): "its optimizers are Keras's",
    ("tensorflow", "schedule"): "its schedules are Keras's",
    ("tensorflow", "loss"): "a loss is part of the captured function, and `to_tensorflow` returns one module",
}


def functions(room: str, file: str) -> dict[str, list[str]]:
    """Return the parameters of each function of a file, or of a folder's `__init__.py`, by name."""
    base = ROOT / "src" / "onward" / "frameworks" / room
    path = base / f"{file}.py"
    if not path.exists():
        path = base / file / "__init__.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: [arg.arg for arg in node.args.args] for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", FUNCTIONS)
@pytest.mark.parametrize("room", ROOMS)
def test_rooms_have_the_same_files(room: str, file: str) -> None:
    if (room, file) in LACKING:
        with pytest.raises(FileNotFoundError):  # else the reason is out of date
            functions(room, file)
        return
    present = functions(room, file)
    for name, parameters in FUNCTIONS[file].items():
        assert present[name.format(room=room)][: len(parameters)] == parameters
