"""What each node of a training algorithm is there for, told by what it depends on and by which state depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import onnx_ir as ir

from onward.build import DOMAIN
from onward.inspect.summary_fields import Training
from onward.inspect.training import differentiated_values
from onward.inspect.values import ancestors, nested, reads
from onward.model import Model, Step
from onward.model.core import is_gradient
from onward.model.state import State, states
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax, squared_norm

_CLIPPING = {function.name for function in (squared_norm, scale_to_norm, scale_to_norm_optax, clip_to_value)}

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
    CLIP = "gradients"
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
        self.conditions: list[ir.Value] = []
        self._inside: dict[ir.Value, ir.Value] = {}
        bound = {value for value in step.algorithm.outputs if value.name in set(step.update.values())}
        for node in step.algorithm:
            branches = list(nested(node)) if node.op_type == "If" and bound.intersection(node.outputs) else []
            if not branches:
                self.nodes.append(node)
                continue
            update = max(branches, key=lambda graph: sum(inner.op_type != "Identity" for inner in graph))
            self.nodes += update
            self.conditions += [value for value in node.inputs if value is not None]
            self._inside.update(zip(node.outputs, update.outputs, strict=False))

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
    variables = states(model, index)
    sources, readers = _sources(algorithm, variables), _readers(algorithm, training, variables)
    needed = ancestors(value for value in differentiated_values(model, step).values() if value is not None)
    random = {state.value for state in variables if state.role == "rng"}
    found: dict[ir.Node, Purpose] = {}
    for node in algorithm.nodes:
        depends, read_by = _joined(sources, node.outputs), _joined(readers, node.outputs)
        if is_gradient(node):
            found[node] = (Phase.GRADIENT, 0)
        elif depends & _GRADIENT and node not in needed:
            found[node] = _after(node, read_by)
        else:
            from_random = not random.isdisjoint(reads(node)) or _follows(node, found, Phase.RANDOM)
            found[node] = _before(node in needed, depends, from_random, read_by)
    for node in reversed(algorithm.nodes):  # what the forward pass makes of constants belongs to it
        constant = found[node][0] is Phase.LOSS and not _joined(sources, node.outputs)
        if constant and _precedes(node, found, Phase.FORWARD):
            found[node] = (Phase.FORWARD, 0)
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
    if (node.domain == DOMAIN and node.op_type in _CLIPPING) or (node.name or "").startswith("clip/"):
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
    producers = (value.producer() for value in reads(node))
    return any(found[producer][0] is phase for producer in producers if producer in found)


def _precedes(node: ir.Node, found: dict[ir.Node, Purpose], phase: Phase) -> bool:
    readers = (use.node for output in node.outputs for use in output.uses())
    return any(found[reader][0] is phase for reader in readers if reader in found)


def _joined(bits: dict[ir.Value, int], values: Iterable[ir.Value]) -> int:
    joined = 0
    for value in values:
        joined |= bits.get(value, 0)
    return joined


def _sources(algorithm: Algorithm, variables: Sequence[State]) -> dict[ir.Value, int]:
    """What each value depends on: the batch, what training needs beside it, gradients, also of earlier runs."""
    bits = dict.fromkeys(algorithm.model.inputs, _BATCH)
    bits |= dict.fromkeys(algorithm.step.algorithm.inputs, _TARGET)
    bits |= {state.value: _GRADIENT for state in variables if state.role in ("accum", "optimizer_state", "ema")}
    for node in (*algorithm.model.graph, *algorithm.nodes):
        own = _GRADIENT if is_gradient(node) else _joined(bits, map(algorithm.resolve, reads(node)))
        bits |= dict.fromkeys(node.outputs, own)
    return bits


def _readers(algorithm: Algorithm, training: Training, variables: Sequence[State]) -> dict[ir.Value, int]:
    """Which state depends on each value."""
    of_parameter = {name: i for i, group in enumerate(training.groups) for name in group.parameters}
    of_state = {state.name: _bit(state, of_parameter) for state in variables}
    bits: dict[ir.Value, int] = {}
    for name, value in algorithm.new_state().items():
        bits[value] = bits.get(value, 0) | of_state.get(name, 0)
    chosen = _SCALER if any(state.role == "scaler" for state in variables) else _SUMS
    if any(state.role in ("scaler", "accum") for state in variables):
        bits |= {value: bits.get(value, 0) | chosen for value in algorithm.conditions}
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
