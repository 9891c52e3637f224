"""Recorded checkpoints in each format: its framework reads the same and makes a step, or the pair is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import CHECKPOINTS

import onward
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats import writable

pytestmark = pytest.mark.slow

_BY_NUMBER = "hf accelerate lightning torch"
_ANYWHERE = "ray safetensors"
_TREES = "orbax flax"
WRITTEN = {
    "trainer": f"{_ANYWHERE} {_BY_NUMBER}",
    "accelerate": f"{_ANYWHERE} {_BY_NUMBER}",
    "lightning.ckpt": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} deepspeed megatron dcp ort tensorflow",
    "plain.pt": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} deepspeed megatron dcp ort tensorflow",
    "dcp": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} deepspeed megatron dcp ort tensorflow",
    "ray": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} deepspeed megatron dcp tensorflow",
    "deepspeed/zero2": f"{_ANYWHERE} {_TREES} deepspeed megatron tensorflow",
    "deepspeed/zero3": f"{_ANYWHERE} {_TREES} deepspeed megatron tensorflow",
    "deepspeed/universal": f"{_ANYWHERE} {_TREES} deepspeed megatron tensorflow",
    "megatron": f"{_ANYWHERE} {_TREES} deepspeed megatron tensorflow",
    "nemo/model.nemo": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} megatron dcp ort tensorflow nemo",
    "tensorflow": f"{_ANYWHERE} tensorflow",
    "tensorflow_pieces": f"{_ANYWHERE} {_BY_NUMBER} {_TREES} megatron dcp ort tensorflow",
    "ort/entropy": f"{_ANYWHERE} {_TREES} ort tensorflow",
    "keras/model.keras": f"{_ANYWHERE} {_TREES} keras tensorflow",
    "flax.msgpack": f"{_ANYWHERE} {_TREES}",
    "orbax": f"{_ANYWHERE} {_TREES}",
}
"""Formats that hold each of them. The others have no place for a part, and are refused."""

Named = Mapping[str, np.ndarray]


def _arrays(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of a tree, by their last key and by the keys from each level on, with dots and with strokes."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            for name, array in _arrays(part, str(key)):
                yield name, array
                if path:
                    yield f"{path}.{name}", array
                    yield f"{path}/{name}", array
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _arrays(part)
    elif hasattr(tree, "shape"):
        yield path, tree.float().numpy() if hasattr(tree, "float") else np.asarray(tree)


# ---- the frameworks --------------------------------------------------------------------------------------------------


def _torch_step(state: Mapping[str, Any]) -> None:
    """An optimizer of PyTorch takes the state of one and makes a step."""
    import torch

    keys = [key for group in state["param_groups"] for key in group["params"]]
    numbers = {key: number for number, key in enumerate(keys)}
    kept = {numbers[key]: slots for key, slots in state["state"].items()}
    shapes = {n: next((v.shape for k, v in slots.items() if k != "step"), ()) for n, slots in kept.items()}
    parameters = {n: torch.nn.Parameter(torch.zeros(shapes.get(n, ()))) for n in numbers.values()}
    groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in state["param_groups"]]
    first = groups[0]
    kind = torch.optim.SGD if "momentum" in first else torch.optim.AdamW
    if "betas" in first and not first.get("decoupled_weight_decay", True):
        kind = torch.optim.Adam
    optimizer = kind([{"params": [parameters[n] for n in group["params"]]} for group in groups], lr=1.0)
    optimizer.load_state_dict({"state": kept, "param_groups": groups})
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in parameters.values())
    assert not kept or any(parameter.any() for parameter in parameters.values())


def _step_all(tree: Any) -> None:
    if isinstance(tree, Mapping) and {"state", "param_groups"} <= tree.keys():
        _torch_step(tree)
    elif isinstance(tree, Mapping | list):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            _step_all(part)


def _torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch

    tree = torch.load(path, weights_only=False)  # of our own writing, with states of numpy in it
    _step_all(tree)
    yield from _arrays(tree)


def _safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors.torch import load_file

    yield from _arrays(load_file(path))


def _folder(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    yield from _safetensors(path / "model.safetensors")
    for file in (*path.glob("optimizer*.pt"), *path.glob("optimizer*.bin")):
        yield from _torch(file)


def _distributed(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = next(path.glob("iter_*"), path)
    dcp_to_torch_save(folder, path.parent / "whole.pt")
    if (folder / "common.pt").is_file():
        assert torch.load(folder / "common.pt", weights_only=False)["iteration"] == int(folder.name[5:])
    yield from _torch(path.parent / "whole.pt")


def _deepspeed(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import torch

    for file in path.rglob("fp32.pt"):
        yield file.parent.name, torch.load(file, weights_only=True)["param"].numpy()


def _tensorflow(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    for key, kind in reader.get_variable_to_dtype_map().items():
        if kind.is_floating:
            array = reader.get_tensor(key)
            yield key, array
            yield key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"), array


def _keras(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import keras

    model = keras.saving.load_model(path)
    for variable in model.variables:
        yield variable.path, np.asarray(variable)


def _optax_step(tree: Any) -> None:
    """optax takes the state of AdamW and makes an update."""
    import flax.serialization
    import jax
    import optax

    if not {"params", "opt_state"} <= tree.keys():
        return
    params = jax.tree.map(np.asarray, tree["params"])
    state = jax.tree.map(np.asarray, tree["opt_state"])
    for made in (optax.adamw(0.1), optax.adam(0.1), optax.sgd(0.1, momentum=0.9)):
        try:
            restored = flax.serialization.from_state_dict(made.init(params), state)
        except (ValueError, KeyError, TypeError):
            continue
        updates, _ = made.update(jax.tree.map(np.ones_like, params), restored, params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
        return


def _flax(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import flax.serialization

    tree = flax.serialization.msgpack_restore(path.read_bytes())
    _optax_step(tree)
    yield from _arrays(tree)
    yield from _arrays({key: tree.get(key) for key in ("params", "batch_stats")})  # slots have the same names


def _orbax(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    import orbax.checkpoint as ocp

    folder = next(iter(sorted(each.parent for each in path.rglob("_METADATA"))))
    tree = ocp.PyTreeCheckpointer().restore(folder)
    _optax_step(tree)
    yield from _arrays(tree)
    yield from _arrays({key: tree.get(key) for key in ("params", "batch_stats")})


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "torch": (_torch, ("torch",)),
    "lightning": (_torch, ("torch",)),
    "hf": (_folder, ("torch", "safetensors")),
    "accelerate": (_folder, ("torch", "safetensors")),
    "safetensors": (_safetensors, ("torch", "safetensors")),
    "dcp": (_distributed, ("torch",)),
    "megatron": (_distributed, ("torch",)),
    "deepspeed": (_deepspeed, ("torch",)),
    "tensorflow": (_tensorflow, ("tensorflow",)),
    "keras": (_keras, ("keras",)),
    "flax": (_flax, ("flax", "optax")),
    "orbax": (_orbax, ("orbax",)),
}
"""Programs that read each format, but for those that tests of their own drive: onnxruntime-training, NeMo, Ray."""


def _agree(source: Checkpoint, found: Named, format: str) -> None:
    """All weights are there; in place of narrow ones, their float32 copies may be."""
    copies = {name: slots.get("master") for each in source.optimizers for name, slots in each.slots.items()}
    trained = {name for each in source.optimizers for group in each.groups for name in group.parameters}
    for name, tensor in source.tensors.items():
        if tensor.dtype.kind in "iub" or (format == "deepspeed" and name not in trained):  # which restores no buffers
            continue
        held = [each.array().astype(np.float32) for each in (tensor, copies.get(name)) if each is not None]
        theirs = [found[name]] if name in found else found.values()  # Keras and TensorFlow name places of objects
        assert any(np.array_equal(one, other.astype(np.float32)) for one in held for other in theirs), name


@pytest.mark.parametrize("format", sorted({each.name for each in writable().values()}))
@pytest.mark.parametrize("name", WRITTEN)
def test_pairs(name: str, format: str, tmp_path: Path) -> None:
    path = tmp_path / f"written{writable()[format].ending}"
    source = onward.open_checkpoint(CHECKPOINTS / name)
    if format not in WRITTEN[name].split():
        with pytest.raises(onward.Error) as caught:
            onward.to_checkpoint(source, path, format=format)
        assert caught.value.hint and not path.exists() and not [*tmp_path.iterdir()]
        return
    onward.to_checkpoint(source, path, format=format)
    again = onward.open_checkpoint(path)
    assert len(again.tensors) >= len([each for each in source.tensors.values() if each.shape])
    if format in READERS:
        read, modules = READERS[format]
        for module in modules:
            pytest.importorskip(module)
        _agree(source, dict(read(path)), format)
