"""What a pickle holds, as data, and written back. Nothing that a pickle names is imported, made or called."""

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
    """A class or function that a pickle names: a name and no more. To call it makes an `Object` of it."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **keywords: Any) -> Object:
        return Object(self, arguments, keywords)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Object:
    """What a pickle would have made of a class or function: what that is, and all that it was to be given."""

    def __init__(
        self,
        of: Name,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
        *,
        is_instance: bool = False,
    ):
        self.of = of
        self.arguments = arguments
        self.keywords = keywords or {}
        self.is_instance = is_instance
        """Whether it was to be made without calling its class, as `object.__new__` does."""
        self.state: Any = None
        """What its attributes were to be."""
        self.items: list[Any] = []
        """What it was to hold, as a list does."""
        self.entries: list[tuple[Any, Any]] = []
        """What it was to hold, as a dict does; keys need not be hashable."""

    # What the reader of pickles calls.
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
    """A dict of a class of its own: the `OrderedDict` of a module's state, which notes versions in an attribute."""

    of = Name("collections", "OrderedDict")
    arguments: tuple[Any, ...] = ()
    """What the class was called with."""
    attributes: Any = None

    def __setstate__(self, state: Any) -> None:
        self.attributes = state


class WithDefault(Attributed):
    """A `defaultdict`."""

    of = Name("collections", "defaultdict")

    def __init__(self, *arguments: Any):
        super().__init__()
        self.arguments = arguments


_Pure: Any = pickle._Pickler  # the one written in C looks names up


class Persistent:
    """What a pickle keeps elsewhere, by its key."""

    def __init__(self, key: tuple[Any, ...]):
        self.key = key


_BY_PICKLE = (set, frozenset, complex, Persistent)
"""What Python's own way of writing is right for."""

Reference = Callable[[Tensor], Object]
"""From a tensor to the call that makes it, in which a `Persistent` stands for its data."""


def write_pickle(tree: Any, *, tensors: Reference | None = None) -> bytes:
    """The pickle that holds a tree, in the protocol of PyTorch's files."""
    file = io.BytesIO()
    _Machine(file, tensors).dump(tree)
    return file.getvalue()


class _Machine(_Pure):  # type: ignore[misc]
    dispatch: ClassVar = dict(_Pure.dispatch)

    def __init__(self, file: io.BytesIO, tensors: Reference | None):
        super().__init__(file, 2)
        self._tensors = tensors
        self._names: dict[Name, Name] = {}
        self._made: list[Any] = []
        """What was made for the pickle stays, since it knows by their addresses what it has written already."""

    def persistent_id(self, thing: Any) -> Any:
        return thing.key if isinstance(thing, Persistent) else None

    def save(self, thing: Any, save_persistent_id: bool = True) -> None:
        if isinstance(thing, Tensor):
            if self._tensors is None:
                raise pickle.PicklingError("a tensor has no place in this pickle")
            thing = self._tensors(thing)
        elif isinstance(thing, Name):
            thing = self._names.setdefault(thing, thing)
        elif type(thing) not in self.dispatch and type(thing) not in _BY_PICKLE and thing is not codecs.encode:
            raise pickle.PicklingError(f"a {type(thing).__name__} has no place in a checkpoint")
        super().save(thing, save_persistent_id)

    def _save_name(self, name: Name) -> None:
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    def _save_object(self, thing: Object) -> None:
        self.save(thing.of)
        self.save(thing.arguments)
        self.write(pickle.NEWOBJ if thing.is_instance else pickle.REDUCE)
        self.memoize(thing)
        self._fill(thing.items, thing.entries, thing.state)

    def _save_attributed(self, thing: Attributed) -> None:
        self.save(thing.of)
        self.save(thing.arguments)
        self.write(pickle.REDUCE)
        self.memoize(thing)
        self._fill([], list(thing.items()), thing.attributes)

    def _fill(self, items: list[Any], entries: list[tuple[Any, Any]], state: Any) -> None:
        if items:
            self._batch_appends(items)
        if entries:
            self._batch_setitems(iter(entries))
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)

    def _save_type(self, kind: np.dtype) -> None:
        made = Object(Name("numpy", "dtype"), (kind.str[1:], False, True))
        made.state = (3, kind.str[0], None, None, None, -1, -1, 0)
        self._save_made(made)

    def _save_array(self, array: np.ndarray) -> None:
        made = Object(Name("numpy._core.multiarray", "_reconstruct"), (Name("numpy", "ndarray"), (0,), b"b"))
        made.state = (1, array.shape, array.dtype, False, np.ascontiguousarray(array).tobytes())
        self._save_made(made)

    def _save_scalar(self, number: np.generic) -> None:
        made = Object(Name("numpy._core.multiarray", "scalar"), (number.dtype, number.tobytes()))
        self._save_made(made)

    def _save_made(self, made: Object) -> None:
        self._made.append(made)
        self._save_object(made)

    dispatch[Name] = _save_name
    dispatch[Object] = _save_object
    dispatch[Attributed] = _save_attributed
    dispatch[WithDefault] = _save_attributed
    dispatch[np.ndarray] = _save_array
    for _kind in {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}:
        dispatch[_kind] = _save_type
    for _code in "?bBhHiIlLqQefdFD":
        dispatch[np.dtype(_code).type] = _save_scalar
