"""Trees that Flax writes with `flax.serialization`."""

from __future__ import annotations

from pathlib import Path

from onward.checkpoint.description import Checkpoint
from onward.checkpoint.format import Format
from onward.checkpoint.message_writer import write_messages
from onward.checkpoint.messages import begins_a_tree, read_messages
from onward.checkpoint.pytrees import KEY, leaves, without_lists
from onward.checkpoint.train_states import checkpoint_of_tree, tree_of
from onward.errors import UnsupportedError


def read(path: Path) -> Checkpoint:
    tree = read_messages(path)
    return checkpoint_of_tree(path, FORMAT.name, FORMAT.title, tree, trees={path.name: tree})


def write(checkpoint: Checkpoint, path: Path) -> None:
    tree = tree_of(checkpoint, {})
    if any(way[-1:] == (KEY,) for way, _ in leaves(tree)):
        raise UnsupportedError(
            "files of Flax have no place for typed keys of random numbers",
            hint="write it with `--to orbax`, or save `jax.random.key_data(key)`",
        )
    with open(path, "wb") as file:
        write_messages(without_lists(tree), file)


FORMAT = Format(
    "flax", "Flax, msgpack", lambda path: path.is_file() and begins_a_tree(path), read, is_folder=False,
    ending=".msgpack", write=write, keeps=("tensors", "optimizers", "step", "randomness", "averages"),
)  # fmt: skip
