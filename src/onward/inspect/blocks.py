"""Blocks of a picture of a model, their text, and the edges between them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_

import onnx_ir as ir

from onward.build import DOMAIN
from onward.constants import constant_tensor
from onward.inspect.formatting import list_names, quantity, setting, settings, shape
from onward.inspect.summary import Amount, Summary, Training, port
from onward.model import Model
from onward.model.core import is_gradient, string
from onward.model.state import State, states
from onward.model.walk import ancestors, nested_graphs, read_by
from onward.recipe.optimizers.clip import clip_to_value, scale_to_norm, scale_to_norm_optax, squared_norm
from onward.run_state.reading import differentiated_values
from onward.standard import operator_name

_MOST_ROWS, _MOST_NODES_NAMED, _MOST_READERS = 6, 30, 8
_STYLES = {"random numbers": "schedule", "gradients": "update", "average": "update"}


@dataclasses.dataclass
class Box:
    """Box with a title, rows below it, and notes that appear on hover. Texts are unescaped."""

    style: str
    """Key of the styles in `picture.py`."""
    title: str
    rows: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(role, text): the role of a weight, or empty."""
    notes: list[str] = dataclasses.field(default_factory=list)


class Picture:
    """Blocks and the edges between them, of an inference graph or of one step of its training."""

    def __init__(self, model: Model, summary: Summary, index: int | None):
        self.blocks: list[Box] = []
        self.edges: dict[tuple[int, int], list[str]] = {}
        self._weights = {weight.name: weight for weight in summary.weights}
        self._made_by: dict[ir.Value, int] = {}
        self._nodes: dict[int, Sequence[ir.Node]] = {}
        self._resolve: Callable[[ir.Value], ir.Value] = lambda value: value
        self._add_inputs(model.inputs)
        self._add_graph("inference", model.graph)
        if index is not None:
            self._add_step(model, summary.steps[index], index)
        self._connect()
        self._add_outputs("output", model.outputs)

    def _add(self, block: Box, nodes: Sequence[ir.Node] = ()) -> int:
        self.blocks.append(block)
        index = len(self.blocks) - 1
        self._nodes[index] = nodes
        self._made_by |= {value: index for node in nodes for value in node.outputs}
        return index

    def _add_inputs(self, values: Iterable[ir.Value]) -> None:
        for value in values:
            self._made_by[value] = self._add(_port_block("input", value))

    def _add_outputs(self, style: str, values: Iterable[ir.Value]) -> None:
        for value in values:
            self._connect_to(self._add(_port_block(style, value)), self._resolve(value))

    def _add_graph(self, style: str, nodes: Iterable[ir.Node]) -> None:
        for name, run in fold([node for node in nodes if not _is_constant(node)]):
            read = dict.fromkeys(value.name or "" for node in run for value in read_by(node))
            weights = [self._weights[name] for name in read if name in self._weights]
            notes = _node_notes(run) + [f"{weight.role} {weight.name} {shape(weight.shape)}" for weight in weights]
            shown = [weight for weight in weights if weight.role != "constant"]
            if len(run) == 1:
                title = run[0].op_type
                rows = _shorten([(str(weight.role), f"{weight.name} {shape(weight.shape)}") for weight in shown])
            else:
                title = name or quantity(len(run), "node")
                operators = Counter(node.op_type for node in run).most_common(2)
                listed = ", ".join(op if n == 1 else f"{op} ×{n:,}" for op, n in operators)
                rows = [("", f"{quantity(len(run), 'node')}: {listed}")]
                for role in dict.fromkeys(weight.role for weight in shown):
                    of = Amount.of(weight for weight in shown if weight.role == role)
                    rows.append((role, f"{quantity(of.tensors, 'tensor')}, {of.numbers:,} numbers"))
            self._add(Box(style, title, rows, notes), run)

    def _add_step(self, model: Model, training: Training, index: int) -> None:
        step, algorithm = model.step(index), Algorithm(model, training, index)
        self._resolve = algorithm.resolve
        self._add_inputs(step.algorithm.inputs)
        nodes_by_purpose: dict[Purpose, list[ir.Node]] = {("training", 0): [], ("loss", 0): []}
        for node, node_purpose in algorithm.purposes.items():
            if not _is_constant(node):
                nodes_by_purpose.setdefault(node_purpose, []).append(node)
        for forward in ("training", "loss"):
            self._add_graph(forward, nodes_by_purpose.pop((forward, 0)))
        targets = differentiated_values(model, step)
        for (purpose, group), nodes in nodes_by_purpose.items():
            added = self._add(_purpose_block(purpose, group, training, nodes), nodes)
            if purpose == "gradient":  # which names the loss, but does not read it
                for node in nodes:
                    self._connect_to(added, targets.get(string(node, "y")))
        bound = set(step.update.values())
        self._add_outputs("metric", [value for value in step.algorithm.outputs if value.name not in bound])
        state_by_name = {state.name: state for state in states(model, index)}
        renewed: dict[int, list[State]] = {}
        for name, value in algorithm.new_state().items():
            if name in state_by_name and value in self._made_by:
                renewed.setdefault(self._made_by[value], []).append(state_by_name[name])
        for source, new_states in renewed.items():
            self.edges[source, self._add(_state_block(new_states))] = [state.name for state in new_states]

    def _connect_to(self, target: int, value: ir.Value | None) -> None:
        source = self._made_by.get(value) if value is not None else None
        if value is not None and source is not None and source != target:
            names = self.edges.setdefault((source, target), [])
            names += [text] if (text := _type_of(value)) not in names else []

    def _connect(self) -> None:
        for target, nodes in self._nodes.items():
            if self.blocks[target].style == "gradient":
                continue  # it reads all that the loss depends on, of which only the loss gets an edge
            for node in nodes:
                for value in map(self._resolve, read_by(node)):
                    self._connect_to(target, value)
        readers: dict[int, list[int]] = {}
        for source, target in self.edges:
            if self.blocks[target].style in ("inference", "training"):
                readers.setdefault(source, []).append(target)
        # If very many blocks read one, such as a mask, only the first has an edge, and the others name it in a row.
        for source, targets in readers.items():
            for target in sorted(targets)[1:] if len(targets) > _MOST_READERS else ():
                del self.edges[source, target]
                self.blocks[target].rows.append(("", f"reads {self.blocks[source].title}"))


def _is_constant(node: ir.Node) -> bool:
    """True if a node only computes a constant, which its reader shows."""
    reads_constants = all(value is None or constant_tensor(value) is not None for value in node.inputs)
    computes = node.op_type in ("ConstantOfShape", "DequantizeLinear", "Cast")
    return node.op_type == "Constant" or (computes and reads_constants)


# ---- text of blocks --------------------------------------------------------------------------------------------------


def _port_block(style: str, value: ir.Value) -> Box:
    of = port(value)
    return Box(style, of.name, [("", f"{of.type} {shape(of.shape)}")], [_type_of(value)])


def _type_of(value: ir.Value) -> str:
    of = port(value)
    return f"{of.name}: {of.type} {shape(of.shape)}"


def _node_notes(nodes: Sequence[ir.Node]) -> list[str]:
    notes = []
    for node in nodes[:_MOST_NODES_NAMED]:
        outputs = ", ".join(_type_of(value) for value in node.outputs if value.name)
        notes.append(f"{operator_name(node)} {node.name or ''} -> {outputs}")
    more = len(nodes) - _MOST_NODES_NAMED
    return [*notes, f"and {quantity(more, 'more node')}"] if more > 0 else notes


def _shorten(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return rows if len(rows) <= _MOST_ROWS else [*rows[:_MOST_ROWS], ("", f"and {len(rows) - _MOST_ROWS} more")]


def _purpose_block(purpose: str, group: int, training: Training, nodes: Sequence[ir.Node]) -> Box:
    """Return the block of all nodes of a step with one purpose."""
    title, rows, notes = purpose, [], []
    if purpose == "optimizer":
        of = training.groups[group]
        title, rows = f"{of.optimizer or 'update'} ×{len(of.parameters)}", settings(of.hyper)
        rows += [f"slots {list_names(of.slots, 3)}"] if of.slots else []
        notes = [f"updates {name}" for name in of.parameters]
    elif purpose == "gradient":
        of_what = f"of {list_names(training.loss.differentiated, 2)}"
        title, rows = "Gradient", [of_what, f"for {quantity(training.trained.tensors, 'parameter')}"]
    elif purpose == "schedule":
        names = [section.name for section in training.schedule]
        title = f"schedule: {list_names(names, 3)}" if names else "step counter"
        rows = settings(training.schedule[0].numbers) if len(names) == 1 else []
    elif purpose == "average" and training.average is not None:
        rows = [f"decay {setting(training.average.decay)}"]
    elif purpose == "gradients":
        clip, sums, scale = training.clip, training.accumulation, training.loss_scale
        rows = [f"sum of {setting(sums.batches)} batches"] if sums is not None else []
        rows += [f"loss scale {setting(scale.scale)}"] if scale is not None else []
        rows += [f"{clip.kind} at most {setting(clip.limit)}"] if clip is not None else []
    return Box(_STYLES.get(purpose, purpose), title, _shorten([("", row) for row in rows]), notes + _node_notes(nodes))


def _state_block(new_states: Sequence[State]) -> Box:
    names_by_word: dict[str, list[str]] = {}
    for state in new_states:
        word = "parameter" if state.role == "parameter" else state.slot or state.role.replace("_", " ")
        names_by_word.setdefault(word, []).append(state.name)
    rows = [
        ("trained" if word == "parameter" else "", names[0] if len(names) == 1 else f"{word} ×{len(names):,}")
        for word, names in names_by_word.items()
    ]
    return Box("state", "new state", rows, [f"{state.role} {state.name}" for state in new_states])


# ---- folding ---------------------------------------------------------------------------------------------------------


MOST = 24
"""Largest number of blocks of a graph. A graph with fewer nodes is drawn node by node."""
_FEWEST = 4

NodeRun = tuple[str, list[ir.Node]]


def fold(nodes: Sequence[ir.Node]) -> list[NodeRun]:
    """Return nodes in order, in named runs of neighbors; if there are few, one per run, unnamed.

    Runs of neighbors depend on one another only in one direction, as nodes do.
    """
    if len(nodes) <= MOST:
        return [("", [node]) for node in nodes]
    scopes = [_scope(node) for node in nodes]
    runs = [("", [node]) for node in nodes]
    for depth in range(max(map(len, scopes)), 0, -1):
        coarser = _runs(nodes, [scope[:depth] for scope in scopes])
        if len(coarser) < _FEWEST:
            break
        runs = coarser
        if len(runs) <= MOST:
            return runs
    step = math.ceil(len(runs) / MOST)
    return [_join(runs[start : start + step]) for start in range(0, len(runs), step)]


def _scope(node: ir.Node) -> tuple[str, ...]:
    """Return the path of a node in its module, by its name, its metadata, or the names of its weights."""
    path = [word for word in (node.name or "").removeprefix("train/").split("/") if word][:-1]
    if not path and (namespace := node.metadata_props.get("namespace")):
        path = [word.partition(":")[0] for word in namespace.split("/")][:-1]
    if not path:
        weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        path = next((name.split(".")[:-1] for name in weights if "." in name), [])
    return tuple(path)


def _runs(nodes: Sequence[ir.Node], scopes: Sequence[tuple[str, ...]]) -> list[NodeRun]:
    """Return neighbors with the same scope; a node without one goes with the node before it."""
    runs: list[NodeRun] = []
    for node, scope in zip(nodes, scopes, strict=True):
        name = "/".join(scope)
        if not runs or (name and name != runs[-1][0]):
            runs.append((name, []))
        runs[-1][1].append(node)
    return runs


def _join(runs: Sequence[NodeRun]) -> NodeRun:
    """Return several runs as one: `encoder/layer.0 to layer.1`."""
    (first, _), (last, _) = runs[0], runs[-1]
    end = last.rpartition("/")[2] if first.rpartition("/")[0] == last.rpartition("/")[0] else last
    return first if first == last else f"{first} to {end}", [node for _, nodes in runs for node in nodes]


# ---- the nodes of a step ---------------------------------------------------------------------------------------------

_CLIPPING = {function.name for function in (squared_norm, scale_to_norm, scale_to_norm_optax, clip_to_value)}

# Sources of a value: the batch, other inputs of training, gradients (also of earlier steps), random numbers, and other
# state.
_BATCH, _TARGET, _GRADIENT, _RANDOM, _STATE = 1, 2, 4, 8, 16
# State that depends on a value: sums and scales of gradients, averages of parameters; the groups' bits follow.
_SUMS, _AVERAGE, _FIRST_GROUP = 1, 2, 4

Purpose = tuple[str, int]
"""Purpose of a node and, for the optimizer, the index of the group."""


class Algorithm:
    """Nodes of a step by their purpose. A conditional update is taken out of its `If`."""

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
        """Return the value of the update for an output of its `If`; other values unchanged."""
        return self._inside.get(value, value)

    def new_state(self) -> dict[str, ir.Value]:
        """Return state variables -> their new values."""
        outputs = {value.name: self.resolve(value) for value in self.step.algorithm.outputs}
        return {name: outputs[new] for name, new in self.step.update.items() if new in outputs}

    def _find_purposes(self, training: Training) -> dict[ir.Node, Purpose]:
        sources, readers = self._sources(), self._readers(training)
        needed, _ = ancestors(v for v in differentiated_values(self.model, self.step).values() if v is not None)
        purposes: dict[ir.Node, Purpose] = {}
        for node in reversed(self.nodes):
            depends = _join_bits(sources, node.outputs)
            reader = next((use.node for value in node.outputs for use in value.uses() if use.node in purposes), None)
            if not depends and reader is not None:  # a constant has the purpose of its first reader
                purposes[node] = purposes[reader]
            elif is_gradient(node):
                purposes[node] = "gradient", 0
            else:
                purposes[node] = _purpose(node, depends, _join_bits(readers, node.outputs), node in needed)
        return {node: purposes[node] for node in self.nodes}

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
    return reduce(or_, (bits.get(value, 0) for value in values), 0)
