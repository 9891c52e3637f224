"""Checkpoints of other frameworks: recorded ones, damaged as archives, as pickles and as JSON."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import onward
from campaign.kinds import Kind
from campaign.mutations import BYTES, JSON, Damage, changed_safetensors, changed_zip

_RECORDED = Path(__file__).parents[1] / "checkpoints"
_OPCODES = b"".join(
    opcode.encode("latin-1") for opcode in "0123456789:;<=>?@ABCFGIJKLMNPQRSTUVXYZ]^_abcdeghijklopqrstu}"
)


def pickled(tree: Any) -> bytes:
    return pickle.dumps(tree, 2)


def _other_operation(rng: random.Random, data: bytes) -> bytes:
    """A pickle that does something else somewhere."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.choice(_OPCODES)]) + data[at + rng.choice((0, 1)) :]


def _call(rng: random.Random, data: bytes) -> bytes:
    """A pickle that calls something first."""
    name = rng.choice((b"cposix\nsystem\n", b"cbuiltins\neval\n", b"cos\nremove\n", b"cbuiltins\nbytearray\n"))
    return data[:2] + name + b"(X\x06\x00\x00\x00secrettR0" + data[2:]


pickled_damages: tuple[Damage, ...] = (_other_operation, _other_operation, _other_operation, _call, *BYTES)
_TORCH = (changed_zip({".pkl": pickled_damages}), changed_zip({".pkl": pickled_damages}), *BYTES)


def _folder(name: str) -> Any:
    return lambda folder: shutil.copytree(_RECORDED / name, folder / name)


def _look(name: str) -> Any:
    """Look at all of it, and read every tensor."""

    def use() -> None:
        checkpoint = onward.open_checkpoint(name)
        for tensor in (*checkpoint.tensors.values(), *(t for each in checkpoint.optimizers for t in each.tensors)):
            tensor.array()

    return use


KINDS = {
    "checkpoints of a trainer": Kind(
        _folder("trainer"),
        {"*.pt": _TORCH, "*.pth": _TORCH, "*.bin": _TORCH, "*.json": JSON, "*.safetensors": (changed_safetensors,)},
        (("show", "trainer"), ("show", "trainer", "--json"), _look("trainer")),
    ),
    "checkpoints in a file": Kind(
        lambda folder: shutil.copy(_RECORDED / "lightning.ckpt", folder),
        {"*": _TORCH},
        (("show", "lightning.ckpt"), ("show", "lightning.ckpt", "--params"), _look("lightning.ckpt")),
    ),
}
