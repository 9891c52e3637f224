"""Runs as files of other frameworks, on their way back: of PyTorch, Keras and JAX, and SavedModels."""

from __future__ import annotations

import copy
import functools
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from models import digits_mlp

import onward
from campaign.checkpoints import pickled_damages
from campaign.kinds import Kind
from campaign.models import PROTOBUF
from campaign.mutations import BYTES, JSON, Damage, changed_safetensors, changed_zip, places, rearranged

BACK = ("--like", "training.onnx", "--force", "-o", "out.onnx")


def _training(folder: Path) -> onward.Model:
    made = onward.prepare(
        digits_mlp(hidden=4), loss="ce", optimizer="adam", schedule="exponential:gamma=0.9", freeze="fc1.bias"
    )
    made.save(folder / "training.onnx")
    return made


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def _torch(folder: Path) -> None:
    """What a program saves after a step."""
    import torch

    from onward.frameworks.torch import to_torch

    made = to_torch(_training(folder), probe=False)
    for parameter in made.module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    made.optimizer.step()
    made.scheduler.step()
    state = {"module": made.module.state_dict(), "optimizer": made.optimizer.state_dict()}
    torch.save({**state, "scheduler": made.scheduler.state_dict()}, folder / "run.pt")


def changed_state(rng: random.Random, data: bytes) -> bytes:
    """One to three places of the tree in a file of PyTorch dropped, renamed, or given something of another kind."""
    import torch

    tree = torch.load(io.BytesIO(data), weights_only=True)
    odd = (
        None, True, -1, 2**70, 1.5, float("nan"), "x", "../../secret", [], {}, (), [None], {"x": 1}, torch.zeros(3),
        torch.tensor(float("inf")), torch.zeros(4, dtype=torch.int8), torch.zeros(4, 0), torch.zeros(()),
        torch.zeros(4, dtype=torch.complex64), torch.eye(4).to_sparse(), torch.zeros(1).expand(10**9),
    )  # fmt: skip
    for _ in range(rng.choice((1, 1, 2, 3))):
        *way, last = rng.choice(places(tree)[1:] or [(None,)])
        if last is None:
            break
        around = functools.reduce(lambda at, key: at[key], way, tree)
        action = rng.random()
        if action < 0.15:
            del around[last]
        elif action < 0.25 and isinstance(around, dict):
            around[rng.choice(("", 7, None, "__class__", "step", f"{last}x"))] = around.pop(last)
        elif action < 0.35 and isinstance(around[last], torch.Tensor):
            around[last] = around[last] * rng.choice((0, -1, float("nan"), 1e30))
        else:
            around[last] = copy.deepcopy(rng.choice(odd))
    made = io.BytesIO()
    torch.save(tree, made)
    return made.getvalue()


# ---- Keras -----------------------------------------------------------------------------------------------------------


def _keras(folder: Path) -> None:
    from onward.frameworks.keras.forward import to_keras
    from onward.frameworks.keras.program import standing_in
    from onward.frameworks.keras.program.source import write_program

    training = _training(folder)
    live = to_keras(training)
    standing_in(write_program(training, live, "run", "run.keras"), live).save(folder / "run.keras")


def changed_hdf5(rng: random.Random, data: bytes) -> bytes:
    """A dataset or a group dropped, renamed, of other types and sizes, or one that points elsewhere."""
    import h5py

    file = io.BytesIO(data)
    with h5py.File(file, "r+") as h5:
        names: list[str] = []
        h5.visit(names.append)
        name = rng.choice(names)
        shape = h5[name].shape if isinstance(h5[name], h5py.Dataset) else (4,)
        action = rng.randrange(12)
        if action == 0:
            h5.move(name, rng.choice(("x", f"{name}x", "vars/-1", "vars/\u0663", f"{name}/x" if "/" in name else "y")))
        else:
            del h5[name]
        if action == 1:
            h5[name] = h5py.SoftLink(rng.choice(("/", "/vars", "/nowhere", f"/{name}")))
        elif action == 2:
            h5[name] = h5py.ExternalLink("../secret", "/")
        elif action == 3:
            small = shape if np.prod(shape) <= 46 else (46,)  # HDF5 refuses to create what the file cannot hold
            h5.create_dataset(name, small, "u1", external=[("../secret", 0, 46)])
        elif action == 4:
            h5.create_group(name)
        elif action == 5:
            h5.create_dataset(name, shape, rng.choice(("f8", "i4", "c8", "S4", h5py.string_dtype(), "f2", "u1", "?")))
        elif action == 6:
            h5.create_dataset(name, rng.choice(((), (0,), (10**12,), (2**31, 2**20), (*shape, 1), shape[::-1])), "f4")
        elif action == 7:
            pieces = tuple(max(1, size) * rng.choice((1, 10**4)) for size in shape) or (1,)
            h5.create_dataset(name, shape or (1,), "f4", chunks=pieces, maxshape=(None,) * len(pieces), compression=9)
        elif action == 8:
            h5[name] = np.full(shape, rng.choice((np.nan, np.inf, -1, 1e30)), "f4")
        elif action == 9:
            h5.create_dataset(name, data=h5py.Empty("f4"))
        elif action == 10:
            layout = h5py.VirtualLayout(shape or (1,), "f4")
            layout[...] = h5py.VirtualSource("../secret", "x", shape or (1,))
            h5.create_virtual_dataset(name, layout)
    return file.getvalue()


# ---- JAX and TensorFlow ----------------------------------------------------------------------------------------------


def _jax(folder: Path) -> None:
    from onward.frameworks.run_files import write

    write(_training(folder), "jax", folder / "run")


def _tensorflow(folder: Path) -> None:
    import tensorflow as tf

    from onward.frameworks.tensorflow import to_tensorflow

    tf.saved_model.save(to_tensorflow(_training(folder)), str(folder / "run"))


def changed_saved_model(rng: random.Random, data: bytes) -> bytes:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    return rearranged(rng, data, SavedModel)


_HDF5: tuple[Damage, ...] = (*(changed_hdf5,) * 8, *BYTES)
_WEIGHTS = changed_zip({".h5": _HDF5, ".json": JSON})
_STATE = (*(changed_state,) * 8, *(changed_zip({".pkl": pickled_damages}),) * 2, *BYTES)


def _restored() -> Any:
    """As the API does it."""
    from onward.frameworks.tensorflow import from_tensorflow

    return from_tensorflow(Path("run"))


KINDS = {
    "models for JAX": Kind(
        _training,
        {"*.onnx": PROTOBUF},
        (("convert", "training.onnx", "--to", "jax", "--force", "-o", "run"),),
        needs=("jax", "optax"),
    ),
    "states of PyTorch": Kind(_torch, {"run.pt": _STATE}, (("convert", "run.pt", *BACK),), needs=("torch",)),
    "files of Keras": Kind(
        _keras, {"run.keras": (*(_WEIGHTS,) * 6, *BYTES)}, (("convert", "run.keras", *BACK),), needs=("keras", "h5py")
    ),
    "folders of JAX": Kind(
        _jax,
        {"run/state.safetensors": (*(changed_safetensors,) * 4, *BYTES)},
        (("convert", "run", *BACK),),
        needs=("jax", "optax"),
    ),
    "SavedModels": Kind(
        _tensorflow,
        {"run/saved_model.pb": (*PROTOBUF[:8], *(changed_saved_model,) * 8), "run/variables/*": BYTES},
        (("convert", "run", "--force", "-o", "out.onnx"), ("convert", "run", *BACK), _restored),
        needs=("tensorflow",),
    ),
}
