"""The cost of one forward and backward pass: weights, saved activations, floating-point operations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from onward.analysis.blocks import cut_into_parts
from onward.engines.fusion import Attention, matches
from onward.errors import ArgumentError
from onward.lowering.contract import Contract, contract_of
from onward.lowering.step import lower_for_engine, lower_for_framework
from onward.model import Model
from onward.model.core import values
from onward.model.state import State, carried_state
from onward.model.walk import nested_graphs, source_of
from onward.planning.schedule import Kernel, LoweredBlock, MemorySchedule, Usage
from onward.transform.types import fill_in_types

FUSES_ATTENTION = ("torch", "jax")
"""Engines that compute attention without storing its scores."""

_EXACT = {
    "Exp", "Log", "Pow", "Softmax", "LogSoftmax", "CumSum", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss",
    "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare", "LayerNormalization", "BatchNormalization",
}  # fmt: skip
"""Operators that are computed in float32 where matmuls are not, as in `torch.autocast`."""


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """A weight that the forward pass reads, with the bytes of its gradient and optimizer state."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    gradient: int = 0
    state: int = 0
    """Moments, float32 master weights, averages, accumulated gradients."""
    slots: tuple[str, ...] = ()
    """Names of the state that has the shape of the weight."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Workload:
    """One forward and backward pass of a device, for a batch of fixed size."""

    def __init__(self, model: Model, step: int, engine: str, precision: str | None):
        lowered = lower_for_engine(model, step, "gradients")
        self.graph, self.contract = lowered.graph, contract_of(lowered)
        _refuse_open_sizes(self.graph, self.contract)
        fill_in_types(lowered, values(self.graph))
        if engine in FUSES_ATTENTION:
            kernels, scores = _attention(lower_for_framework(model, step, "gradients"), self.graph)
            self.schedule = MemorySchedule(
                self.graph,
                self.contract,
                kernels,
                lambda v: dims_of(v) in scores or _is_inside_a_rule(v),
                _ends_cross_entropy,
            )
        else:
            self.schedule = MemorySchedule(self.graph, self.contract)
        tensors = (v for v in self.schedule.tensors() if _is_float(v) and not (v.shape and len(v.shape) < 2))
        self.unknown = sum(dims_of(v) is None for v in tensors)
        """Number of tensors of unknown size, without vectors."""
        self.precision = precision
        self.weights, self.other_state = _weights(self.graph, self.contract, carried_state(model, step))
        self.blocks = _blocks(model, step, self.schedule.forward, self.weights)
        self.batch = sum(map(bytes_of, (v for v in self.graph.inputs if v.name in self.contract.batch)))

    @property
    def outside(self) -> list[PlannedWeight]:
        """The weights outside all blocks."""
        inside = {name for block in self.blocks for name in block.weights}
        return [weight for weight in self.weights.values() if weight.name not in inside]

    def weights_of(self, block: LoweredBlock) -> list[PlannedWeight]:
        return [self.weights[name] for name in block.weights if name in self.weights]

    @functools.cached_property
    def forward_flops(self) -> int:
        return sum(map(flops, self.schedule.forward))

    @functools.cached_property
    def backward_flops(self) -> int:
        return sum(map(flops, self.schedule.backward))

    @property
    def flops_of_blocks(self) -> int:
        """Operations that recomputing blocks adds."""
        return sum(flops(node) for block in self.blocks for node in block.nodes)

    def usage(self, *, recompute: bool, shards: Mapping[ir.Value, int] = {}) -> Usage:
        """Return the memory used; `shards` is the number of devices that each value is divided among."""
        sizes = self._sizes
        return self.schedule.usage(lambda v: sizes[v] // shards.get(v, 1), self.blocks if recompute else ())

    def computed_bytes(self, weight: PlannedWeight) -> int:
        """Return the bytes of a weight in the type that it is computed with."""
        if self.precision is None or weight.name not in self._in_products:
            return weight.bytes
        return min(weight.bytes, 2 * weight.elements)

    @property
    def copies(self) -> int:
        """Bytes of the copies of weights in the type of matmuls, which stay from the first matmul to the last."""
        sizes = ((self.computed_bytes(weight), weight.bytes) for weight in self.weights.values())
        return sum(computed for computed, stored in sizes if computed != stored)

    @functools.cached_property
    def _in_products(self) -> set[str]:
        """Names of the weights that matmuls read."""
        products = [node for node in self.schedule.forward if node.op_type in PRODUCTS]
        sources = (source_of(value, {"Transpose", "Reshape", "Identity"}) for node in products for value in node.inputs)
        return {value.name or "" for value in sources if value is not None}

    @functools.cached_property
    def _sizes(self) -> dict[ir.Value, int]:
        sizes = {v: bytes_of(v) for node in self.schedule.nodes for v in node.outputs}
        return sizes if self.precision is None else sizes | _sizes_in_half(self.schedule)


def _sizes_in_half(schedule: MemorySchedule) -> dict[ir.Value, int]:
    """Return sizes with matmuls in 16 bits: results stay in 16 bits until an operator needs more, as in autocast."""
    width: dict[ir.Value, int] = {}
    backward = set(schedule.backward)
    for node in schedule.nodes:
        tensors = [v for v in node.inputs if v is not None and _is_float(v) and elements(v) > 1]
        widest = max((width.get(v) or bytes_of(v) // elements(v) for v in tensors), default=4)
        is_product = node.op_type in PRODUCTS or _adds_bias(node)
        few = 2 if is_product else 4 if node.op_type in _EXACT else widest
        width.update({v: min(few, bytes_of(v) // elements(v)) for v in node.outputs if _is_float(v) and elements(v)})
    for value in schedule.saved():
        readers = [node for node in value.consumers() if node in backward]
        if value in width and all(node.op_type in PRODUCTS | {"Reshape", "Transpose"} for node in readers):
            width[value] = min(2, width[value])  # a matmul saves its inputs in 16 bits
    return {value: elements(value) * size for value, size in width.items() if value not in schedule.gradients}


def _adds_bias(node: ir.Node) -> bool:
    """True if a node adds a bias to a matmul: frameworks fuse the two."""
    producers = [value.producer() for value in node.inputs if value is not None]
    rows = [len(dims_of(value) or ()) for value in node.inputs if value is not None and value.producer() is None]
    return node.op_type == "Add" and rows == [1] and any(p is not None and p.op_type in PRODUCTS for p in producers)


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _refuse_open_sizes(graph: ir.Graph, contract: Contract) -> None:
    for value in graph.inputs:
        if value.name in contract.batch and dims_of(value) is None:
            rest = [str(d) if isinstance(d, int) else "128" for d in (value.shape or ())[1:]]
            shown = ", ".join(map(str, value.shape)) if value.shape is not None else "?"
            raise ArgumentError(
                f"the sizes of `{value.name}` are open: [{shown}]",
                hint=f"give them: `--shape {value.name}={','.join(['N', *rest])}`",
            )


def _is_inside_a_rule(value: ir.Value) -> bool:
    """True if a value is intermediate in the derivative of one operator: frameworks have one kernel for that."""
    node = value.producer()
    scope = (node.name or "").rpartition("/")[0] if node is not None else ""
    readers = [(reader.name or "").rpartition("/")[0] for reader in value.consumers()]
    return scope.startswith("grad/") and bool(readers) and all(reader == scope for reader in readers)


def _ends_cross_entropy(node: ir.Node) -> bool:
    """True if frameworks hold two gradients here: of the log-probabilities and of the logits."""
    return node.op_type == "ScatterElements" and (node.name or "").endswith("SoftmaxCrossEntropyLoss/ScatterElements")


def _attention(model: Model, lowered: ir.Graph) -> tuple[list[Kernel], set[tuple[int, ...] | None]]:
    """Return the attention kernels, as values of the lowered step, and the shapes of scores, also transposed.

    `model` is the step before differentiation, where attention still matches.
    """
    nodes, by_name = list(model.graph), {value.name: value for value in values(lowered)}
    kernels, shapes = [], {_scores_of(node) for node in nodes if node.op_type == "Attention"}
    for match in matches(nodes, set(model.graph.outputs), ("Attention",)):
        if isinstance(match, Attention):
            output = match.nodes[-1].outputs[0]
            inner = [by_name.get(v.name) for node in match.nodes for v in node.outputs if v is not output]
            saved = [by_name.get(v.name) for v in (match.q, match.k, match.v, output)]
            kernels.append(Kernel([v for v in inner if v is not None], [v for v in saved if v is not None]))
            soft = (by_name.get(node.outputs[0].name) for node in match.nodes if node.op_type == "Softmax")
            shapes.update(dims_of(value) for value in soft)
    return kernels, {shape for s in shapes if s for shape in (s, (*s[:-2], s[-1], s[-2]))}


def _scores_of(node: ir.Node) -> tuple[int, ...] | None:
    q, k = (dims_of(value) if value is not None else None for value in node.inputs[:2])
    if q is None or k is None:
        return None
    heads = node.attributes.get_int("q_num_heads", q[1])
    return q[0], heads, q[-2], k[-2]


def _weights(graph: ir.Graph, contract: Contract, state: Iterable[State]) -> tuple[dict[str, PlannedWeight], int]:
    """Return the weights that the forward pass reads, trainable and frozen, and the bytes of all other state."""
    gradients = {x: bytes_of(value) for value in graph.outputs if (x := contract.gradients.get(value.name or ""))}
    read = {value.name or "": value for value in graph.inputs if value.name in contract.state}
    added: dict[str, list[State]] = {name: [] for name in gradients}
    other = 0
    for entry in state:
        owner = entry.parameter or entry.name.rpartition("/")[0]
        if entry.name not in gradients and owner in added:
            added[owner].append(entry)
        elif entry.name not in gradients:
            other += entry.nbytes
    tensors = {name: value for name, value in read.items() if name in gradients}
    tensors |= {name: value for name, value in graph.initializers.items() if _is_float(value) and elements(value) > 1}
    return {name: _weight(value, gradients.get(name, 0), added.get(name, [])) for name, value in tensors.items()}, other


def _weight(value: ir.Value, gradient: int, added: Sequence[State]) -> PlannedWeight:
    shape = dims_of(value) or ()
    slots = tuple(state.name for state in added if _stored_shape(state) == shape)
    return PlannedWeight(value.name or "", shape, bytes_of(value), gradient, sum(s.nbytes for s in added), slots)


def _stored_shape(state: State) -> tuple[int, ...]:
    tensor = state.value.const_value
    return tuple(tensor.shape.numpy()) if tensor is not None else ()


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(model: Model, step: int, forward: Sequence[ir.Node], weights: Collection[str]) -> list[LoweredBlock]:
    """Return the blocks of the inference graph in the forward pass of a lowered step."""
    layers = [layer for layer in cut_into_parts(model, weights) if layer.pattern is not None]
    block_of = {value.name: i for i, layer in enumerate(layers) for node in layer.nodes for value in node.outputs}
    in_training = model.step(step).fact("train.forward") or {}
    blocks: dict[ir.Node, int | None] = {}
    for node in reversed(forward):
        outputs = [in_training.get(value.name, value.name) for value in node.outputs]
        computed_by = [block_of[name] for name in outputs if name in block_of]
        readers = {blocks[reader] for value in node.outputs for reader in value.consumers() if reader in blocks}
        # nodes that an operator was expanded to belong to the block that reads them
        blocks[node] = computed_by[0] if computed_by else readers.pop() if len(readers) == 1 else None
    nodes: list[list[ir.Node]] = [[] for _ in layers]
    for node in forward:
        if (block := blocks[node]) is not None:
            nodes[block].append(node)
    own = [{value.name or "" for value in layer.initializers} & set(weights) for layer in layers]
    return [LoweredBlock(*row) for row in zip((layer.name for layer in layers), nodes, own, strict=True)]


# ---- sizes and floating-point operations -----------------------------------------------------------------------------


def dims_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None if it is not static."""
    shape = value.shape if value is not None else None
    return tuple(shape.numpy()) if shape is not None and shape.is_static() else None


def elements(value: ir.Value | None) -> int:
    """Return the number of elements; 0 if it is unknown."""
    dims = dims_of(value)
    return 0 if dims is None else math.prod(dims)


def bytes_of(value: ir.Value) -> int:
    return math.ceil(elements(value) * value.dtype.itemsize) if value.dtype is not None else 0


# A multiply-add counts as two. Other operators count one per element of their outputs: next to matmuls that is little.


def flops(node: ir.Node) -> int:
    """Return the operations of a node and of its nested graphs: a body of a Scan runs many times, others once."""
    own = _PRODUCTS.get(node.op_type)
    inner = sum(flops(nested) for graph in nested_graphs(node) for nested in graph)
    sequence = node.inputs[-1] if node.op_type == "Scan" and node.inputs else None
    times = next(iter(_sizes(sequence)), 1)
    return (own(node) if own else sum(elements(output) for output in node.outputs)) + inner * times


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    return dims_of(value) or ()


def _matmul(node: ir.Node) -> int:
    return 2 * elements(node.outputs[0]) * next(iter(_sizes(node.inputs[0])[-1:]), 0)


def _gemm(node: ir.Node) -> int:
    a = _sizes(node.inputs[0])
    inner = a[0 if node.attributes.get_int("transA", 0) else 1] if len(a) == 2 else 0
    return 2 * elements(node.outputs[0]) * inner


def _conv(node: ir.Node) -> int:
    positions = node.inputs[0] if node.op_type == "ConvTranspose" else node.outputs[0]  # of the kernel
    return 2 * elements(positions) * math.prod(_sizes(node.inputs[1])[1:])


def _einsum(node: ir.Node) -> int:
    """Count each combination of indices once per factor."""
    terms = node.attributes.get_string("equation", "").replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=False):
        sizes |= dict(zip(term, _sizes(value), strict=False))
    return len(terms) * math.prod(sizes.values())


def _recurrent(node: ir.Node) -> int:
    """Count, in each step, the input and the last state times the weights of all gates."""
    length, batch, *_ = (*_sizes(node.inputs[0]), 0, 0)
    return 2 * length * batch * (elements(node.inputs[1]) + elements(node.inputs[2]))


_PRODUCTS: dict[str, Callable[[ir.Node], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
PRODUCTS = frozenset(_PRODUCTS)
"""Operators that `--precision` applies to."""
