"""Checkpoints of other frameworks: recorded ones, damaged as archives, as pickles and as JSON."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import safetensors.numpy
from paths import CHECKPOINTS

import onward
from campaign.data import no_file
from campaign.kinds import Kind
from campaign.models import PROTOBUF
from campaign.mutations import (
    BYTES,
    JSON,
    Damage,
    changed_json,
    changed_safetensors,
    changed_zip,
    flipped,
    relabelled,
    renumbered,
    resized,
)
from onward.checkpoint.embedded import FACT
from onward.checkpoint.tf.tensor_bundle import make_table, read_table

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


_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT")
_SIZES = (0, 1, 2, -1, 3, 255, 1 << 31, 1 << 40, 1 << 62, 1 << 63, -(1 << 63), 10**30)
_TEXTS = ("", "../../secret", "/etc/passwd", "\x1b[31m", "x" * 5000, "posix", "system", "é", "\x00")


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """A pickle in which numbers or texts are others: sizes, strides, offsets, names of files and of classes."""
    try:
        operations = list(pickletools.genops(data))
    except ValueError:
        return flipped(rng, data)
    ends = [at for _, _, at in operations[1:]] + [len(data)]
    pieces = [data[at:end] for (_, _, at), end in zip(operations, ends, strict=True)]
    places = [n for n, (operation, _, _) in enumerate(operations) if operation.name in _VALUES]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice(places)
        is_number = not isinstance(operations[at][1], str)
        pieces[at] = _pushed(rng.choice(_SIZES if is_number == (rng.random() < 0.95) else _TEXTS))
    frames = [operation.name == "FRAME" for operation, _, _ in operations]  # which say how long they are
    return b"".join(piece for piece, is_frame in zip(pieces, frames, strict=True) if not is_frame)


def _pushed(value: int | str) -> bytes:
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


pickled_damages: tuple[Damage, ...] = (*[_other_value] * 6, *[_other_operation] * 3, _call, *BYTES)
_TORCH = (changed_zip({".pkl": pickled_damages}), changed_zip({".pkl": pickled_damages}), *BYTES)


def _changed_table(rng: random.Random, data: bytes) -> bytes:
    """An index of TensorFlow with whole checksums, in which an entry is another, or lies elsewhere."""
    entries = dict(read_table(data))
    key, other = rng.choice(sorted(entries)), rng.choice(sorted(entries))
    action = rng.random()
    if action < 0.6:
        entries[key] = rng.choice((*BYTES, resized, relabelled))(rng, entries[key] or b"\x08\x01")
    elif action < 0.7:
        entries[key] = entries[other]
    elif action < 0.8:
        del entries[key]
    else:
        entries[rng.choice((b"../../secret", b"\xff", b"\x1b[31m", key + b"/x"))] = entries.pop(key)
    return make_table(entries)


def _changed_tar(rng: random.Random, data: bytes) -> bytes:
    """An archive in which a file is another, has another name, is there twice, or is a link."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(info, archive.extractfile(info)) for info in archive]
        files = [(info, held.read()) for info, held in members if held is not None]
    at, action = rng.randrange(len(files)), rng.random()
    info, content = files[at]
    if action < 0.6:
        content = rng.choice(_TORCH if content.startswith(b"PK") else BYTES)(rng, content)
    elif action < 0.75:
        info.name = rng.choice(("../../outside", "/tmp/outside", "x", "\x1b[31m", files[0][0].name))
    elif action < 0.9:
        info.type, info.linkname = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE)), rng.choice(("../../secret", "x"))
    files[at] = info, content
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for each, held in files if action < 0.95 else [*files, files[at]]:
            each.size = len(held) if each.isreg() else 0
            archive.addfile(each, io.BytesIO(held))
    return made.getvalue()


_BINARY = (renumbered, renumbered, *BYTES)
_DAMAGES: dict[str, tuple[Damage, ...]] = {
    **dict.fromkeys(("*.pt", "*.pth", "*.bin", "*.pkl", "*.ckpt", "*.distcp"), _TORCH),
    "*.metadata": pickled_damages,
    "*.json": JSON,
    "*.safetensors": (changed_safetensors, changed_safetensors, *BYTES),
    "*.onnx": PROTOBUF,
    "*.index": (_changed_table, _changed_table, *_BINARY),
    "*.data-*": _BINARY,
    "*checkpoint": _BINARY,
    "*.keras": (changed_zip({".json": JSON, ".h5": _BINARY}), *BYTES),
    **dict.fromkeys(("*.zarray", "*_METADATA", "*zarr.json", "*/metadata", "*_sharding", "*/process_[01]"), JSON),
    "*.nemo": (_changed_tar, _changed_tar, _changed_tar),
    "*": _BINARY,
}
"""By the names of files. Each format has some of them."""


def look(name: str) -> Any:
    """Look at all of it, and read every tensor."""

    def use() -> None:
        checkpoint = onward.open_checkpoint(name)
        for tensor in (*checkpoint.tensors.values(), *(t for each in checkpoint.optimizers for t in each.tensors)):
            tensor.array()

    return use


def convert(name: str, format: str) -> Any:
    """Write it as another format."""
    return lambda: onward.to_checkpoint(name, "out", format=format)


def _import(name: str) -> Any:
    """Make a training model of it, and write that."""
    return lambda: onward.from_checkpoint(name).save("out.onnx")


def _kind(name: str, *uses: Any, of: Callable[[Path], object] | None = None, needs: tuple[str, ...] = ()) -> Kind:
    """Checkpoints that are recorded under a name, or made by a function."""

    def copy(folder: Path) -> None:
        recorded = CHECKPOINTS / name
        if recorded.is_dir():
            shutil.copytree(recorded, folder / recorded.name)
        else:
            shutil.copy(recorded, folder)

    there = Path(name).name
    shown = (("show", there), ("show", there, "--json"), ("show", there, "--unsafe"))
    return Kind(of or copy, _DAMAGES, (*shown, look(there), *uses), no_file, needs)


def with_its_model(folder: Path) -> None:
    """A checkpoint of Lightning, and the model that it is of."""
    shutil.copy(CHECKPOINTS / "lightning.ckpt", folder)
    node = onnx.helper.make_node("Gemm", ["x", "layer.weight", "layer.bias"], ["y"], transB=1)
    sizes = {"x": ["batch", 3], "y": ["batch", 2], "layer.weight": [2, 3], "layer.bias": [2]}
    x, y, *parameters = (onnx.helper.make_tensor_value_info(name, 1, size) for name, size in sizes.items())
    tensors = [onnx.numpy_helper.from_array(np.zeros(sizes[p.name], np.float32), p.name) for p in parameters]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y], tensors)), folder / "model.onnx")


def _in_pieces(folder: Path) -> None:
    """A model of Hugging Face in two files and an index."""
    tensors = safetensors.numpy.load_file(CHECKPOINTS / "trainer" / "model.safetensors")
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        (folder / "pieces").mkdir(exist_ok=True)
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / "pieces" / file)
        places |= dict.fromkeys(part, file)
    (folder / "pieces" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _imported(folder: Path) -> None:
    """A training model that keeps the checkpoint that it was made of, which is there, too."""
    shutil.copytree(CHECKPOINTS / "ort" / "entropy", folder / "entropy")
    os.chdir(folder)
    onward.from_checkpoint("entropy").save("run.onnx")


def _changed_origin(rng: random.Random, data: bytes) -> bytes:
    """A training model that says something else of that checkpoint."""
    model = onnx.ModelProto.FromString(data)
    (fact,) = (p for p in model.training_info[0].algorithm.metadata_props if p.key == FACT)
    fact.value = changed_json(rng, fact.value.encode()).decode()
    return model.SerializeToString()


def go_on() -> None:
    onward.from_checkpoint("lightning.ckpt", "model.onnx", loss="mse").save("out.onnx")


KINDS = {
    "checkpoints of a trainer": _kind("trainer", convert("trainer", "safetensors"), convert("trainer", "hf")),
    "checkpoints of Lightning": _kind(
        "lightning.ckpt", ("show", "lightning.ckpt", "--params"), convert("lightning.ckpt", "lightning")
    ),
    "checkpoints of Accelerate": _kind("accelerate", convert("accelerate", "accelerate")),
    "checkpoints of DeepSpeed": _kind("deepspeed/zero3", convert("zero3", "deepspeed")),
    "universal checkpoints of DeepSpeed": _kind("deepspeed/universal", convert("universal", "deepspeed")),
    "models of NeMo": _kind(
        "nemo/model.nemo", convert("model.nemo", "safetensors"), convert("model.nemo", "nemo"), needs=("yaml",)
    ),
    "checkpoints of TensorFlow": _kind("tensorflow", convert("tensorflow", "tensorflow")),
    "checkpoints of TensorFlow in pieces": _kind("tensorflow_pieces", convert("tensorflow_pieces", "torch")),
    "checkpoints of onnxruntime-training": _kind(
        "ort/entropy", _import("entropy"), _import("entropy"), convert("entropy", "ort")
    ),
    "checkpoints of PyTorch": _kind("plain.pt", convert("plain.pt", "torch"), convert("plain.pt", "dcp")),
    "checkpoints to go on with": Kind(with_its_model, {"*.ckpt": _TORCH}, (go_on,)),
    "checkpoints of Keras": _kind("keras/model.keras", convert("model.keras", "keras"), needs=("h5py",)),
    "checkpoints of Megatron": _kind("megatron", convert("megatron", "megatron")),
    "checkpoints of Ray Train": _kind("ray", convert("ray", "ray")),
    "distributed checkpoints": _kind("dcp", convert("dcp", "torch"), convert("dcp", "dcp")),
    "training models of checkpoints": Kind(
        _imported,
        {"run.onnx": (_changed_origin,)},
        (("show", "run.onnx"), *(convert("run.onnx", format) for format in ("ort", "safetensors", "orbax"))),
    ),
    "models in pieces": _kind("pieces", convert("pieces", "safetensors"), of=_in_pieces),
    "checkpoints of Flax": _kind("flax.msgpack", convert("flax.msgpack", "flax")),
    "checkpoints of Orbax": _kind("orbax", convert("orbax", "orbax"), convert("orbax", "flax")),
}
