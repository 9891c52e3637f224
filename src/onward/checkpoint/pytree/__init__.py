"""Trees of JAX as Orbax and Flax store them: dicts and lists of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onward.run_state.tensors import Tensor

KeyPath = tuple[str, ...]
"""Keys that lead to a node of a tree. Indices of lists are strings."""

WRAPPER = "value"
"""Last key of an array in Flax's NNX, which wraps it in a variable. Names omit it."""

KEY, DATA = "random_key", "data"
"""Typed random key of JAX in a tree: its generator and its numbers."""


def parts(tree: Any) -> list[tuple[str, Any]]:
    """Return the children of a node by key; nothing for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), child) for key, child in tree.items()]
    return [(str(i), child) for i, child in enumerate(tree)] if isinstance(tree, list | tuple) else []


def leaves(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Return the leaves of a tree in order, also empty ones such as None or {}."""
    children = parts(tree)
    if not children:
        yield path, tree
    for key, child in children:
        yield from leaves(child, (*path, key))


def at(tree: Any, path: Iterable[str]) -> Any:
    """Return the node at a path."""
    for key in path:
        tree = dict(parts(tree))[key]
    return tree


def map_leaves(tree: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """Return a tree with changed leaves."""
    children = parts(tree)
    if not children:
        return change(path, tree)
    changed = [map_leaves(child, change, (*path, key)) for key, child in children]
    return dict(zip(tree, changed, strict=True)) if isinstance(tree, Mapping) else changed


def names_of_tensors(tree: Any, path: KeyPath = ()) -> dict[KeyPath, str]:
    """Return the paths of the tensors in a tree -> their names in a training model."""
    flat = dict(leaves(tree))
    paths = [
        inner_path
        for inner_path, leaf in flat.items()
        if isinstance(leaf, Tensor) and (*inner_path[:-1], KEY) not in flat
    ]
    wrapped = bool(paths) and all(len(inner) > 1 and inner[-1] == WRAPPER for inner in paths)
    return {(*path, *inner): "/".join(inner[:-1] if wrapped else inner) or "params" for inner in paths}


class _Branch(dict[Any, Any]):
    """Dict in a tree under construction, which is not a leaf."""


def nest(values: Iterable[tuple[Sequence[Any], Any]]) -> dict[Any, Any]:
    """Return values with their paths as nested dicts; raise a ValueError for a conflict."""
    root = _Branch()
    for path, value in values:
        *outer, last = path
        branch = root
        for key in outer:
            branch = branch.setdefault(key, _Branch())
            if not isinstance(branch, _Branch):
                break
        if not isinstance(branch, _Branch) or last in branch:
            raise ValueError(f"there is a value inside of a leaf, at `{'.'.join(map(str, path))}`")
        branch[last] = value
    return root


def nest_names(values: Mapping[str, Any]) -> Any:
    """Return values by name as a tree: `dense/kernel` is `kernel` in `dense`."""
    try:
        return with_lists(nest((name.split("/"), value) for name, value in values.items()))
    except ValueError:
        return dict(values)  # one name is a prefix of another, which no tree can hold


def with_lists(tree: Any, lists: Container[KeyPath] | None = None, path: KeyPath = ()) -> Any:
    """Return a tree with lists for dicts with the keys 0, 1, 2 ..., or only at some paths."""
    if not isinstance(tree, dict):
        return tree
    children = {key: with_lists(child, lists, (*path, key)) for key, child in tree.items()}
    numbers = [str(i) for i in range(len(children))]
    is_list = bool(children) and (lists is None or path in lists) and {*children} == {*numbers}
    return [children[key] for key in numbers] if is_list else children


def without_lists(tree: Any) -> Any:
    """Return a tree with dicts with the keys 0, 1, 2 ... in place of lists."""
    is_tree = isinstance(tree, Mapping | list | tuple)
    return {key: without_lists(child) for key, child in parts(tree)} if is_tree else tree
