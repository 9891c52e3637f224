"""Which nodes a picture shows as one block: those of a layer, as names tell it, and those of a step by purpose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onward.build import DOMAIN
from onward.inspect.summary import Training
from onward.model import Model
from onward.model.core import is_gradient
from onward.model.state import State, states
from onward.model.walk import ancestors, nested_graphs, read_by
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax, squared_norm
from onward.run_state.reading import differentiated_values

MOST = 24
"""Blocks of a graph. One that has no more nodes is drawn node by node."""
_FEWEST = 4

Part = tuple[str, list[ir.Node]]


def fold(nodes: Sequence[ir.Node]) -> list[Part]:
    """The nodes in order, in parts that have a name; one node each, without a name, where there are not many.

    A part is a run of neighbours, so that parts depend on one another only in one direction, as nodes do.
    """
    if len(nodes) <= MOST:
        return [("", [node]) for node in nodes]
    scopes = [_scope(node) for node in nodes]
    parts = [("", [node]) for node in nodes]
    for depth in range(max(map(len, scopes)), 0, -1):
        coarser = _runs(nodes, [scope[:depth] for scope in scopes])
        if len(coarser) < _FEWEST:
            break
        parts = coarser
        if len(parts) <= MOST:
            return parts
    step = math.ceil(len(parts) / MOST)
    return [_join(parts[start : start + step]) for start in range(0, len(parts), step)]


def _scope(node: ir.Node) -> tuple[str, ...]:
    """The path of a node in the module that it comes from, by its name, its metadata, or the names of its weights."""
    path = [part for part in (node.name or "").removeprefix("train/").split("/") if part][:-1]
    if not path and (namespace := node.metadata_props.get("namespace")):
        path = [part.partition(":")[0] for part in namespace.split("/")][:-1]
    if not path:
        weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        path = next((name.split(".")[:-1] for name in weights if "." in name), [])
    return tuple(path)


def _runs(nodes: Sequence[ir.Node], scopes: Sequence[tuple[str, ...]]) -> list[Part]:
    """Neighbours with the same scope; a node without one goes with the node before it."""
    parts: list[Part] = []
    for node, scope in zip(nodes, scopes, strict=True):
        name = "/".join(scope)
        if not parts or (name and name != parts[-1][0]):
            parts.append((name, []))
        parts[-1][1].append(node)
    return parts


def _join(parts: Sequence[Part]) -> Part:
    """Several in one: `encoder/layer.0 to layer.1`."""
    (first, _), (last, _) = parts[0], parts[-1]
    end = last.rpartition("/")[2] if first.rpartition("/")[0] == last.rpartition("/")[0] else last
    return first if first == last else f"{first} to {end}", [node for _, nodes in parts for node in nodes]


# ---- the nodes of a step ---------------------------------------------------------------------------------------------

_CLIPPING = {function.name for function in (squared_norm, scale_to_norm, scale_to_norm_optax, clip_to_value)}

# What a value depends on: the batch, what training needs beside it, gradients (also of earlier steps), random numbers,
# and other state.
_BATCH, _TARGET, _GRADIENT, _RANDOM, _STATE = 1, 2, 4, 8, 16
# Which state depends on a value: sums and scales of gradients, averages of parameters; the groups' bits follow.
_SUMS, _AVERAGE, _FIRST_GROUP = 1, 2, 4

Purpose = tuple[str, int]
"""What a node is for and, for the optimizer, the index of the group."""


class Algorithm:
    """The nodes of a step by their purpose, with the update taken out of the `If` under which it may happen."""

    def __init__(self, model: Model, training: Training, index: int):
        self.model, self.step, self._states = model, model.step(index), states(model, index)
        self.nodes: list[ir.Node] = []
        self._conditions: list[ir.Value] = []
        self._inside: dict[ir.Value, ir.Value] = {}
        bound = {value for value in self.step.algorithm.outputs if value.name in set(self.step.update.values())}
        for node in self.step.algorithm:
            branches = list(nested_graphs(node)) if node.op_type == "If" and bound.intersection(node.outputs) else []
            if not branches:
                self.nodes.append(node)
                continue
            update = max(branches, key=lambda graph: sum(inner.op_type != "Identity" for inner in graph))
            self.nodes += update
            self._conditions += [value for value in node.inputs if value is not None]
            self._inside.update(zip(node.outputs, update.outputs, strict=False))
        self.purposes = self._find_purposes(training)

    def resolve(self, value: ir.Value) -> ir.Value:
        """The value itself, or for the output of such an `If` what the update computes for it."""
        return self._inside.get(value, value)

    def new_state(self) -> dict[str, ir.Value]:
        """State variable -> what replaces it."""
        outputs = {value.name: self.resolve(value) for value in self.step.algorithm.outputs}
        return {name: outputs[new] for name, new in self.step.update.items() if new in outputs}

    def _find_purposes(self, training: Training) -> dict[ir.Node, Purpose]:
        sources, readers = self._sources(), self._readers(training)
        needed, _ = ancestors(v for v in differentiated_values(self.model, self.step).values() if v is not None)
        found: dict[ir.Node, Purpose] = {}
        for node in reversed(self.nodes):
            depends = _join_bits(sources, node.outputs)
            reader = next((use.node for value in node.outputs for use in value.uses() if use.node in found), None)
            if not depends and reader is not None:  # a constant is for what reads it first
                found[node] = found[reader]
            elif is_gradient(node):
                found[node] = "gradient", 0
            else:
                found[node] = _purpose(node, depends, _join_bits(readers, node.outputs), node in needed)
        return {node: found[node] for node in self.nodes}

    def _sources(self) -> dict[ir.Value, int]:
        bits = dict.fromkeys(self.model.inputs, _BATCH) | dict.fromkeys(self.step.algorithm.inputs, _TARGET)
        roles = {"rng": _RANDOM} | dict.fromkeys(("accum", "optimizer_state", "ema"), _GRADIENT)
        roles |= dict.fromkeys(("parameter", "statistics"), 0)
        bits |= {state.value: roles.get(state.role, _STATE) for state in self._states}
        for node in (*self.model.graph, *self.nodes):
            own = _GRADIENT if is_gradient(node) else _join_bits(bits, map(self.resolve, read_by(node)))
            bits |= dict.fromkeys(node.outputs, own)
        return bits

    def _readers(self, training: Training) -> dict[ir.Value, int]:
        group_of = {name: i for i, group in enumerate(training.groups) for name in group.parameters}
        own = {state.name: _bit(state, group_of) for state in self._states}
        bits: dict[ir.Value, int] = dict.fromkeys(self._conditions, _SUMS)
        for name, value in self.new_state().items():
            bits[value] = bits.get(value, 0) | own.get(name, 0)
        for node in reversed(self.nodes):
            joined = _join_bits(bits, node.outputs)
            for value in map(self.resolve, read_by(node)):
                bits[value] = bits.get(value, 0) | joined
        return bits


def _purpose(node: ir.Node, depends: int, read_by: int, for_loss: bool) -> Purpose:
    if for_loss or not depends & _GRADIENT:
        for bit, purpose in ((_TARGET, "loss"), (_BATCH, "training"), (_RANDOM, "random numbers")):
            if depends & bit:
                return purpose, 0
        if for_loss:
            return "loss", 0
        return ("gradients" if read_by & _SUMS else "average" if read_by == _AVERAGE else "schedule"), 0
    groups = [group for group in range(read_by.bit_length()) if read_by & (_FIRST_GROUP << group)]
    is_clipping = (node.domain == DOMAIN and node.op_type in _CLIPPING) or (node.name or "").startswith("clip/")
    if len(groups) == 1 and not read_by & _SUMS and not is_clipping:
        return "optimizer", groups[0]
    return ("average" if read_by == _AVERAGE else "gradients"), 0


def _bit(state: State, group_of: dict[str, int]) -> int:
    if state.role in ("accum", "scaler") or state.name.startswith("micro_step"):
        return _SUMS
    if state.role == "ema" or state.name.startswith("ema/"):
        return _AVERAGE
    owner = state.name if state.name in group_of else state.parameter or state.name.rpartition("/")[0]
    return _FIRST_GROUP << group_of[owner] if owner in group_of else 0


def _join_bits(bits: dict[ir.Value, int], values: Iterable[ir.Value]) -> int:
    joined = 0
    for value in values:
        joined |= bits.get(value, 0)
    return joined
