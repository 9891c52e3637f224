"""The content of pickles as data, and its writer. Nothing is imported or called."""

from __future__ import annotations

import codecs
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from onward.run_state.tensors import Tensor


@dataclasses.dataclass(frozen=True)
class Name:
    """Name of a class or function in a pickle. A call returns an `Object`."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **keywords: Any) -> Object:
        return Object(self, arguments, keywords)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(eq=False)
class Object:
    """Call of a class or function in a pickle, with what the pickle then does to the result."""

    of: Name
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_instance: bool = False
    """True if it was to be created without a call, as by `object.__new__`."""
    state: Any = None
    """Argument of its `__setstate__`."""
    items: list[Any] = dataclasses.field(default_factory=list)
    """Items of a list."""
    entries: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """Entries of a dict; keys need not be hashable."""

    # The reader of pickles calls these.
    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.of}>"


class Attributed(dict[Any, Any]):
    """Dict of a subclass: the `OrderedDict` of a module's state stores versions in an attribute."""

    of = Name("collections", "OrderedDict")
    arguments: tuple[Any, ...] = ()
    """Arguments of the class."""
    attributes: Any = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class WithDefault(Attributed):
    of = Name("collections", "defaultdict")

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments


def parts(tree: Any) -> Iterable[Any]:
    """Return the children of a node in the content of a pickle; nothing for a leaf."""
    if isinstance(tree, Object):
        return (tree.arguments, tree.keywords, tree.state, tree.items, tree.entries)
    if isinstance(tree, Attributed):
        return (*tree, *tree.values(), tree.arguments, tree.attributes)
    if isinstance(tree, dict):
        return (*tree, *tree.values())
    return tree if isinstance(tree, list | tuple | set | frozenset) else ()


_Pure: Any = pickle._Pickler  # the one in C looks names up


class Persistent:
    """Data outside a pickle, by its key."""

    def __init__(self, key: tuple[Any, ...]):
        self.key = key


_BY_PICKLE = (set, frozenset, complex, Persistent)
"""Types that Python's own pickler writes correctly."""

Reference = Callable[[Tensor], Object]
"""Returns the call that makes a tensor, with a `Persistent` for its data."""


def write_pickle(tree: Any, *, tensors: Reference | None = None) -> bytes:
    """Return the pickle of a tree, in the protocol of PyTorch's files."""
    file = io.BytesIO()
    _Machine(file, tensors).dump(tree)
    return file.getvalue()


class _Machine(_Pure):  # type: ignore[misc]
    dispatch: ClassVar = dict(_Pure.dispatch)

    def __init__(self, file: io.BytesIO, tensors: Reference | None):
        super().__init__(file, 2)
        self._tensors = tensors
        self._names: dict[Name, Name] = {}
        self._alive: list[Any] = []
        """Temporary objects, kept alive because the pickler remembers what it wrote by address."""

    def persistent_id(self, thing: Any) -> Any:
        return thing.key if isinstance(thing, Persistent) else None

    def save(self, item: Any, save_persistent_id: bool = True) -> None:
        if isinstance(item, Tensor):
            if self._tensors is None:
                raise pickle.PicklingError("this pickle cannot hold a tensor")
            item = self._tensors(item)
        elif isinstance(item, Name):
            item = self._names.setdefault(item, item)
        elif type(item) not in self.dispatch and type(item) not in _BY_PICKLE and item is not codecs.encode:
            raise pickle.PicklingError(f"a checkpoint cannot hold a {type(item).__name__}")
        super().save(item, save_persistent_id)

    def _save_name(self, name: Name) -> None:
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    def _save_object(self, thing: Object) -> None:
        opcode = pickle.NEWOBJ if thing.is_instance else pickle.REDUCE
        self._save_result(thing, opcode, thing.items, thing.entries, thing.state)

    def _save_attributed(self, thing: Attributed) -> None:
        self._save_result(thing, pickle.REDUCE, [], [*thing.items()], thing.attributes)

    def _save_result(
        self, thing: Any, opcode: bytes, items: list[Any], entries: list[tuple[Any, Any]], state: Any
    ) -> None:
        self.save(thing.of)
        self.save(thing.arguments)
        self.write(opcode)
        self.memoize(thing)
        if items:
            self._batch_appends(items)
        if entries:
            self._batch_setitems(iter(entries))
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)

    def _save_type(self, dtype: np.dtype) -> None:
        state = (3, dtype.str[0], None, None, None, -1, -1, 0)
        self._save_call(("numpy", "dtype"), (dtype.str[1:], False, True), state)

    def _save_array(self, array: np.ndarray) -> None:
        state = (1, array.shape, array.dtype, False, np.ascontiguousarray(array).tobytes())
        self._save_call(("numpy._core.multiarray", "_reconstruct"), (Name("numpy", "ndarray"), (0,), b"b"), state)

    def _save_scalar(self, number: np.generic) -> None:
        self._save_call(("numpy._core.multiarray", "scalar"), (number.dtype, number.tobytes()))

    def _save_call(self, name: tuple[str, str], arguments: tuple[Any, ...], state: Any = None) -> None:
        call = Object(Name(*name), arguments, state=state)
        self._alive.append(call)
        self._save_object(call)

    dispatch[Name] = _save_name
    dispatch[Object] = _save_object
    dispatch[Attributed] = _save_attributed
    dispatch[WithDefault] = _save_attributed
    dispatch[np.ndarray] = _save_array
    for _kind in {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}:
        dispatch[_kind] = _save_type
    for _code in "?bBhHiIlLqQefdFD":
        dispatch[np.dtype(_code).type] = _save_scalar
