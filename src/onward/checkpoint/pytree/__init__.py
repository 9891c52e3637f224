"""Trees of JAX as Orbax and Flax store them: dicts and lists around tensors and numbers, and the way to each."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onward.run_state.tensors import Tensor

Way = tuple[str, ...]
"""The keys that lead to a place in a tree. Those of lists are numbers, as text."""

WRAPPER = "value"
"""The last key on the way to an array of Flax's NNX, which wraps it in a variable. It has no place in a name."""

KEY, DATA = "random_key", "data"
"""A typed key of JAX in a tree: which generator it is for, and its numbers."""


def parts(tree: Any) -> list[tuple[str, Any]]:
    """What is directly inside a tree, by key; nothing in a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), part) for key, part in tree.items()]
    return [(str(i), part) for i, part in enumerate(tree)] if isinstance(tree, list | tuple) else []


def leaves(tree: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    """The ends of a tree in their order. What is empty, such as None or a dict, is one as well."""
    inside = parts(tree)
    if not inside:
        yield way, tree
    for key, part in inside:
        yield from leaves(part, (*way, key))


def at(tree: Any, way: Iterable[str]) -> Any:
    """What is at a place."""
    for key in way:
        tree = dict(parts(tree))[key]
    return tree


def map_leaves(tree: Any, change: Callable[[Way, Any], Any], way: Way = ()) -> Any:
    """The same tree with other leaves."""
    inside = parts(tree)
    if not inside:
        return change(way, tree)
    made = [map_leaves(part, change, (*way, key)) for key, part in inside]
    return dict(zip(tree, made, strict=True)) if isinstance(tree, Mapping) else made


def names_of_tensors(tree: Any, way: Way = ()) -> dict[Way, str]:
    """The tensors of a tree, and the names that they have in a training model: their places in it."""
    flat = dict(leaves(tree))
    ways = [w for w, leaf in flat.items() if isinstance(leaf, Tensor) and (*w[:-1], KEY) not in flat]
    wrapped = bool(ways) and all(len(below) > 1 and below[-1] == WRAPPER for below in ways)
    return {(*way, *below): "/".join(below[:-1] if wrapped else below) or "params" for below in ways}


class _Branch(dict[Any, Any]):
    """A dict of a tree that is put together, and no leaf."""


def nest(values: Iterable[tuple[Sequence[Any], Any]]) -> dict[Any, Any]:
    """Values, each with the keys that lead to it, as dicts in dicts; a ValueError where one is inside of another."""
    root = _Branch()
    for way, value in values:
        *outer, last = way
        around = root
        for key in outer:
            around = around.setdefault(key, _Branch())
            if not isinstance(around, _Branch):
                break
        if not isinstance(around, _Branch) or last in around:
            raise ValueError(f"there is something inside of a leaf, at `{'.'.join(map(str, way))}`")
        around[last] = value
    return root


def nest_names(values: Mapping[str, Any]) -> Any:
    """Values by name as a tree: `dense/kernel` is `kernel` in `dense`. What has the keys 0, 1, 2 ... is a list."""
    try:
        return with_lists(nest((name.split("/"), value) for name, value in values.items()))
    except ValueError:
        return dict(values)  # a name is the beginning of another: no tree has both


def with_lists(tree: Any, lists: Container[Way] | None = None, way: Way = ()) -> Any:
    """A tree in which dicts with the keys 0, 1, 2 ... are lists, as Flax makes dicts of these; or some of them are."""
    if not isinstance(tree, dict):
        return tree
    inside = {key: with_lists(part, lists, (*way, key)) for key, part in tree.items()}
    numbers = [str(i) for i in range(len(inside))]
    is_list = bool(inside) and (lists is None or way in lists) and {*inside} == {*numbers}
    return [inside[key] for key in numbers] if is_list else inside


def without_lists(tree: Any) -> Any:
    """A tree in which lists are dicts with the keys 0, 1, 2 ..."""
    is_tree = isinstance(tree, Mapping | list | tuple)
    return {key: without_lists(part) for key, part in parts(tree)} if is_tree else tree
