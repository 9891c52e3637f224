"""A checkpoint as JSON, for the metadata of a training model: what is not understood is kept, and given back equal.

Tensors are named: those that are state of the model by their names there, others by names that the caller chooses. What
JSON has no form for is an object with one key that begins with `$`. Objects of a pickle may know one another: each is
written once, with a number, and named by it elsewhere.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from onward.arguments import fitting
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytorch.objects import Attributed, Name, Object, WithDefault
from onward.model.storage.files import SENSELESS, blame_file
from onward.recipe.spec import Spec
from onward.run_state.state import Group, Optimizer, RandomState, Schedule
from onward.run_state.tensors import ArrayTensor, Tensor

_MOST = 2_000_000
"""Parts of a tree that is kept: a small pickle can describe one without end, naming the same part again and again."""
_LARGEST_KEY = 1 << 60
"""From here on, Python gives several integers the same hash, and a dict of them takes the square of its size."""
RECORDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "Checkpoint": (
        Checkpoint,
        (
            "path", "format", "title", "tensors", "optimizers", "schedules", "step", "since", "progress", "randomness",
            "data", "scaler", "averages", "average_decay", "average_updates", "clip", "accumulate", "waiting", "loss",
            "tied", "keeps_order", "configuration", "arguments", "layout", "files", "trees", "executes", "remarks",
        ),
    ),
    "Group": (Group, ("settings", "parameters", "optimizer", "rate", "numbers")),
    "Optimizer": (Optimizer, ("families", "groups", "slots", "variant")),
    "RandomState": (RandomState, ("kind", "state", "rank")),
    "Schedule": (Schedule, ("state", "words", "position", "every")),
    "Spec": (Spec, ("name", "options")),
}  # fmt: skip
"""What has a JSON form: the name in files, and the fields that are written, in their order."""
_NAMES = {kind: name for name, (kind, _) in RECORDS.items()}

NameOf = Callable[[Tensor], Any]
TensorOf = Callable[[Any], Tensor]


class TooLarge(Exception):
    """A tree that is too large, or endless."""


def encode(tree: Any, name_of: NameOf) -> Any:
    """A tree as JSON. `name_of` says how a tensor is named; one without a name is written out."""
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
            return self._tensor(tree)
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
            kind = "$array" if isinstance(tree, np.ndarray) else "$number"
            return {kind: [_kind(tree.dtype), list(tree.shape), _text(np.ascontiguousarray(tree).tobytes())]}
        if isinstance(tree, np.dtype):
            return {"$dtype": _kind(tree)}
        if isinstance(tree, Name):
            return {"$name": [tree.module, tree.name]}
        if isinstance(tree, Object):
            number = self._objects[id(tree)] = len(self._objects)
            parts = (tree.of, tree.arguments, tree.keywords, tree.state, tree.items, tree.entries, tree.is_instance)
            return {"$object": [*map(self.encode, parts), number]}
        if (name := _NAMES.get(type(tree))) is not None:
            return {f"${name}": {field: self.encode(getattr(tree, field)) for field in RECORDS[name][1]}}
        if isinstance(tree, Path):
            return {"$path": str(tree)}
        raise TypeError(f"a {type(tree).__name__} cannot be kept")

    def _tensor(self, tensor: Tensor) -> Any:
        name = self._name_of(tensor)
        if name is not None:
            return {"$t": name}
        array = tensor.array()
        return {"$tensor": [_kind(array.dtype), list(array.shape), _text(np.ascontiguousarray(array).tobytes())]}

    def _entries(self, tree: Mapping[Any, Any]) -> list[Any]:
        return [[self.encode(key), self.encode(value)] for key, value in tree.items()]

    def _list(self, items: Any) -> list[Any]:
        return [self.encode(item) for item in items]


def _kind(dtype: np.dtype) -> str:
    return dtype.str if dtype.kind in "SUmM" else dtype.name


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(form: Any, tensor_of: TensorOf) -> Any:
    """The tree that JSON holds. `tensor_of` finds a tensor by what it was named."""
    decoder = _Decoder(tensor_of)
    with blame_file("the checkpoint that the training model keeps is damaged", *SENSELESS, RecursionError):
        tree = decoder.decode(form)
        decoder.refuse_unknown()
        return tree


class _Decoder:
    def __init__(self, tensor_of: TensorOf):
        self._tensor_of = tensor_of
        self._objects: dict[int, Object] = {}

    def refuse_unknown(self) -> None:
        if not all(made.of.name for made in self._objects.values()):
            raise ValueError("it names what it does not hold")

    def decode(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.decode(item) for item in form]
        if not isinstance(form, dict):
            return form
        if len(form) == 1 and (key := next(iter(form))).startswith("$"):
            return self._decode_tagged(key[1:], form[key])
        return {key: self.decode(value) for key, value in form.items()}

    def _decode_tagged(self, kind: str, form: Any) -> Any:
        simple: dict[str, Callable[[Any], Any]] = {
            "float": float,
            "t": self._tensor_of,
            "tuple": lambda items: tuple(self.decode(items)),
            "set": lambda items: set(self.decode(items)),
            "frozenset": lambda items: frozenset(self.decode(items)),
            "bytes": base64.b64decode,
            "bytearray": lambda text: bytearray(base64.b64decode(text)),
            "complex": lambda parts: complex(*self.decode(parts)),
            "array": _array,
            "number": lambda parts: _array(parts)[()],
            "tensor": lambda parts: ArrayTensor(_array(parts)),
            "dtype": np.dtype,
            "name": lambda parts: Name(*parts),
            "object": self._object,
            "again": self._find_object,
            "dict": self._entries,
            "path": Path,
        }
        if kind in simple:
            return simple[kind](form)
        if kind in ("ordered", "defaultdict"):
            return self._decode_attributed(kind, form)
        record, names = RECORDS[kind]
        fields = {name: self.decode(value) for name, value in form.items()}
        for name, hint in get_type_hints(record).items():
            if name in fields:
                fitting(f"`{name}`", fields[name], hint)
        if not fields.keys() <= {*names} or any(not isinstance(x, str | int) for x in fields.get("parameters", ())):
            raise ValueError(f"it holds no {kind}")
        return record(**fields)

    def _entries(self, form: Any) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for stored, value in form:
            key = self.decode(stored)
            if isinstance(key, int) and abs(key) >= _LARGEST_KEY:
                raise ValueError("a key is a larger number than any of a checkpoint")
            found[key] = self.decode(value)
        return found

    def _decode_attributed(self, kind: str, form: Any) -> Attributed:
        arguments, attributes = self.decode(form[1:]) if len(form) > 1 else ((), None)
        made = WithDefault(*arguments) if kind == "defaultdict" else Attributed()
        made.update(self._entries(form[0]))
        made.attributes = attributes
        return made

    def _find_object(self, number: int) -> Object:
        return self._objects.setdefault(number, Object(Name("", "")))

    def _object(self, form: Any) -> Object:
        made = self._find_object(form[7])
        made.of, made.arguments, made.keywords, made.state, made.items, entries, made.is_instance = self.decode(
            form[:7]
        )
        made.entries = [tuple(entry) for entry in entries]
        return made


def _array(parts: Any) -> np.ndarray:
    kind, shape, text = parts
    return np.frombuffer(base64.b64decode(text), np.dtype(kind)).reshape(shape)
