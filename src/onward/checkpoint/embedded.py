"""The checkpoint that a training model was made of, in its metadata: facts, names, and all that was
stored.

Tensors that are state of the model are stored by name. Others become initializers of the algorithm
with the role `kept`, which nothing reads.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx_ir as ir

from onward.arguments import coerce
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.name_matching import Match
from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object, WithDefault
from onward.errors import InvalidModelError, default_hint, warn
from onward.model import Model
from onward.model.state import KEPT, with_tags
from onward.model.storage.files import SENSELESS, blame_file
from onward.recipe.spec import Spec
from onward.run_state.state import MASTER, OptimizerState, ParameterGroup, RandomState, SchedulerState
from onward.run_state.tensors import (
    ArrayTensor,
    ModelTensor,
    StoredTensor,
    Tensor,
    as_initializer,
    convert_dtype,
    transpose,
)

FACT = "train.checkpoint"
_FOLDER = "checkpoint/"
_SMALL = 64
"""Largest size in bytes of a tensor that is written into the JSON."""


def embed(model: Model, checkpoint: Checkpoint, matched: Match) -> None:
    """Store a checkpoint in the first step of the training model that was made of it."""
    storage = _TensorNames(model, checkpoint, matched)
    try:
        form = encode(checkpoint, storage.name_of)
    except TooLarge:
        warn(f"`{checkpoint.path}` is too large to embed; exports of this model start a new checkpoint")
        return
    facts = {"names": dict(matched.names), "turned": sorted(matched.transposed), "checkpoint": form}
    model.step().algorithm.metadata_props[FACT] = json.dumps(facts)


class _TensorNames:
    """Names under which a training model stores the tensors of its checkpoint."""

    def __init__(self, model: Model, checkpoint: Checkpoint, matched: Match):
        self._model = model
        self._algorithm = model.step().algorithm
        self._names: dict[Any, dict[str, Any]] = {}
        self._others = 0
        self._random = {
            _key(generator.state): {"rng": generator.kind, "rank": str(generator.rank)}
            for generator in checkpoint.randomness
            if isinstance(generator.state, Tensor)
        }
        for stored_name, graph_name in matched.names.items():
            self._register(checkpoint.tensors[stored_name], graph_name, stored_name in matched.transposed)
        for stored_name, tensor in checkpoint.averages.items():
            if self._has(state_name := f"ema/{matched.names.get(stored_name, '')}"):
                self._register(tensor, state_name, stored_name in matched.transposed)
        for key, slot, value in checkpoint.stored_slots:
            graph_name = matched.names.get(str(key), "")
            state_name = f"{graph_name}/{slot}"
            if slot == MASTER and state_name not in self._algorithm.initializers:
                state_name = graph_name  # the weights of the model are in float32 themselves
            if isinstance(value, Tensor) and self._has(state_name):
                self._register(value, state_name, str(key) in matched.transposed)

    def _has(self, name: str) -> bool:
        return name in self._algorithm.initializers or name in self._model.graph.initializers

    def _register(self, tensor: Tensor, name: str, is_transposed: bool) -> None:
        form: dict[str, Any] = {"name": name, "dtype": tensor.dtype.name}
        self._names[_key(tensor)] = {**form, "turned": True} if is_transposed and len(tensor.shape) == 2 else form

    def name_of(self, tensor: Tensor) -> dict[str, Any] | None:
        """Return the stored name of a tensor; None for a small one, which is written out."""
        key = _key(tensor)
        if key not in self._names and tensor.nbytes <= _SMALL:
            return None
        if key not in self._names:
            name = f"{_FOLDER}{self._others}"
            self._others += 1
            tensor_type = ir.TensorType(ir.DataType.from_numpy(tensor.dtype))
            value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=tensor_type)
            value.const_value = with_tags(as_initializer(tensor, name), role=KEPT, **self._random.get(key, {}))
            self._algorithm.initializers[name] = value
            self._register(tensor, name, is_transposed=False)
        return self._names[key]


def rounded_types(checkpoint: Checkpoint, types: Mapping[str, np.dtype]) -> str:
    """Return the dtypes of a checkpoint's tensors that a model has in another type, without a float32 copy."""
    masters = {name for name, slot, _ in checkpoint.stored_slots if slot == MASTER}
    pairs = ((checkpoint.tensors[name].dtype, dtype) for name, dtype in types.items() if name not in masters)
    return ", ".join(sorted({str(stored) for stored, dtype in pairs if stored != dtype}))


def _key(tensor: Tensor) -> Any:
    """Return a key that is equal for the same tensor."""
    return tensor if isinstance(tensor, StoredTensor) else id(tensor)


def embedded_checkpoint(model: Model) -> tuple[Checkpoint, Match] | None:
    """Return the checkpoint that a training model was made of, with current values, and names."""
    text = model.step().algorithm.metadata_props.get(FACT)
    if text is None:
        return None
    tensors: dict[str, Tensor] = {}

    def tensor_of(form: Any) -> Tensor:
        key = json.dumps(form, sort_keys=True)
        if key not in tensors:
            value = model.initializer(str(form["name"])).const_value
            assert value is not None
            tensor = transpose(ModelTensor(value)) if form.get("turned") else ModelTensor(value)
            tensors[key] = convert_dtype(tensor, np.dtype(form["dtype"]))
        return tensors[key]

    with default_hint("make the training model of the checkpoint again"):
        with blame_file("the checkpoint that the training model keeps is damaged", *SENSELESS, RecursionError):
            facts = json.loads(text)
            matched = Match({str(a): str(b) for a, b in facts["names"].items()}, frozenset(map(str, facts["turned"])))
            form = facts["checkpoint"]
        checkpoint = decode(form, tensor_of)
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidModelError("the training model does not hold a valid checkpoint")
    return checkpoint, matched


# ---- checkpoints as JSON ---------------------------------------------------------------------------------------------


_MOST = 2_000_000
"""Largest number of nodes of a tree: a small pickle can describe an endless one by repetition."""
_LARGEST_KEY = 1 << 60
"""Integers from which on Python's hashes collide, so that a dict of them takes quadratic time."""
RECORDS: dict[type, tuple[str, tuple[str, ...]]] = {
    Checkpoint: (
        "Checkpoint",
        (
            "path", "format", "module", "title", "tensors", "optimizers", "schedules", "step", "since", "progress",
            "randomness", "data", "scaler", "averages", "average_decay", "average_updates", "clip", "accumulate",
            "waiting", "loss", "tied", "keeps_order", "configuration", "arguments", "layout", "files", "trees",
            "executes", "remarks",
        ),
    ),
    ParameterGroup: ("Group", ("settings", "parameters", "optimizer", "rate", "numbers")),
    OptimizerState: ("Optimizer", ("families", "groups", "slots", "variant")),
    RandomState: ("RandomState", ("kind", "state", "rank")),
    SchedulerState: ("Schedule", ("state", "words", "position", "every")),
    Spec: ("Spec", ("name", "options")),
}  # fmt: skip
"""Records with a JSON form: the name in files and the fields that are written, in order."""
_TAGS = {name: (record, fields) for record, (name, fields) in RECORDS.items()}

NameOf = Callable[[Tensor], Any]
TensorOf = Callable[[Any], Tensor]


class TooLarge(Exception):
    """Raised for a tree that is too large or endless."""


def encode(tree: Any, name_of: NameOf) -> Any:
    """Return a tree as JSON. Tensors without a `name_of` are written out."""
    return _Encoder(name_of).encode(tree)


class _Encoder:
    def __init__(self, name_of: NameOf):
        self._name_of = name_of
        self._parts = 0
        self._inside: set[int] = set()
        self._objects: dict[int, int] = {}

    def encode(self, tree: Any) -> Any:
        if id(tree) in self._objects:
            return {"$again": self._objects[id(tree)]}
        self._parts += 1
        if self._parts > _MOST or id(tree) in self._inside or len(self._inside) > 200:
            raise TooLarge
        self._inside.add(id(tree))
        try:
            return self._form(tree)
        finally:
            self._inside.discard(id(tree))

    def _form(self, tree: Any) -> Any:
        if tree is None or isinstance(tree, bool | str) or type(tree) is int:
            return tree
        if type(tree) is float:
            return tree if math.isfinite(tree) else {"$float": str(tree)}
        if isinstance(tree, Tensor):
            name = self._name_of(tree)
            return {"$tensor": _array_form(tree.array())} if name is None else {"$t": name}
        if isinstance(tree, Attributed):
            key = "$defaultdict" if isinstance(tree, WithDefault) else "$ordered"
            rest = [] if tree.attributes is None and not tree.arguments else [tree.arguments, tree.attributes]
            return {key: [self._entries(tree), *map(self.encode, rest)]}
        if isinstance(tree, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in tree):
                return {key: self.encode(value) for key, value in tree.items()}
            return {"$dict": self._entries(tree)}
        if type(tree) is list:
            return self._list(tree)
        return self._encode_tagged(tree)

    def _encode_tagged(self, tree: Any) -> Any:
        if type(tree) is tuple:
            return {"$tuple": self._list(tree)}
        if isinstance(tree, set | frozenset):
            return {f"${type(tree).__name__}": self._list(sorted(tree, key=repr))}
        if isinstance(tree, bytes | bytearray):
            return {f"${type(tree).__name__}": _text(bytes(tree))}
        if isinstance(tree, complex):
            return {"$complex": [self.encode(tree.real), self.encode(tree.imag)]}
        if isinstance(tree, np.ndarray | np.generic):
            return {"$array" if isinstance(tree, np.ndarray) else "$number": _array_form(tree)}
        if isinstance(tree, np.dtype):
            return {"$dtype": _dtype_name(tree)}
        if isinstance(tree, Name):
            return {"$name": [tree.module, tree.name]}
        if isinstance(tree, Object):
            number = self._objects[id(tree)] = len(self._objects)
            fields = (tree.of, tree.arguments, tree.keywords, tree.state, tree.items, tree.entries, tree.is_instance)
            return {"$object": [*map(self.encode, fields), number]}
        if type(tree) in RECORDS:
            name, names = RECORDS[type(tree)]
            return {f"${name}": {field: self.encode(getattr(tree, field)) for field in names}}
        if isinstance(tree, Path):
            return {"$path": str(tree)}
        raise TypeError(f"a {type(tree).__name__} cannot be kept")

    def _entries(self, tree: Mapping[Any, Any]) -> list[Any]:
        return [[self.encode(key), self.encode(value)] for key, value in tree.items()]

    def _list(self, items: Any) -> list[Any]:
        return [self.encode(item) for item in items]


def _array_form(array: np.ndarray | np.generic) -> list[Any]:
    return [_dtype_name(array.dtype), list(array.shape), _text(np.ascontiguousarray(array).tobytes())]


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "SUmM" else dtype.name


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(form: Any, tensor_of: TensorOf) -> Any:
    """Return the tree of a JSON form. `tensor_of` returns the tensor with a stored name."""
    decoder = _Decoder(tensor_of)
    with blame_file("the checkpoint that the training model keeps is damaged", *SENSELESS, RecursionError):
        tree = decoder.decode(form)
        if not all(item.of.name for item in decoder.objects.values()):
            raise ValueError("it refers to an object that it does not hold")
        return tree


class _Decoder:
    def __init__(self, tensor_of: TensorOf):
        self._tensor_of = tensor_of
        self.objects: dict[int, Object] = {}

    def decode(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.decode(item) for item in form]
        if not isinstance(form, dict):
            return form
        if len(form) == 1 and (key := next(iter(form))).startswith("$"):
            return self._decode_tagged(key[1:], form[key])
        return {key: self.decode(value) for key, value in form.items()}

    def _decode_tagged(self, tag: str, form: Any) -> Any:
        simple: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "t": self._tensor_of,
            "tuple": lambda items: tuple(self.decode(items)),
            "set": lambda items: set(self.decode(items)),
            "frozenset": lambda items: frozenset(self.decode(items)),
            "bytes": base64.b64decode,
            "bytearray": lambda text: bytearray(base64.b64decode(text)),
            "complex": lambda numbers: complex(*self.decode(numbers)),
            "array": _array,
            "number": lambda form: _array(form)[()],
            "tensor": lambda form: ArrayTensor(_array(form)),
            "dtype": np.dtype,
            "name": lambda words: Name(*words),
            "object": self._object,
            "again": self._object_numbered,
            "dict": self._entries,
            "path": Path,
        }
        if tag in simple:
            return simple[tag](form)
        if tag in ("ordered", "defaultdict"):
            return self._decode_attributed(tag, form)
        record, names = _TAGS[tag]
        fields = {name: self.decode(value) for name, value in form.items()}
        for name, hint in get_type_hints(record).items():
            if name in fields:
                coerce(f"`{name}`", fields[name], hint)
        if not fields.keys() <= {*names} or any(not isinstance(x, str | int) for x in fields.get("parameters", ())):
            raise ValueError(f"it has no valid {tag}")
        return record(**fields)

    def _entries(self, form: Any) -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        for stored, value in form:
            key = self.decode(stored)
            if isinstance(key, int) and abs(key) >= _LARGEST_KEY:
                raise ValueError("a key is a larger number than any of a checkpoint")
            entries[key] = self.decode(value)
        return entries

    def _decode_attributed(self, tag: str, form: Any) -> Attributed:
        arguments, attributes = self.decode(form[1:]) if len(form) > 1 else ((), None)
        mapping = WithDefault(*arguments) if tag == "defaultdict" else Attributed()
        mapping.update(self._entries(form[0]))
        mapping.attributes = attributes
        return mapping

    def _object_numbered(self, number: int) -> Object:
        return self.objects.setdefault(number, Object(Name("", "")))

    def _object(self, form: Any) -> Object:
        item, fields = self._object_numbered(form[7]), self.decode(form[:7])
        item.of, item.arguments, item.keywords, item.state, item.items, entries, item.is_instance = fields
        item.entries = [tuple(entry) for entry in entries]
        return item


def _array(form: Any) -> np.ndarray:
    dtype, shape, text = form
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(shape)
