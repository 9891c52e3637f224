"""The objects that a TensorFlow checkpoint was made of, and what they say of its keys: which tensor is what."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from onward.checkpoint.tf.bundles import GRAPH, Tree, text_of
from onward.errors import InvalidModelError
from onward.model.storage.files import blame_file
from onward.model.storage.wire import numbers, text, texts
from onward.run_state.tensors import Tensor
from onward.vocabulary.keras import AVERAGE, KERAS_2_SLOTS, TENSORFLOW_1_SLOTS, is_named_after
from onward.vocabulary.optimizers import KERAS_ROWS
from onward.vocabulary.rows import KerasRow

_VALUE = "VARIABLE_VALUE"
_STATES = "/.ATTRIBUTES/ITERATOR_STATE"
_OTHERS = ("keras_api", "_loss_tracker", "_compile_metrics", "_metrics", "_all_variables")
"""Children of a model that are not of the model, or once more what others are."""
_MOST_OPTIMIZERS, _DEEPEST = 100, 200
SHARED = "mu_product"
"""What Keras's Nadam keeps once, and other optimizers for each parameter."""


@dataclasses.dataclass
class Keys:
    """An optimizer, by the keys of what it keeps."""

    families: tuple[str, ...] = ()
    name: str = ""
    slots: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    averages: dict[str, str] = dataclasses.field(default_factory=dict)
    numbers: dict[str, str] = dataclasses.field(default_factory=dict)
    """`iterations`, `learning_rate` and other single numbers."""
    parameters: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Meaning:
    """What the keys of a checkpoint stand for."""

    parameters: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> key."""
    optimizers: list[Keys] = dataclasses.field(default_factory=list)
    counters: dict[str, str] = dataclasses.field(default_factory=dict)
    generators: dict[str, str] = dataclasses.field(default_factory=dict)
    data: dict[str, str] = dataclasses.field(default_factory=dict)


class _Node:
    def __init__(self, data: bytes):
        children = ((text(child, 2), numbers(child).get(1, 0)) for child in texts(data, 1))
        self.children: dict[str, int] = dict(children)
        self.key = self.full_name = ""
        for attribute in texts(data, 2):
            if text(attribute, 1) == _VALUE:
                self.full_name, self.key = text(attribute, 2), text(attribute, 3)
        self.slots = [(numbers(slot), text(slot, 2)) for slot in texts(data, 3)]

    @property
    def is_optimizer(self) -> bool:
        iterates = not self.children.keys().isdisjoint({"_iterations", "iterations", "iter"})
        return bool(self.slots) or (iterates and "_variables" in self.children)


def meaning_of(tree: Tree) -> Meaning:
    """What the keys stand for, by the objects that were saved; without any, by how variables are named."""
    if GRAPH not in tree:
        return _by_name(tree)
    saved = text_of(tree[GRAPH])
    with blame_file("the objects of the checkpoint are damaged"):
        nodes = [_Node(node) for node in texts(saved or b"", 1)]
        if not nodes or any(not 0 <= at < len(nodes) for node in nodes for at in _references(node)):
            raise ValueError("an object of it is not there")
        if lost := [node.key for node in nodes if node.key and node.key not in tree]:
            raise ValueError(f"what `{lost[0]}` holds is not there")
    if sum(node.is_optimizer for node in nodes) > _MOST_OPTIMIZERS:
        raise InvalidModelError("the checkpoint has more optimizers than any does")
    return _Objects(nodes, tree).meaning()


def _references(node: _Node) -> Iterator[int]:
    yield from node.children.values()
    for slot, _ in node.slots:
        yield from (slot.get(1, 0), slot.get(3, 0))


class _Objects:
    def __init__(self, nodes: Sequence[_Node], tree: Tree):
        self._nodes = nodes
        self._tree = tree

    def meaning(self) -> Meaning:
        found = Meaning(parameters={self._names[at]: self._nodes[at].key for at in self._names})
        top = {*self._nodes[0].children.values()}
        for at, node in enumerate(self._nodes):
            if node.is_optimizer:
                found.optimizers.append(self._keys(node) if "_variables" in node.children else self._older(node))
            elif "_state_var" in node.children:
                state = self._nodes[node.children["_state_var"]]
                found.generators[_place(state.key)] = state.key
            elif node.full_name.endswith("seed_generator_state"):
                found.generators[node.full_name] = node.key
            elif at in top and self._is_counter(node):
                found.counters[_place(node.key)] = node.key
        found.data = {key.removesuffix(_STATES): key for key in self._tree if key.endswith(_STATES)}
        return found

    @cached_property
    def _names(self) -> dict[int, str]:
        """The variables of the model: as they were named, or where that is not clear after their place."""
        places = dict(self._walk())
        for optimizer in (node for node in self._nodes if node.is_optimizer):
            for variable in self._list_objects(optimizer, "_trainable_variables"):
                places.setdefault(variable, [_place(self._nodes[variable].key)])
        named = Counter(self._nodes[at].full_name for at in places)
        if all(name and count == 1 for name, count in named.items()):
            return {at: self._nodes[at].full_name for at in places}
        modules = {way[0] for way in places.values()}
        inside = len(modules) == 1 and all(len(way) > 1 for way in places.values())
        return {at: ".".join(way[1:] if inside else way) for at, way in places.items()}

    def _walk(self) -> Iterator[tuple[int, list[str]]]:
        """Variables that are no optimizer's, with the ways to them."""
        seen: set[int] = set()
        pending: list[tuple[int, list[str]]] = [(0, [])]
        while pending:
            at, way = pending.pop()
            node = self._nodes[at]
            if at in seen or node.is_optimizer or "_state_var" in node.children:
                continue
            seen.add(at)
            if len(way) > _DEEPEST:
                raise InvalidModelError("the objects of the checkpoint are nested deeper than any are")
            counts = len(way) == 1 and self._is_counter(node)
            if isinstance(self._tree.get(node.key), Tensor) and not counts and not self._is_seed(node):
                yield at, way
            pending.extend((at, [*way, n]) for n, at in reversed(node.children.items()) if n not in _OTHERS)

    def _is_counter(self, node: _Node) -> bool:
        value = self._tree.get(node.key)
        return isinstance(value, Tensor) and not value.shape and value.dtype.kind in "iu"

    @staticmethod
    def _is_seed(node: _Node) -> bool:
        return node.full_name.endswith("seed_generator_state")

    def _list_objects(self, node: _Node, attribute: str) -> list[int]:
        """The objects in a list that is an attribute, in their order."""
        if attribute not in node.children:
            return []
        inside = self._nodes[node.children[attribute]].children
        return [inside[name] for name in sorted(filter(str.isdecimal, inside), key=int)]

    def _keys(self, node: _Node) -> Keys:
        """An optimizer of Keras 3: its attributes are lists with an object for each variable."""
        variables = self._list_objects(node, "_trainable_variables")
        known = [self._names[at] for at in variables]
        found = Keys(parameters=known, slots={name: {} for name in known})
        rows = [row for row in KERAS_ROWS.values() if self._fits(node, row)]
        for slot, attribute in (rows[0].slots if rows else {}).items():
            for name, at in zip(known, self._list_objects(node, attribute), strict=False):
                found.slots[name][slot] = self._nodes[at].key
        averages = self._list_objects(node, "_model_variables_moving_average")
        found.averages = {name: self._nodes[at].key for name, at in zip(known, averages, strict=False)}
        for attribute, at in node.children.items():
            if self._nodes[at].key:
                found.numbers[attribute.removeprefix("_")] = self._nodes[at].key
        counter = self._nodes[node.children.get("_iterations", 0)].full_name
        found.name = counter.rpartition("/")[0]
        called = [row for row in rows if is_named_after(found.name, row.name)]
        found.families = tuple(row.optimizers[0] for row in called or rows)
        return found

    def _fits(self, node: _Node, row: KerasRow) -> bool:
        """Whether an optimizer has the attributes of a class, and no list of variables beside."""
        lists = {name for name in node.children if self._list_objects(node, name)} - {
            "_variables", "_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients",
        }  # fmt: skip
        told = all((name in row.attributes) == (name in node.children) for name in ("_average_gradients", "_u_product"))
        return bool(lists) and lists <= row.attributes and told

    def _older(self, node: _Node) -> Keys:
        """An optimizer that says itself which variable is kept beside which."""
        found = Keys()
        for slot, name in node.slots:
            variable, kept = (self._nodes[slot.get(number, 0)] for number in (1, 3))
            called = self._names.get(slot.get(1, 0), _place(variable.key))
            found.slots.setdefault(called, {})[KERAS_2_SLOTS.get(name, name)] = kept.key
        found.parameters = list(found.slots)
        found.numbers = {name: self._nodes[at].key for name, at in node.children.items() if self._nodes[at].key}
        found.families = families_of(found.slots)
        return found


def families_of(slots: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Optimizers of Keras that keep this for each parameter."""
    kept = {frozenset(each) for each in slots.values()}
    if len(kept) != 1:
        return ()
    (names,) = kept
    return tuple(
        row.optimizers[0]
        for row in KERAS_ROWS.values()
        if names and row.always <= names <= row.slots.keys() and not row.shared
    )


def _place(key: str) -> str:
    return key.partition("/.ATTRIBUTES")[0].removesuffix("/_state_var")


# ---- without objects -------------------------------------------------------------------------------------------------

_COUNT = "/iteration"
_SINGLE = {"iteration": "iterations", "learning_rate": "learning_rate", "beta1_power": "", "beta2_power": ""}


def _by_name(tree: Tree) -> Meaning:
    """Checkpoints of TensorFlow 1, and of whoever has no objects: keys are the names of variables."""
    variables = [key for key, value in tree.items() if isinstance(value, Tensor)]
    keys = Keys(name=next((key.removesuffix(_COUNT) for key in variables if key.endswith(_COUNT)), ""))
    kept, found = _slot_variables(variables, keys.name), Meaning()
    for key in variables:
        owner, _, last = key.rpartition("/")
        if key in kept:
            of, slot = kept[key]
            if slot == AVERAGE:
                keys.averages[of] = key
            else:
                keys.slots.setdefault(of, {})[slot] = key
        elif last in _SINGLE and owner == keys.name and not tree[key].shape:
            keys.numbers[_SINGLE[last] or last] = key
        elif not tree[key].shape and tree[key].dtype.kind in "iu":
            found.counters[key] = key
        else:
            found.parameters[key] = key
    if keys.slots or keys.averages or keys.numbers:
        keys.parameters = list(keys.slots)
        called = [row.optimizers[0] for row in KERAS_ROWS.values() if is_named_after(keys.name, row.name)]
        keys.families = tuple(called) or families_of(keys.slots)
        found.optimizers.append(keys)
    return found


def _slot_variables(variables: Sequence[str], optimizer: str) -> dict[str, tuple[str, str]]:
    """Variables that an optimizer keeps: of which parameter, and as what."""
    known, found = set(variables), {}
    row = next((row for row in KERAS_ROWS.values() if is_named_after(optimizer, row.name)), None)
    words = {f"_{word}": slot for slot, word in row.words.items()} if row else {}
    flat = {f"{optimizer}/{name.replace('/', '_')}": name for name in variables}
    for key in variables:
        owner, _, last = key.rpartition("/")
        if owner in known and last in TENSORFLOW_1_SLOTS:
            found[key] = (owner, TENSORFLOW_1_SLOTS[last])
        for word, slot in words.items():
            if key.removesuffix(word) != key and key.removesuffix(word) in flat:
                found[key] = (flat[key.removesuffix(word)], slot)
    return found
