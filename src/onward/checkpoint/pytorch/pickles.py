"""Pickles as data. Nothing that a pickle names is imported, made or called.

A pickle is a program for a small machine with a stack. The machine is Python's own, in its pure form; where it would
look up a class or function it gets a `Name`, and what it makes of one is an `Object`. The few names that checkpoints
are made of (dicts, sets, arrays of numpy) become what they stand for, made here.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from onward.checkpoint.pytorch.objects import Attributed, Name, Object, WithDefault
from onward.errors import InvalidModelError
from onward.model.storage.files import blame_file

Maker = Callable[..., Any]

MOST_BYTES = 1 << 30
"""Of a pickle itself, which holds no tensors: more is not one of a checkpoint."""

_MALFORMED = (
    pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError, ValueError, OverflowError,
    RecursionError, struct.error,
)  # fmt: skip
"""What the machine raises when a program makes no sense."""


def read_pickle(
    data: bytes, of: str, *, makers: Mapping[tuple[str, str], Maker] | None = None, persistent: Maker | None = None
) -> Any:
    """What a pickle holds. `of` is the file that it is from, for messages.

    `makers` are further names that become what they stand for. `persistent` is given what the pickle keeps elsewhere,
    such as the data of tensors.
    """
    if len(data) > MOST_BYTES:
        raise InvalidModelError(f"the pickle in `{of}` is larger than any of a checkpoint")
    machine = _Machine(io.BytesIO(data), {**_MAKERS, **(makers or {})}, persistent, of)
    with blame_file(f"the pickle in `{of}` is damaged", *_MALFORMED):
        return _finish(machine.load(), {})


Named = dict[tuple[str, Name], str]
"""What pickles name, by file: what it is called with first, in short."""
_MOST_NAMES = 10_000
_NAMED: contextvars.ContextVar[Named | None] = contextvars.ContextVar("named", default=None)


@contextlib.contextmanager
def note_names() -> Iterator[Named]:
    """What the pickles that are read meanwhile name and call: also what they throw away, which no tree holds."""
    named: Named = {}
    token = _NAMED.set(named)
    try:
        yield named
    finally:
        _NAMED.reset(token)


def _in_short(arguments: Any) -> str:
    if not isinstance(arguments, tuple | list):
        return ""
    return ", ".join(
        repr(each[:60] if isinstance(each, str | bytes) else each)
        if isinstance(each, str | bytes | int | float | None)
        else "..."
        for each in arguments[:3]
    )


_Pure: Any = pickle._Unpickler  # the one written in C cannot be kept from making instances


class _Machine(_Pure):  # type: ignore[misc]  # it is not in the library's declarations
    dispatch: ClassVar = dict(_Pure.dispatch)

    def __init__(self, file: io.BytesIO, makers: Mapping[tuple[str, str], Maker], persistent: Maker | None, of: str):
        super().__init__(file, encoding="latin-1")  # of numpy's arrays, as Python 2 wrote them
        self._makers = makers
        self._persistent = persistent
        self._of = of
        self._named = _NAMED.get()

    def find_class(self, module: str, name: str) -> Maker:
        made = self._makers.get((module, name))
        if made is not None:
            return made
        self._note(found := Name(module, name), "")
        return found

    def _note(self, name: Any, called_with: str) -> None:
        if self._named is None or not isinstance(name, Name) or self._named.get((self._of, name)):
            return
        if len(self._named) >= _MOST_NAMES:
            raise pickle.UnpicklingError("it names more classes and functions than any checkpoint does")
        self._named[self._of, name] = called_with

    def _call(self, made_by: Maker, arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        self._note(made_by, f"({_in_short(arguments)})")
        return made_by(*arguments, **(keywords or {}))

    def persistent_load(self, key: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to something elsewhere")
        return self._persistent(key)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it uses a registry of Python's, which is not read")

    def _load_object(self) -> None:
        arguments = self.stack.pop()
        self.stack.append(self._call(self.stack.pop(), arguments))

    def _load_object_with_keywords(self) -> None:
        keywords, arguments = self.stack.pop(), self.stack.pop()
        self.stack.append(self._call(self.stack.pop(), arguments, keywords))

    def _load_instance(self) -> None:
        self._load_object()
        _mark_instance(self.stack[-1])

    def _load_instance_with_keywords(self) -> None:
        self._load_object_with_keywords()
        _mark_instance(self.stack[-1])

    # These make instances without calling a class, and reduce and build ask objects for methods: here all are calls.
    dispatch[pickle.NEWOBJ[0]] = _load_instance
    dispatch[pickle.NEWOBJ_EX[0]] = _load_instance_with_keywords
    dispatch[pickle.REDUCE[0]] = _load_object

    def _load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, Object | Attributed | _Array | _Type):
            raise pickle.UnpicklingError(f"it gives attributes to a {type(made).__name__}")
        made.__setstate__(state)

    dispatch[pickle.BUILD[0]] = _load_build

    def _load_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(min(size, MOST_BYTES))))  # Python makes room for all that is claimed

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def _instantiate(self, made_by: Maker, arguments: Any) -> None:
        self.append(self._call(made_by, arguments))


def _mark_instance(made: Any) -> None:
    if isinstance(made, Object):
        made.is_instance = True


# ---- what names become -----------------------------------------------------------------------------------------------


class _Type:
    """A type of numpy."""

    def __init__(self, code: Any, *_: Any):
        self._code = str(code)
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    def dtype(self) -> np.dtype:
        found = np.dtype(self._code)
        if found.hasobject or found.fields:
            raise ValueError(f"`{self._code}` is no type of numbers")
        return found.newbyteorder(">") if self._order == ">" else found


class _Array:
    """An array of numpy, which is made first and gets its contents later."""

    def __init__(self, *_: Any):
        self.content: np.ndarray | list[Any] = []

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if isinstance(content, list):  # of objects
            self.content = content
            return
        data = content.encode("latin-1") if isinstance(content, str) else content
        flat = np.frombuffer(data, kind.dtype())
        native = flat.astype(flat.dtype.newbyteorder("="), copy=False)  # as numpy's own reader does
        self.content = native.reshape(shape, order="F" if is_fortran else "C")


def _finish(tree: Any, seen: dict[int, Any]) -> Any:
    """A tree in which arrays and types are those of numpy. Each thing is looked at once, however often it is there."""
    if id(tree) in seen:
        return seen[id(tree)]
    if isinstance(tree, _Array | _Type):
        made: Any = tree.content if isinstance(tree, _Array) else tree.dtype()
        seen[id(tree)] = made
        return _finish(made, seen) if isinstance(made, list) else made
    seen[id(tree)] = tree
    if isinstance(tree, dict):
        tree.update({key: _finish(value, seen) for key, value in tree.items()})
    elif isinstance(tree, list):
        tree[:] = [_finish(item, seen) for item in tree]
    elif type(tree) is tuple:
        seen[id(tree)] = tree = tuple(_finish(item, seen) for item in tree)
    elif isinstance(tree, Object):
        for part in ("arguments", "keywords", "state", "items", "entries"):
            setattr(tree, part, _finish(getattr(tree, part), seen))
    if isinstance(tree, Attributed):
        tree.attributes = _finish(tree.attributes, seen)
    return tree


def _scalar(kind: _Type, content: Any = b"") -> Any:
    data = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(data, kind.dtype())[0]


def _encode(text: str, encoding: str = "latin-1") -> bytes:
    """How protocols before the third write bytes."""
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError(f"it writes bytes in `{encoding}`")
    return text.encode(encoding)


_PLAIN: tuple[Any, ...] = (set, frozenset, complex)
_NUMPY: dict[str, Maker] = {"_reconstruct": _Array, "scalar": _scalar}
_MAKERS: dict[tuple[str, str], Maker] = {
    ("collections", "OrderedDict"): Attributed,
    ("collections", "defaultdict"): WithDefault,
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _Array,
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in _PLAIN},
    **{(f"numpy.{core}.multiarray", name): make for core in ("core", "_core") for name, make in _NUMPY.items()},
}
