"""Pickles as data. Nothing that a pickle names is imported, made or called.

A pickle is a program for a stack machine. The machine is Python's own, in its pure form. A lookup
of a class or function returns a `Name`, and calling that returns an `Object`. Only dicts, sets and
arrays of numpy, of which checkpoints consist, are created.

A pickle of 500 bytes can describe a tree of 2 ** 60 parts by repeating one, and can make Python
hash all of them. The machine therefore counts its operations, checks keys before they are hashed,
and refuses trees that are much larger written out than as a pickle. Walks over a result therefore
need no further limit.
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

from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object, WithDefault, parts
from onward.errors import InvalidModelError
from onward.model.storage.files import blame_file

Maker = Callable[..., Any]

MOST_BYTES = 1 << 30
"""Largest size of a pickle, which holds no tensors."""
_MOST_OPERATIONS = 20_000_000
"""Largest number of operations. One makes at most a set of 216 bytes: 4 GB in all. A checkpoint of
60,000 experts takes 9 million."""
_BYTES_PER_OPERATION = 16
"""Bytes that a call may copy per operation: a tuple of characters has 8 bytes for each."""
_LONGEST_NAME, _WIDEST_INTEGER = 500, 1_024
"""Characters of a class with its module; bytes of an integer, of which Python prints 1,800."""
_LARGEST_KEY, _MOST_KEYS, _MOST_KEY = 100, 10_000, 1 << 60
"""Parts of a tuple as a key; keys other than strings, numbers and objects, which may share one
hash; and the integers from which on hashes of Python repeat."""
_PART, _FREE, _EXPANSION = 16, 1 << 18, 64
"""A tree may take 256 KB and 64 times the bytes of its pickle: each part counts 16, and strings
their length. A pickle has at least one byte for a part. PyTorch, Lightning, DeepSpeed and Megatron
take 1 to 10 times."""
_DEEPEST = 200
"""Nesting: a walk takes three of Python's 1,000 frames per level."""

_MALFORMED = (
    pickle.UnpicklingError, EOFError, IndexError, KeyError, AttributeError, TypeError, ValueError, OverflowError,
    RecursionError, struct.error,
)  # fmt: skip
"""Exceptions of the machine for a malformed pickle."""


def read_pickle(
    data: bytes, of: str, *, makers: Mapping[tuple[str, str], Maker] | None = None, persistent: Maker | None = None
) -> Any:
    """Return the content of a pickle. `of` is its file, for messages.

    `makers` are further names that are created. `persistent` receives the keys of data outside the
    pickle, such as that of tensors.
    """
    if len(data) > MOST_BYTES:
        raise InvalidModelError(f"the pickle in `{of}` is too large")
    file = io.BytesIO(data) if len(data) < _MOST_OPERATIONS else _Counted(data)
    machine = _Machine(file, {**_MAKERS, **(makers or {})}, persistent, of)
    with blame_file(f"the pickle in `{of}` is damaged", *_MALFORMED):
        tree = _finish(machine.load(), {}, 0)
        _refuse_expansion(tree, _FREE + _EXPANSION * len(data))
        return tree


Named = dict[tuple[str, Name], str]
"""Names in pickles, by file -> abbreviated arguments of the first call."""
_MOST_NAMES = 10_000
_NAMED: contextvars.ContextVar[Named | None] = contextvars.ContextVar("named", default=None)


@contextlib.contextmanager
def note_names() -> Iterator[Named]:
    """Record the names and calls of pickles that are read meanwhile, also of dropped objects."""
    named: Named = {}
    token = _NAMED.set(named)
    try:
        yield named
    finally:
        _NAMED.reset(token)


def _in_short(arguments: tuple[Any, ...] | list[Any]) -> str:
    return ", ".join(
        repr(value[:60] if isinstance(value, str | bytes) else value)
        if isinstance(value, str | bytes | int | float | None)
        else "..."
        for value in arguments[:3]
    )


_Pure: Any = pickle._Unpickler  # the one in C creates instances


_TOO_MANY = "it takes too many operations"


class _Counted(io.BytesIO):
    """Bytes of a pickle with possibly too many operations, each of which reads at least once."""

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
        maker = self._makers.get((module, name))
        if maker is not None:
            return maker
        if len(module) + len(name) > _LONGEST_NAME:
            raise pickle.UnpicklingError("the name of a class is too long")
        self._note(reference := Name(module, name), "")
        return reference

    def _note(self, name: Any, called_with: str) -> None:
        if self._named is None or not isinstance(name, Name) or self._named.get((self._of, name)):
            return
        if len(self._named) >= _MOST_NAMES:
            raise pickle.UnpicklingError("it names too many classes and functions")
        self._named[self._of, name] = called_with

    def _call(self, maker: Maker, arguments: Any, keywords: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(arguments, tuple | list):
            raise pickle.UnpicklingError("it calls something without a list of arguments")
        if isinstance(maker, Name):
            self._note(maker, f"({_in_short(arguments)})")
        self._operations += len(arguments) + len(keywords or ()) + sum(map(_copied, arguments))
        if self._operations > _MOST_OPERATIONS:
            raise pickle.UnpicklingError(_TOO_MANY)
        if maker in (set, frozenset):
            for members in arguments:
                self._check_keys(members)
        elif maker is Attributed:
            self._check_keys(key for pairs in arguments for key, _ in pairs)
        return maker(*arguments, **(keywords or {}))

    def _check_keys(self, keys: Iterable[Any]) -> None:
        """Refuse keys that take long to hash or to compare."""
        for key in keys:
            if isinstance(key, str | bytes | float | Object | Name | None):
                continue
            if isinstance(key, int):
                if abs(key) >= _MOST_KEY:
                    raise pickle.UnpicklingError("a key is too large a number")
                continue
            self._keys += 1
            if self._keys > _MOST_KEYS or not _is_small_key(key):
                raise pickle.UnpicklingError("its keys have too many parts")

    def persistent_load(self, key: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("it refers to data outside of the pickle")
        return self._persistent(key)

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("it uses Python's extension registry, which is not read")

    def _load_object(self) -> None:
        arguments = self.stack.pop()
        self.stack.append(self._call(self.stack.pop(), arguments))

    def _load_instance(self, keywords: Mapping[str, Any] | None = None) -> None:
        arguments = self.stack.pop()
        item = self._call(self.stack.pop(), arguments, keywords)
        if isinstance(item, Object):
            item.is_instance = True
        self.stack.append(item)

    def _load_instance_with_keywords(self) -> None:
        self._load_instance(self.stack.pop())

    # These opcodes create instances without a call, or ask objects for methods: here all are calls.
    dispatch[pickle.NEWOBJ[0]] = _load_instance
    dispatch[pickle.NEWOBJ_EX[0]] = _load_instance_with_keywords
    dispatch[pickle.REDUCE[0]] = _load_object

    def _load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, Object | Attributed | _Array | _Type):
            raise pickle.UnpicklingError(f"it gives attributes to a {type(target).__name__}")
        target.__setstate__(state)

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
        self.read(8)  # the length of a frame: its content is read as without frames, and counted

    def _load_wide_integer(self) -> None:
        (size,) = struct.unpack("<i", self.read(4))
        if not 0 <= size <= _WIDEST_INTEGER:
            raise pickle.UnpicklingError("a number has too many digits")
        self.append(pickle.decode_long(self.read(size)))

    dispatch[pickle.FRAME[0]] = _skip_frame
    dispatch[pickle.LONG4[0]] = _load_wide_integer

    def _load_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.stack.append(bytearray(self.read(min(size, MOST_BYTES))))  # Python allocates the claimed size

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    def _instantiate(self, maker: Maker, arguments: Any) -> None:
        self.append(self._call(maker, arguments))


_COPIED = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset})


def _copied(argument: Any) -> int:
    """Return the operations that count for an argument, which a call may copy."""
    if type(argument) not in _COPIED:
        return 0
    is_text = isinstance(argument, str | bytes | bytearray)
    return len(argument) // _BYTES_PER_OPERATION if is_text else len(argument)


def _is_small_key(key: Any) -> bool:
    pending, left = [key], _LARGEST_KEY
    while pending and left:
        item = pending.pop()
        left -= 1
        if isinstance(item, tuple | frozenset):
            if len(item) > left:
                return False
            pending.extend(item)
    return not pending


# ---- what names become -----------------------------------------------------------------------------------------------


class _Type:
    """Dtype of numpy."""

    def __init__(self, code: Any, *_: Any):
        if not isinstance(code, str) or len(code) > _LONGEST_NAME:
            raise ValueError("a dtype has no name")
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        self._order = state[1]

    def dtype(self) -> np.dtype:
        dtype = np.dtype(self._code)
        if dtype.hasobject or dtype.fields:
            raise ValueError(f"`{self._code}` is not a numeric dtype")
        return dtype.newbyteorder(">") if self._order == ">" else dtype


class _Array:
    """Array of numpy, which is created empty and filled later."""

    def __init__(self, *_: Any):
        self.content: np.ndarray | list[Any] = []

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, content = state
        if isinstance(content, list):  # of objects
            self.content = content
            return
        flat = np.frombuffer(_bytes(content), dtype.dtype())
        native = flat.astype(flat.dtype.newbyteorder("="), copy=False)  # as numpy's own reader does
        self.content = native.reshape(shape, order="F" if is_fortran else "C")


def _finish(tree: Any, seen: dict[int, Any], depth: int) -> Any:
    """Return a tree with arrays and dtypes of numpy. Each object is visited once."""
    if id(tree) in seen:
        return seen[id(tree)]
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    if isinstance(tree, _Array | _Type):
        result: Any = tree.content if isinstance(tree, _Array) else tree.dtype()
        seen[id(tree)] = result
        return _finish(result, seen, depth) if isinstance(result, list) else result
    seen[id(tree)] = tree
    if isinstance(tree, dict):
        tree.update({key: _finish(value, seen, depth + 1) for key, value in tree.items()})
    elif isinstance(tree, list):
        tree[:] = [_finish(item, seen, depth + 1) for item in tree]
    elif type(tree) is tuple:
        seen[id(tree)] = tree = tuple([_finish(item, seen, depth + 1) for item in tree])
    elif isinstance(tree, Object):
        for name in ("arguments", "keywords", "state", "items", "entries"):
            setattr(tree, name, _finish(getattr(tree, name), seen, depth + 1))
    if isinstance(tree, Attributed):
        tree.attributes = _finish(tree.attributes, seen, depth + 1)
    return tree


_OPEN = -1


def _refuse_expansion(tree: Any, most: int) -> None:
    """Raise a ValueError for a tree that is much larger written out than stored.

    Parts of an `Object` count once: objects may refer to one another, and walks visit each once.
    """
    sizes: dict[int, int] = {}
    roots: list[Any] = [(tree,)]
    seen: set[int] = set()
    total = 0
    for root in roots:  # which grows meanwhile
        open_parts, taken = [(root, iter(parts(root)))], [0]
        while open_parts:
            here, rest = open_parts[-1]
            for child in rest:
                if not isinstance(child, dict | list | tuple | set | frozenset):
                    taken[-1] += _PART + (len(child) if isinstance(child, str | bytes | bytearray) else 0)
                    if isinstance(child, np.ndarray):
                        taken[-1] += child.nbytes
                    elif isinstance(child, Object) and id(child) not in seen:
                        seen.add(id(child))
                        roots.append(child)
                elif (child_size := sizes.get(id(child))) is None:
                    sizes[id(child)] = _OPEN
                    open_parts.append((child, iter(parts(child))))
                    taken.append(_PART)
                    break
                elif child_size == _OPEN:
                    raise ValueError("a part of it holds itself")
                else:
                    taken[-1] += child_size
            else:
                open_parts.pop()
                sizes[id(here)] = size = taken.pop()
                if taken:
                    taken[-1] += size
                else:
                    total += size
                if max(total, size) > most:
                    raise ValueError("it repeats its parts too often")


def _scalar(dtype: _Type, content: Any = b"") -> Any:
    return np.frombuffer(_bytes(content), dtype.dtype())[0]


def _bytes(content: Any) -> Any:
    return content.encode("latin-1") if isinstance(content, str) else content  # as Python 2 wrote it


def _encode(text: str, encoding: str = "latin-1") -> bytes:
    """Return bytes as protocols before the third write them."""
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
    **{(module, cls.__name__): cls for module in ("builtins", "__builtin__") for cls in _PLAIN},
    **{(f"numpy.{core}.multiarray", name): make for core in ("core", "_core") for name, make in _NUMPY.items()},
}
