"""The object graph of a TensorFlow checkpoint, and the meaning of its keys."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from onward.checkpoint.tf.tensor_bundle import GRAPH, Tree, text_of
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
"""Children of a model that do not belong to it, or repeat others."""
_MOST_OPTIMIZERS, _DEEPEST = 100, 200
SHARED = "mu_product"
"""Slot that Keras's Nadam stores once, and other optimizers for each parameter."""


@dataclasses.dataclass
class OptimizerKeys:
    """Keys of the variables of an optimizer."""

    families: tuple[str, ...] = ()
    name: str = ""
    slots: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    averages: dict[str, str] = dataclasses.field(default_factory=dict)
    numbers: dict[str, str] = dataclasses.field(default_factory=dict)
    """`iterations`, `learning_rate` and other single numbers."""
    parameters: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Meaning:
    """Meaning of the keys of a checkpoint."""

    parameters: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> key."""
    optimizers: list[OptimizerKeys] = dataclasses.field(default_factory=list)
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

    @property
    def is_seed(self) -> bool:
        return self.full_name.endswith("seed_generator_state")


def meaning_of(tree: Tree) -> Meaning:
    """Return the meaning of keys, by the saved objects or else by the names of variables."""
    if GRAPH not in tree:
        return _by_name(tree)
    saved = text_of(tree[GRAPH])
    with blame_file("the objects of the checkpoint are damaged"):
        nodes = [_Node(node) for node in texts(saved or b"", 1)]
        if not nodes or any(not 0 <= at < len(nodes) for node in nodes for at in _references(node)):
            raise ValueError("an object is missing")
        if lost := [node.key for node in nodes if node.key and node.key not in tree]:
            raise ValueError(f"the data of `{lost[0]}` is missing")
    if sum(node.is_optimizer for node in nodes) > _MOST_OPTIMIZERS:
        raise InvalidModelError("the checkpoint has too many optimizers")
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
        meaning = Meaning(parameters={self._names[at]: self._nodes[at].key for at in self._names})
        direct_children = {*self._nodes[0].children.values()}
        for at, node in enumerate(self._nodes):
            if node.is_optimizer:
                meaning.optimizers.append(self._keys(node) if "_variables" in node.children else self._older(node))
            elif "_state_var" in node.children:
                state = self._nodes[node.children["_state_var"]]
                meaning.generators[_path_of(state.key)] = state.key
            elif node.is_seed:
                meaning.generators[node.full_name] = node.key
            elif at in direct_children and self._is_counter(node):
                meaning.counters[_path_of(node.key)] = node.key
        meaning.data = {key.removesuffix(_STATES): key for key in self._tree if key.endswith(_STATES)}
        return meaning

    @cached_property
    def _names(self) -> dict[int, str]:
        """Return the names of the model's variables: as stored, or their paths if these repeat."""
        paths = dict(self._walk())
        for optimizer in (node for node in self._nodes if node.is_optimizer):
            for variable in self._list_objects(optimizer, "_trainable_variables"):
                paths.setdefault(variable, [_path_of(self._nodes[variable].key)])
        counts_by_name = Counter(self._nodes[at].full_name for at in paths)
        if all(name and count == 1 for name, count in counts_by_name.items()):
            return {at: self._nodes[at].full_name for at in paths}
        modules = {path[0] for path in paths.values()}
        has_root = len(modules) == 1 and all(len(path) > 1 for path in paths.values())
        return {at: ".".join(path[1:] if has_root else path) for at, path in paths.items()}

    def _walk(self) -> Iterator[tuple[int, list[str]]]:
        """Return variables that are not of an optimizer, with their paths."""
        seen: set[int] = set()
        pending: list[tuple[int, list[str]]] = [(0, [])]
        while pending:
            at, path = pending.pop()
            node = self._nodes[at]
            if at in seen or node.is_optimizer or "_state_var" in node.children:
                continue
            seen.add(at)
            if len(path) > _DEEPEST:
                raise InvalidModelError("the objects of the checkpoint are nested too deeply")
            is_other = node.is_seed or (len(path) == 1 and self._is_counter(node))
            if isinstance(self._tree.get(node.key), Tensor) and not is_other:
                yield at, path
            pending.extend((at, [*path, n]) for n, at in reversed(node.children.items()) if n not in _OTHERS)

    def _is_counter(self, node: _Node) -> bool:
        value = self._tree.get(node.key)
        return isinstance(value, Tensor) and not value.shape and value.dtype.kind in "iu"

    def _list_objects(self, node: _Node, attribute: str) -> list[int]:
        """Return the objects of a list attribute, in order."""
        if attribute not in node.children:
            return []
        children = self._nodes[node.children[attribute]].children
        return [children[name] for name in sorted(filter(str.isdecimal, children), key=int)]

    def _keys(self, node: _Node) -> OptimizerKeys:
        """Return an optimizer of Keras 3: attributes are lists with an object for each variable."""
        variables = self._list_objects(node, "_trainable_variables")
        names = [self._names[at] for at in variables]
        keys = OptimizerKeys(parameters=names, slots={name: {} for name in names})
        rows = [row for row in KERAS_ROWS.values() if self._fits(node, row)]
        for slot, attribute in (rows[0].slots if rows else {}).items():
            for name, at in zip(names, self._list_objects(node, attribute), strict=False):
                keys.slots[name][slot] = self._nodes[at].key
        averages = self._list_objects(node, "_model_variables_moving_average")
        keys.averages = {name: self._nodes[at].key for name, at in zip(names, averages, strict=False)}
        for attribute, at in node.children.items():
            if self._nodes[at].key:
                keys.numbers[attribute.removeprefix("_")] = self._nodes[at].key
        counter = self._nodes[node.children.get("_iterations", 0)].full_name
        keys.name = counter.rpartition("/")[0]
        named_rows = [row for row in rows if is_named_after(keys.name, row.name)]
        keys.families = tuple(row.optimizers[0] for row in named_rows or rows)
        return keys

    def _fits(self, node: _Node, row: KerasRow) -> bool:
        """True if an optimizer has the attributes of a class, and no other list of variables."""
        lists = {name for name in node.children if self._list_objects(node, name)} - {
            "_variables", "_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients",
        }  # fmt: skip
        flags = ("_average_gradients", "_u_product")
        has_flags = all((name in row.attributes) == (name in node.children) for name in flags)
        return bool(lists) and lists <= row.attributes and has_flags

    def _older(self, node: _Node) -> OptimizerKeys:
        """Return an optimizer of Keras 2, which stores its slots with their variables."""
        keys = OptimizerKeys()
        for slot, name in node.slots:
            variable, slot_variable = (self._nodes[slot.get(number, 0)] for number in (1, 3))
            parameter = self._names.get(slot.get(1, 0), _path_of(variable.key))
            keys.slots.setdefault(parameter, {})[KERAS_2_SLOTS.get(name, name)] = slot_variable.key
        keys.parameters = list(keys.slots)
        keys.numbers = {name: self._nodes[at].key for name, at in node.children.items() if self._nodes[at].key}
        keys.families = families_of(keys.slots)
        return keys


def families_of(slots: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the optimizers of Keras with these slots for each parameter."""
    names, *others = {frozenset(values) for values in slots.values()} or {frozenset[str]()}
    rows = () if others or not names else KERAS_ROWS.values()
    return tuple(row.optimizers[0] for row in rows if row.always <= names <= row.slots.keys() and not row.shared)


def _path_of(key: str) -> str:
    return key.partition("/.ATTRIBUTES")[0].removesuffix("/_state_var")


# ---- without objects -------------------------------------------------------------------------------------------------

_COUNT = "/iteration"
_SINGLE = {"iteration": "iterations", "learning_rate": "learning_rate", "beta1_power": "", "beta2_power": ""}


def _by_name(tree: Tree) -> Meaning:
    """Return the meaning of keys that are names of variables, as in TensorFlow 1."""
    variables = [key for key, value in tree.items() if isinstance(value, Tensor)]
    keys = OptimizerKeys(name=next((key.removesuffix(_COUNT) for key in variables if key.endswith(_COUNT)), ""))
    slot_variables, meaning = _slot_variables(variables, keys.name), Meaning()
    for key in variables:
        owner, _, last = key.rpartition("/")
        if key in slot_variables:
            parameter, slot = slot_variables[key]
            if slot == AVERAGE:
                keys.averages[parameter] = key
            else:
                keys.slots.setdefault(parameter, {})[slot] = key
        elif last in _SINGLE and owner == keys.name and not tree[key].shape:
            keys.numbers[_SINGLE[last] or last] = key
        elif not tree[key].shape and tree[key].dtype.kind in "iu":
            meaning.counters[key] = key
        else:
            meaning.parameters[key] = key
    if keys.slots or keys.averages or keys.numbers:
        keys.parameters = list(keys.slots)
        families = [row.optimizers[0] for row in KERAS_ROWS.values() if is_named_after(keys.name, row.name)]
        keys.families = tuple(families) or families_of(keys.slots)
        meaning.optimizers.append(keys)
    return meaning


def _slot_variables(variables: Sequence[str], optimizer: str) -> dict[str, tuple[str, str]]:
    """Return variables of an optimizer -> their parameter and slot."""
    names, matches = set(variables), {}
    row = next((row for row in KERAS_ROWS.values() if is_named_after(optimizer, row.name)), None)
    words = {f"_{word}": slot for slot, word in row.words.items()} if row else {}
    flat = {f"{optimizer}/{name.replace('/', '_')}": name for name in variables}
    for key in variables:
        owner, _, last = key.rpartition("/")
        if owner in names and last in TENSORFLOW_1_SLOTS:
            matches[key] = (owner, TENSORFLOW_1_SLOTS[last])
        for word, slot in words.items():
            if key.removesuffix(word) != key and key.removesuffix(word) in flat:
                matches[key] = (flat[key.removesuffix(word)], slot)
    return matches
