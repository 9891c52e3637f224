"""The checkpoint that a training model was made of, in its metadata: facts, names, and all that was stored.

Tensors that are state of the model are named as they are there; others become initializers of the algorithm, with the
role `kept`, that nothing reads.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.json_trees import TooLarge, decode, encode
from onward.checkpoint.lazy_initializers import as_initializer
from onward.checkpoint.matching import Match
from onward.errors import InvalidModelError, advising, warn
from onward.model import Model
from onward.model.state import KEPT, with_tags
from onward.model.storage.files import SENSELESS, blame_file
from onward.run_state.state import MASTER
from onward.run_state.tensors import ModelTensor, StoredTensor, Tensor, convert_dtype, transpose

FACT = "train.checkpoint"
_FOLDER = "checkpoint/"
_SMALL = 64
"""Bytes of tensors that are written out."""


def keep(model: Model, checkpoint: Checkpoint, matched: Match) -> None:
    """Write down what a training model was made of, in its first step."""
    keeping = _Keeping(model, checkpoint, matched)
    try:
        form = encode(checkpoint, keeping.name_of)
    except TooLarge:
        warn(
            f"what else `{checkpoint.path}` holds has no end, and is not kept: a checkpoint of this model is a new one"
        )
        return
    facts = {"names": dict(matched.names), "turned": sorted(matched.turned), "checkpoint": form}
    model.step().algorithm.metadata_props[FACT] = json.dumps(facts)


class _Keeping:
    def __init__(self, model: Model, checkpoint: Checkpoint, matched: Match):
        self._model = model
        self._algorithm = model.step().algorithm
        self._names: dict[Any, dict[str, Any]] = {}
        self._others = 0
        self._random = {
            _key(each.state): {"rng": each.kind, "rank": str(each.rank)}
            for each in checkpoint.randomness
            if isinstance(each.state, Tensor)
        }
        for theirs, ours in matched.names.items():
            self._know(checkpoint.tensors[theirs], ours, theirs in matched.turned)
        for theirs, tensor in checkpoint.averages.items():
            if self._has(name := f"ema/{matched.names.get(theirs, '')}"):
                self._know(tensor, name, theirs in matched.turned)
        for optimizer in checkpoint.optimizers:
            for key, slots in optimizer.slots.items():
                theirs = str(key)
                ours = matched.names.get(theirs, "")
                is_turned = theirs in matched.turned
                for slot, kept in slots.items():
                    name = f"{ours}/{slot}"
                    if slot == MASTER and name not in self._algorithm.initializers:
                        name = ours  # the model has its weights in float32 themselves
                    if isinstance(kept, Tensor) and self._has(name):
                        self._know(kept, name, is_turned)

    def _has(self, name: str) -> bool:
        return name in self._algorithm.initializers or name in self._model.graph.initializers

    def _know(self, tensor: Tensor, name: str, is_turned: bool) -> None:
        form: dict[str, Any] = {"name": name, "dtype": tensor.dtype.name}
        if is_turned and len(tensor.shape) == 2:
            form["turned"] = True
        self._names[_key(tensor)] = form

    def name_of(self, tensor: Tensor) -> dict[str, Any] | None:
        """How a tensor is named; one that the model has no place for gets one, unless it is small."""
        key = _key(tensor)
        if key not in self._names and tensor.nbytes <= _SMALL:
            return None
        if key not in self._names:
            name = f"{_FOLDER}{self._others}"
            self._others += 1
            described = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(_type(tensor.dtype)))
            described.const_value = with_tags(as_initializer(tensor, name), role=KEPT, **self._random.get(key, {}))
            self._algorithm.initializers[name] = described
            self._know(tensor, name, is_turned=False)
        return self._names[key]


def _type(dtype: np.dtype) -> ir.DataType:
    return ir.DataType.from_numpy(dtype)


def _key(tensor: Tensor) -> Any:
    """Equal for tensors that are the same one."""
    return tensor if isinstance(tensor, StoredTensor) else id(tensor)


class Kept(NamedTuple):
    """The checkpoint that a training model was made of."""

    checkpoint: Checkpoint
    """With tensors as they are now."""
    match: Match


def source_of(model: Model) -> Kept | None:
    """What a training model was made of; None if it was made of no checkpoint."""
    text = model.step().algorithm.metadata_props.get(FACT)
    if text is None:
        return None
    found: dict[str, Tensor] = {}

    def tensor_of(form: Any) -> Tensor:
        key = json.dumps(form, sort_keys=True)
        if key not in found:
            held = model.initializer(str(form["name"])).const_value
            assert held is not None
            tensor: Tensor = ModelTensor(held)
            tensor = transpose(tensor) if form.get("turned") else tensor
            found[key] = convert_dtype(tensor, np.dtype(form["dtype"]))
        return found[key]

    with advising("make the training model of the checkpoint again"):
        with blame_file("the checkpoint that the training model keeps is damaged", *SENSELESS, RecursionError):
            facts = json.loads(text)
            matched = Match({str(a): str(b) for a, b in facts["names"].items()}, frozenset(map(str, facts["turned"])))
            form = facts["checkpoint"]
        made = decode(form, tensor_of)
        if not isinstance(made, Checkpoint):
            raise InvalidModelError("what the training model keeps is no checkpoint")
    return Kept(made, matched)
