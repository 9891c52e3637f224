"""What a picture of a model shows: blocks, what is written on them, and which gives something to which."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import onnx_ir as ir

from onward.inspect.formatting import listed, quantity, setting, settings, shape
from onward.inspect.picture.phases import Algorithm, Phase, purposes
from onward.inspect.picture.scopes import cut
from onward.inspect.summary import Summary
from onward.inspect.summary_fields import Group, Port, Training, Weight
from onward.inspect.training import differentiated_values
from onward.inspect.values import constant, port, reads, text_attribute
from onward.model import Model
from onward.model.state import State, states
from onward.standard import operator_name

Kind = Literal[
    "input", "inference", "output", "training", "loss", "gradient", "update", "schedule", "optimizer", "state", "metric"
]
_MOST_ROWS, _MOST_LOSS_NODES, _MOST_NODES_NAMED, _MOST_READERS = 4, 12, 30, 8


@dataclasses.dataclass
class Block:
    """A box: a title, rows below it, and a note that appears when one points at it. Texts are as the file has them."""

    kind: Kind
    title: str
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(role, text): the role of a weight, or empty."""
    notes: list[str] = dataclasses.field(default_factory=list)


class Picture:
    """Blocks and the edges between them, of an inference graph or of one step of its training."""

    def __init__(self, model: Model, summary: Summary, index: int | None):
        self.blocks: list[Block] = []
        self.edges: dict[tuple[int, int], list[str]] = {}
        self._weights = {weight.name: weight for weight in summary.weights}
        self._made_by: dict[ir.Value, int] = {}
        self._nodes: dict[int, list[ir.Node]] = {}
        self._resolve: Callable[[ir.Value], ir.Value] = lambda value: value
        self._inputs("input", model.inputs)
        self._graph("inference", model.graph)
        if index is not None:
            self._step(model, summary.steps[index], index)
        self._connect()
        self._outputs("output", model.outputs)

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _add(self, block: Block, nodes: Sequence[ir.Node] = ()) -> int:
        self.blocks.append(block)
        index = len(self.blocks) - 1
        self._nodes[index] = list(nodes)
        self._made_by |= {value: index for node in nodes for value in node.outputs}
        return index

    def _inputs(self, kind: Kind, values: Iterable[ir.Value]) -> None:
        for value in values:
            self._made_by[value] = self._add(_port_block(kind, port(value)))

    def _outputs(self, kind: Kind, values: Iterable[ir.Value]) -> None:
        for value in values:
            block = self._add(_port_block(kind, port(value)))
            self._edge(self._made_by.get(self._resolve(value)), block, value)

    def _graph(self, kind: Kind, nodes: Iterable[ir.Node]) -> None:
        for name, part in cut([node for node in nodes if not _is_constant(node)]):
            self._add(self._forward_block(kind, name, part), part)

    def _forward_block(self, kind: Kind, name: str, nodes: Sequence[ir.Node]) -> Block:
        read = dict.fromkeys(value.name or "" for node in nodes for value in reads(node))
        weights = [self._weights[name] for name in read if name in self._weights]
        shown = [weight for weight in weights if weight.role != "constant"]
        notes = [_described(node) for node in nodes[:_MOST_NODES_NAMED]]
        if len(nodes) > _MOST_NODES_NAMED:
            notes.append(f"and {len(nodes) - _MOST_NODES_NAMED:,} more nodes")
        notes += [f"{weight.role} {weight.name} {shape(weight.shape)}" for weight in weights]
        if len(nodes) == 1:
            return Block(kind, nodes[0].op_type, _weight_rows(shown), notes)
        kinds = Counter(node.op_type for node in nodes)
        contents = ", ".join(op if count == 1 else f"{op} ×{count:,}" for op, count in kinds.most_common(2))
        count = quantity(len(nodes), "node")
        first = ("", f"{count}: {contents}" if name else contents)
        return Block(kind, name or count, [first, *_weight_counts(shown)], notes)

    # ---- a step --------------------------------------------------------------------------------------------------

    def _step(self, model: Model, training: Training, index: int) -> None:
        step = model.step(index)
        algorithm = Algorithm(model, step)
        self._resolve = algorithm.resolve
        self._inputs("input", step.algorithm.inputs)
        by_purpose: dict[tuple[Phase, int], list[ir.Node]] = {}
        for node, purpose in purposes(algorithm, training, index).items():
            if not _is_constant(node):
                by_purpose.setdefault(purpose, []).append(node)
        self._graph("training", by_purpose.pop((Phase.FORWARD, 0), []))
        self._loss(by_purpose.pop((Phase.LOSS, 0), []), training)
        for (phase, group), nodes in by_purpose.items():
            self._add(_phase_block(phase, group, training, nodes), nodes)
        self._differentiated(model, index)
        bound = set(step.update.values())
        self._outputs("metric", [value for value in step.algorithm.outputs if value.name not in bound])
        self._state(algorithm, states(model, index))

    def _loss(self, nodes: list[ir.Node], training: Training) -> None:
        if len(nodes) <= _MOST_LOSS_NODES:
            for node in nodes:
                self._add(Block("loss", node.op_type, notes=[_described(node)]), [node])
            return
        name = " + ".join(term.name for term in training.loss.terms) or "loss"
        self._add(Block("loss", name, [("", quantity(len(nodes), "node"))], [_described(n) for n in nodes]), nodes)

    def _differentiated(self, model: Model, index: int) -> None:
        """The edge from a loss to its Gradient, which names it but does not read it."""
        targets = differentiated_values(model, model.step(index))
        for block, nodes in self._nodes.items():
            for node in nodes if self.blocks[block].kind == "gradient" else ():
                value = targets.get(text_attribute(node, "y") or "")
                if value is not None:
                    self._edge(self._made_by.get(value), block, value)

    def _state(self, algorithm: Algorithm, variables: Sequence[State]) -> None:
        """A block for the state that each block renews."""
        known = {state.name: state for state in variables}
        renewed: dict[int, list[State]] = {}
        for name, value in algorithm.new_state().items():
            if name in known and value in self._made_by:
                renewed.setdefault(self._made_by[value], []).append(known[name])
        for source, found in renewed.items():
            self.edges[source, self._add(_state_block(found))] = [state.name for state in found]

    # ---- edges ---------------------------------------------------------------------------------------------------

    def _edge(self, source: int | None, target: int, value: ir.Value) -> None:
        if source is not None and source != target:
            names = self.edges.setdefault((source, target), [])
            if (text := _typed(port(value))) not in names:
                names.append(text)

    def _connect(self) -> None:
        for target, nodes in self._nodes.items():
            if self.blocks[target].kind == "gradient":
                continue  # it reads everything that the loss depends on: only the loss itself is worth a line
            for node in nodes:
                for value in map(self._resolve, reads(node)):
                    self._edge(self._made_by.get(value), target, value)
        self._thin_out()

    def _thin_out(self) -> None:
        """Where one block gives something to very many, such as a mask to all layers, the others say so in a row."""
        readers: dict[int, list[int]] = {}
        for source, target in self.edges:
            if self.blocks[target].kind in ("inference", "training"):
                readers.setdefault(source, []).append(target)
        for source, targets in readers.items():
            for target in sorted(targets)[1:] if len(targets) > _MOST_READERS else ():
                del self.edges[source, target]
                self.blocks[target].rows.append(("", f"reads {self.blocks[source].title}"))


def _is_constant(node: ir.Node) -> bool:
    """Whether a node only makes a constant: what reads it shows it."""
    known = all(value is None or constant(value) is not None for value in node.inputs)
    return node.op_type == "Constant" or (node.op_type in ("ConstantOfShape", "DequantizeLinear", "Cast") and known)


# ---- what is written on blocks ---------------------------------------------------------------------------------------


def _port_block(kind: Kind, of: Port) -> Block:
    return Block(kind, of.name, [("", f"{of.type} {shape(of.shape)}")], [_typed(of)])


def _typed(of: Port) -> str:
    return f"{of.name}: {of.type} {shape(of.shape)}"


def _described(node: ir.Node) -> str:
    outputs = ", ".join(_typed(port(value)) for value in node.outputs if value.name)
    return f"{operator_name(node)} {node.name or ''} -> {outputs}"


def _weight_rows(weights: Sequence[Weight]) -> list[tuple[str, str]]:
    rows = [(str(weight.role), f"{weight.name} {shape(weight.shape)}") for weight in weights[:_MOST_ROWS]]
    more = len(weights) - _MOST_ROWS
    return [*rows, ("", f"and {more} more")] if more > 0 else rows


def _weight_counts(weights: Sequence[Weight]) -> list[tuple[str, str]]:
    roles = Counter(weight.role for weight in weights)
    numbers = Counter[str]()
    for weight in weights:
        numbers[weight.role] += weight.numbers
    return [(role, f"{quantity(count, 'tensor')}, {numbers[role]:,} numbers") for role, count in roles.items()]


def _phase_block(phase: Phase, group: int, training: Training, nodes: Sequence[ir.Node]) -> Block:
    """One block for all nodes of a phase; those of an optimizer group, however many parameters it has."""
    kinds: dict[Phase, Kind] = {
        Phase.GRADIENT: "gradient",
        Phase.OPTIMIZER: "optimizer",
        Phase.SCHEDULE: "schedule",
        Phase.RANDOM: "schedule",
    }
    title, facts = _phase_text(phase, group, training)
    notes = [quantity(len(nodes), "node"), *(_described(node) for node in nodes[:_MOST_NODES_NAMED])]
    if phase is Phase.OPTIMIZER:
        notes = [f"updates {name}" for name in training.groups[group].parameters] + notes
    return Block(kinds.get(phase, "update"), title, [("", fact) for fact in facts], notes)


def _phase_text(phase: Phase, group: int, training: Training) -> tuple[str, list[str]]:
    if phase is Phase.OPTIMIZER:
        return _group_text(training.groups[group])
    if phase is Phase.GRADIENT:
        count = quantity(training.trained.tensors, "parameter")
        return "Gradient", [f"of {listed(training.loss.differentiated, 2)}", f"for {count}"]
    if phase is Phase.CLIP and training.clip is not None:
        return "clipping", [f"{training.clip.kind} at most {setting(training.clip.limit)}"]
    if phase is Phase.ACCUMULATE and training.accumulation is not None:
        return "accumulation", [f"of {setting(training.accumulation.batches)} batches"]
    if phase is Phase.SCALE and training.loss_scale is not None:
        return "loss scaling", [f"scale {setting(training.loss_scale.scale)}"]
    if phase is Phase.AVERAGE and training.average is not None:
        return "average", [f"decay {setting(training.average.decay)}"]
    if phase is Phase.SCHEDULE:
        names = [section.name for section in training.schedule]
        return f"schedule: {listed(names, 3)}" if names else "step counter", _numbers(training)
    return phase.value, []


def _numbers(training: Training) -> list[str]:
    return settings(training.schedule[0].numbers)[:_MOST_ROWS] if len(training.schedule) == 1 else []


def _group_text(group: Group) -> tuple[str, list[str]]:
    rows = settings(group.hyper)
    most = _MOST_ROWS + 2
    rows = rows if len(rows) <= most else [*rows[: most - 1], f"and {len(rows) - most + 1} more"]
    title = f"{group.optimizer or 'update'} ×{len(group.parameters)}"
    return title, [*rows, *([f"slots {listed(group.slots, 3)}"] if group.slots else [])]


def _state_block(found: Sequence[State]) -> Block:
    sorts: dict[str, list[str]] = {}
    for state in found:
        word = "parameter" if state.role == "parameter" else state.slot or state.role.replace("_", " ")
        sorts.setdefault(word, []).append(state.name)
    rows = [names[0] if len(names) == 1 else f"{word} ×{len(names):,}" for word, names in sorts.items()]
    marked = [("trained" if word == "parameter" else "", row) for word, row in zip(sorts, rows, strict=True)]
    return Block("state", "new state", marked, [f"{state.role} {state.name}" for state in found])
