"""Trees of `flax.serialization`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytree import KEY, leaves, without_lists
from onward.checkpoint.pytree.flax_msgpack import begins_a_tree, read_messages, write_messages
from onward.checkpoint.pytree.train_states import checkpoint_of_tree, meaning_of, tree_of
from onward.errors import UnsupportedError, list_names, warn


def read(path: Path) -> Checkpoint:
    tree = read_messages(path)
    return checkpoint_of_tree(path, FORMAT.name, FORMAT.title, tree, trees={path.name: tree})


def write(checkpoint: Checkpoint, path: Path) -> None:
    tree = _state(tree_of(checkpoint, {}), checkpoint)
    if any(key_path[-1:] == (KEY,) for key_path, _ in leaves(tree)):
        raise UnsupportedError(
            "files of Flax cannot store typed random keys",
            hint="write it with `--to orbax`, or save `jax.random.key_data(key)`",
        )
    with open(path, "wb") as file:
        write_messages(tree if checkpoint.format == FORMAT.name else without_lists(tree), file)


def _state(tree: Any, checkpoint: Checkpoint) -> Any:
    """Return the training item of an Orbax checkpoint: a file of Flax has one tree."""
    if checkpoint.format != "orbax" or len(checkpoint.trees) < 3:
        return tree
    meaning = meaning_of(tree)
    items = {
        key_path[0] for key_path in (*meaning.parameters, *meaning.statistics, *meaning.averages, *meaning.counters)
    }
    if len(items) != 1:
        return tree
    (item,) = items
    others = sorted(name for name in tree if name != item)
    warn(f"a Flax file has one tree: `{item}` is written, {list_names(others, 5)} left out")
    return tree[item]


FORMAT = Format(
    "flax", "Flax, msgpack", lambda path: path.is_file() and begins_a_tree(path), read, is_folder=False,
    ending=".msgpack", write=write, keeps=("tensors", "optimizers", "step", "randomness", "averages"),
)  # fmt: skip
