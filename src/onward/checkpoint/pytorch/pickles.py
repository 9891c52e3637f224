"""Pickles as data. Nothing that a pickle names is imported, made or called.

A pickle is a program for a small machine with a stack. The machine is Python's own, in its pure form; where it would
look up a class or function it gets a `Name`, and what it makes of one is an `Object`. The few names that checkpoints
are made of (dicts, sets, arrays of numpy) become what they stand for, made here.

A pickle of 500 bytes can describe a tree of 2 ** 60 parts by naming the same part again and again, and can make Python
hash all of them. The machine therefore counts its operations, checks keys before they are hashed, and refuses trees
that are much larger written out than as a pickle. Walks over a tree that was read need no limit of their own.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from onward.checkpoint.pytorch.pickling import Attributed, Name, Object, WithDefault
from onward.errors import InvalidModelError
from onward.model.storage.files import blame_file

Maker = Callable[..., Any]

MOST_BYTES = 1 << 30
"""Of a pickle itself, which holds no tensors: more is not one of a checkpoint."""
_MOST_OPERATIONS = 20_000_000
"""Of the machine. One makes at most a set of 216 bytes: 4 GB in all. A checkpoint of 60,000 experts takes 9 million."""
_BYTES_PER_OPERATION = 16
"""Bytes that a call may copy and still counts as one operation: a tuple of characters has 8 bytes for each."""
_LONGEST_NAME, _WIDEST_INTEGER = 500, 1_024
"""Characters of a class with its module; bytes of an integer, of which Python prints 1,800."""
_LARGEST_KEY, _MOST_KEYS, _MOST_KEY = 100, 10_000, 1 << 60
"""Parts of a tuple that is a key; keys that are not text, numbers or objects, which may all have the same hash; and the
integers from which on Python gives several the same hash."""
_PART, _FREE, _EXPANSION = 16, 1 << 18, 64
"""A tree may take 256 KB, and 64 times the bytes of its pickle, where each part counts 16 and text its length. A pickle
has at least one byte for a part. Those of PyTorch, Lightning, DeepSpeed and Megatron take 1 to 10 times."""
_DEEPEST = 200
"""Parts inside each other: a walk takes three frames of Python's 1,000 for each."""

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
    file = io.BytesIO(data) if len(data) < _MOST_OPERATIONS else _Counted(data)
    machine = _Machine(file, {**_MAKERS, **(makers or {})}, persistent, of)
    with blame_file(f"the pickle in `{of}` is damaged", *_MALFORMED):
        tree = _finish(machine.load(), {}, 0)
        _refuse_expansion(tree, _FREE + _EXPANSION * len(data))
        return tree


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


def _in_short(arguments: tuple[Any, ...] | list[Any]) -> str:
    return ", ".join(
        repr(each[:60] if isinstance(each, str | bytes) else each)
        if isinstance(each, str | bytes | int | float | None)
        else "..."
        for each in arguments[:3]
    )


_Pure: Any = pickle._Unpickler  # the one written in C cannot be kept from making instances


_TOO_MANY = "it takes more operations than any of a checkpoint"


class _Counted(io.BytesIO):
    """The bytes of a pickle that is long enough for too many operations, each of which reads at least once."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > _MOST_OPERATIONS:
            raise pickle.UnpicklingError(_TOO_MANY)
        return super().read(size)


class _Machine(_Pure):  # type: ignore[misc]  # it is not in the library's declarations
    dispatch: ClassVar = dict(_Pure.dispatch)

    def __init__(self, file: io.BytesIO, makers: Mapping[tuple[str, str], Maker], persistent: Maker | None, of: str):
        super().__init__(file, encoding="latin-1")  # of numpy's arrays, as Python 2 wrote them
        self._operations = self._keys = 0
        self._makers = makers
        self._persistent = persistent
        self._of = of
        self._named = _NAMED.get()

    def find_class(self, module: str, name: str) -> Maker:
        made = self._makers.get((module, name))
        if made is not None:
            return made
        if len(module) + len(name) > _LONGEST_NAME:
            raise pickle.UnpicklingError("it names a class with a longer name than any has")
        self._note(found := Name(module, name), "")
        return found

    def _note(self, name: Any, called_with: str) -> None:
        if self._named is None or not isinstance(name, Name) or self._named.get((self._of, name)):
            return
        if len(self._named) >= _MOST_NAMES:
            raise pickle.UnpicklingError("it names more classes and functions than any checkpoint does")
        self._named[self._of, name] = called_with

    def _call(self, made_by: Maker, arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(arguments, tuple | list):
            raise pickle.UnpicklingError("it calls something with other than a list of arguments")
        if isinstance(made_by, Name):
            self._note(made_by, f"({_in_short(arguments)})")
        self._operations += len(arguments) + sum(_copied(each) for each in arguments if type(each) in _COPIED)
        self._operations += len(keywords or ())
        if self._operations > _MOST_OPERATIONS:
            raise pickle.UnpicklingError(_TOO_MANY)
        if made_by in (set, frozenset):
            for members in arguments:
                self._check_keys(members)
        elif made_by is Attributed:
            self._check_keys(key for pairs in arguments for key, _ in pairs)
        return made_by(*arguments, **(keywords or {}))

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash or to compare; Python does both wherever one is looked up."""
        for key in keys:
            if isinstance(key, str | bytes | float | Object | Name | None):
                continue
            if isinstance(key, int):
                if abs(key) >= _MOST_KEY:
                    raise pickle.UnpicklingError("a key is a larger number than any of a checkpoint")
                continue
            self._keys += 1
            if self._keys > _MOST_KEYS or not _is_small_key(key):
                raise pickle.UnpicklingError("its keys have more parts than those of any checkpoint")

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

    def _load_entry(self) -> None:
        if isinstance(self.stack[-3], dict):
            self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def _load_entries(self) -> None:
        if isinstance(self.metastack[-1][-1], dict):
            self._check_keys(self.stack[::2])
        super().load_setitems()

    def _load_dict(self) -> None:
        self._check_keys(self.stack[::2])
        super().load_dict()

    def _load_members(self) -> None:
        self._check_keys(self.stack)
        super().load_additems()

    def _load_frozenset(self) -> None:
        self._check_keys(self.stack)
        super().load_frozenset()

    dispatch[pickle.SETITEM[0]] = _load_entry
    dispatch[pickle.SETITEMS[0]] = _load_entries
    dispatch[pickle.DICT[0]] = _load_dict
    dispatch[pickle.ADDITEMS[0]] = _load_members
    dispatch[pickle.FROZENSET[0]] = _load_frozenset

    def _skip_frame(self) -> None:
        self.read(8)  # its length: what is in it is read as if there were none, and counted

    def _load_wide_integer(self) -> None:
        (size,) = struct.unpack("<i", self.read(4))
        if not 0 <= size <= _WIDEST_INTEGER:
            raise pickle.UnpicklingError("a number has more digits than any of a checkpoint")
        self.append(pickle.decode_long(self.read(size)))

    dispatch[pickle.FRAME[0]] = _skip_frame
    dispatch[pickle.LONG4[0]] = _load_wide_integer

    def _load_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(min(size, MOST_BYTES))))  # Python makes room for all that is claimed

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def _instantiate(self, made_by: Maker, arguments: Any) -> None:
        self.append(self._call(made_by, arguments))


_COPIED = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset})


def _copied(argument: Any) -> int:
    """Return how many operations count for an argument, which a call may copy."""
    is_text = isinstance(argument, str | bytes | bytearray)
    return len(argument) // _BYTES_PER_OPERATION if is_text else len(argument)


def _is_small_key(key: Any) -> bool:
    pending, left = [key], _LARGEST_KEY
    while pending and left:
        part = pending.pop()
        left -= 1
        if isinstance(part, tuple | frozenset):
            if len(part) > left:
                return False
            pending.extend(part)
    return not pending


def _mark_instance(made: Any) -> None:
    if isinstance(made, Object):
        made.is_instance = True


# ---- what names become -----------------------------------------------------------------------------------------------


class _Type:
    """A type of numpy."""

    def __init__(self, code: Any, *_: Any):
        if not isinstance(code, str) or len(code) > _LONGEST_NAME:
            raise ValueError("a type of numbers has no name")
        self._code = code
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


def _finish(tree: Any, seen: dict[int, Any], depth: int) -> Any:
    """A tree in which arrays and types are those of numpy. Each thing is looked at once, however often it is there."""
    if id(tree) in seen:
        return seen[id(tree)]
    if depth > _DEEPEST:
        raise ValueError("its parts are nested deeper than those of any checkpoint")
    if isinstance(tree, _Array | _Type):
        made: Any = tree.content if isinstance(tree, _Array) else tree.dtype()
        seen[id(tree)] = made
        return _finish(made, seen, depth) if isinstance(made, list) else made
    seen[id(tree)] = tree
    if isinstance(tree, dict):
        tree.update({key: _finish(value, seen, depth + 1) for key, value in tree.items()})
    elif isinstance(tree, list):
        tree[:] = [_finish(item, seen, depth + 1) for item in tree]
    elif type(tree) is tuple:
        seen[id(tree)] = tree = tuple([_finish(item, seen, depth + 1) for item in tree])
    elif isinstance(tree, Object):
        for part in ("arguments", "keywords", "state", "items", "entries"):
            setattr(tree, part, _finish(getattr(tree, part), seen, depth + 1))
    if isinstance(tree, Attributed):
        tree.attributes = _finish(tree.attributes, seen, depth + 1)
    return tree


_OPEN = -1


def _refuse_expansion(tree: Any, most: int) -> None:
    """Raise a ValueError for a tree that is much larger written out, part by part, than as it was stored.

    Parts of an `Object` count once, wherever it is named: such objects know one another, and whoever walks over them
    remembers them.
    """
    sizes: dict[int, int] = {}
    roots: list[Any] = [(tree,)]
    seen: set[int] = set()
    total = 0
    for root in roots:  # which grows meanwhile
        open_parts, taken = [(root, iter(_parts(root)))], [0]
        while open_parts:
            here, rest = open_parts[-1]
            for part in rest:
                if not isinstance(part, dict | list | tuple | set | frozenset):
                    taken[-1] += _PART + (len(part) if isinstance(part, str | bytes | bytearray) else 0)
                    if isinstance(part, np.ndarray):
                        taken[-1] += part.nbytes
                    elif isinstance(part, Object) and id(part) not in seen:
                        seen.add(id(part))
                        roots.append(part)
                elif (known := sizes.get(id(part))) is None:
                    sizes[id(part)] = _OPEN
                    open_parts.append((part, iter(_parts(part))))
                    taken.append(_PART)
                    break
                elif known == _OPEN:
                    raise ValueError("a part of it holds itself")
                else:
                    taken[-1] += known
            else:
                open_parts.pop()
                sizes[id(here)] = size = taken.pop()
                if taken:
                    taken[-1] += size
                else:
                    total += size
                if max(total, size) > most:
                    raise ValueError("it repeats its parts more often than any of a checkpoint")


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Object):
        return (tree.arguments, tree.keywords, tree.state, tree.items, tree.entries)
    if isinstance(tree, Attributed):
        return (*tree, *tree.values(), tree.arguments, tree.attributes)
    return (*tree, *tree.values()) if isinstance(tree, dict) else tree


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
