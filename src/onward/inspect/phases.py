"""What each node of a training algorithm is there for, told by what it depends on and by which state depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import onnx_ir as ir

from onward.build import DOMAIN
from onward.inspect.parts import Training
from onward.inspect.training import differentiated_values
from onward.inspect.values import ancestors, reads
from onward.model import TRAINING_DOMAIN, Model, Step
from onward.model.state import State, states

_CLIPPING = ("SquaredNorm", "ScaleToNorm", "ScaleToNormOptax", "ClipToValue")

# What a value depends on.
_BATCH, _TARGET, _GRADIENT = 1, 2, 4

# Which state depends on a value; the groups' bits follow.
_SUMS, _SCALER, _AVERAGE, _FIRST_GROUP = 1, 2, 4, 8


class Phase(Enum):
    FORWARD = "the forward pass as training runs it"
    RANDOM = "random numbers"
    LOSS = "loss"
    GRADIENT = "gradient"
    ACCUMULATE = "accumulation"
    SCALE = "loss scaling"
    CLIP = "clipping"
    SCHEDULE = "schedule"
    OPTIMIZER = "optimizer"
    AVERAGE = "average"
    OTHER = "other"


Purpose = tuple[Phase, int]
"""A phase and, for the optimizer, the index of the group."""


class Algorithm:
    """The nodes of a step, with the update taken out of the `If` under which it may happen."""

    def __init__(self, model: Model, step: Step):
        self.model, self.step = model, step
        self.nodes: list[ir.Node] = []
        self._inside: dict[ir.Value, ir.Value] = {}
        bound = {value for value in step.algorithm.outputs if value.name in set(step.update.values())}
        for node in step.algorithm:
            branch = node.attributes.get("then_branch") if node.op_type == "If" else None
            if branch is None or not bound.intersection(node.outputs):
                self.nodes.append(node)
                continue
            inner = branch.as_graph()
            self.nodes += inner
            self._inside.update(zip(node.outputs, inner.outputs, strict=False))

    def resolve(self, value: ir.Value) -> ir.Value:
        """The value itself, or for the output of such an `If` what the update computes for it."""
        return self._inside.get(value, value)

    def new_state(self) -> dict[str, ir.Value]:
        """State variable -> what replaces it."""
        outputs = {value.name: self.resolve(value) for value in self.step.algorithm.outputs}
        return {name: outputs[new] for name, new in self.step.update.items() if new in outputs}


def purposes(algorithm: Algorithm, training: Training, index: int) -> dict[ir.Node, Purpose]:
    """The purpose of each node of a step."""
    model, step = algorithm.model, algorithm.step
    targets = [value for value in differentiated_values(model, step).values() if value is not None]
    needed = ancestors(targets)
    sources = _sources(algorithm)
    random = {state.value for state in states(model, index) if state.role == "rng"}
    readers = _readers(algorithm, training, states(model, index))
    found: dict[ir.Node, Purpose] = {}
    for node in algorithm.nodes:
        depends = _joined(sources, node.outputs)
        if (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient"):
            found[node] = (Phase.GRADIENT, 0)
        elif node in needed or not depends & _GRADIENT:
            lone = not random.isdisjoint(reads(node)) or _follows(node, found, Phase.RANDOM)
            found[node] = _before(node in needed, depends, lone, _joined(readers, node.outputs))
        else:
            found[node] = _after(node, _joined(readers, node.outputs))
    return found


def _before(for_loss: bool, depends: int, random: bool, read_by: int) -> Purpose:
    """The purpose of a node that gradients do not reach."""
    if depends & _TARGET:
        return Phase.LOSS if for_loss else Phase.OTHER, 0
    if depends & _BATCH:
        return Phase.FORWARD, 0
    if random:
        return Phase.RANDOM, 0
    if for_loss:
        return Phase.LOSS, 0
    for bit, phase in ((_SUMS, Phase.ACCUMULATE), (_SCALER, Phase.SCALE)):
        if read_by & bit:
            return phase, 0
    return (Phase.AVERAGE if read_by == _AVERAGE else Phase.SCHEDULE), 0


def _after(node: ir.Node, read_by: int) -> Purpose:
    """The purpose of a node that works on gradients, or on what was made of them."""
    if node.domain == DOMAIN and node.op_type in _CLIPPING or (node.name or "").startswith("clip/"):
        return Phase.CLIP, 0
    for bit, phase in ((_SUMS, Phase.ACCUMULATE), (_SCALER, Phase.SCALE)):
        if read_by & bit:
            return phase, 0
    groups = [group for group in range(read_by.bit_length()) if read_by & (_FIRST_GROUP << group)]
    if len(groups) == 1:
        return Phase.OPTIMIZER, groups[0]
    if groups:
        return Phase.CLIP, 0
    return (Phase.AVERAGE if read_by & _AVERAGE else Phase.OTHER), 0


def _follows(node: ir.Node, found: dict[ir.Node, Purpose], phase: Phase) -> bool:
    producers = [producer for value in reads(node) if (producer := value.producer()) in found]
    return any(found[producer][0] is phase for producer in producers if producer is not None)


def _joined(bits: dict[ir.Value, int], values: Iterable[ir.Value]) -> int:
    joined = 0
    for value in values:
        joined |= bits.get(value, 0)
    return joined


def _sources(algorithm: Algorithm) -> dict[ir.Value, int]:
    """What each value depends on: the batch, what training needs beside it, gradients."""
    bits = dict.fromkeys(algorithm.model.inputs, _BATCH)
    bits |= dict.fromkeys(algorithm.step.algorithm.inputs, _TARGET)
    for node in (*algorithm.model.graph, *algorithm.nodes):
        is_gradient = (node.domain, node.op_type) == (TRAINING_DOMAIN, "Gradient")
        own = _GRADIENT if is_gradient else _joined(bits, map(algorithm.resolve, reads(node)))
        bits |= dict.fromkeys(node.outputs, own)
    return bits


def _readers(algorithm: Algorithm, training: Training, variables: Sequence[State]) -> dict[ir.Value, int]:
    """Which state depends on each value."""
    of_parameter = {name: i for i, group in enumerate(training.groups) for name in group.parameters}
    of_state = {state.name: _bit(state, of_parameter) for state in variables}
    bits: dict[ir.Value, int] = {}
    for name, value in algorithm.new_state().items():
        bits[value] = bits.get(value, 0) | of_state.get(name, 0)
    for node in reversed(algorithm.nodes):
        own = _joined(bits, node.outputs)
        for value in map(algorithm.resolve, reads(node)):
            bits[value] = bits.get(value, 0) | own
    return bits


def _bit(state: State, of_parameter: dict[str, int]) -> int:
    name = state.name
    if state.role == "accum" or name.startswith("micro_step"):
        return _SUMS
    if state.role == "scaler":
        return _SCALER
    if state.role == "ema" or name.startswith("ema/"):
        return _AVERAGE
    owner = name if name in of_parameter else state.parameter or name.rpartition("/")[0]
    return _FIRST_GROUP << of_parameter[owner] if owner in of_parameter else 0
