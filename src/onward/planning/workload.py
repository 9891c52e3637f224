"""What one pass of a training model asks of a machine: its weights, what is kept for the way back, its operations."""

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
"""The engines that compute attention without keeping its scores."""

_EXACT = {
    "Exp", "Log", "Pow", "Softmax", "LogSoftmax", "CumSum", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss",
    "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare", "LayerNormalization", "BatchNormalization",
}  # fmt: skip
"""What is computed in float32 where products are not."""


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """A tensor of the state that is read in the forward pass, and all that training adds to it, in bytes."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    gradient: int = 0
    state: int = 0
    """Moments, copies in float32, averages, accumulated gradients."""
    slots: tuple[str, ...] = ()
    """Those of them that have its shape."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Workload:
    """One pass for a batch of a fixed size, which is a device's part."""

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
                lambda v: dims_of(v) in scores or _stays_in_a_rule(v),
                _ends_cross_entropy,
            )
        else:
            self.schedule = MemorySchedule(self.graph, self.contract)
        tensors = (v for v in self.schedule.tensors() if _is_float(v) and not (v.shape and len(v.shape) < 2))
        self.unknown = sum(dims_of(v) is None for v in tensors)
        """How many have a size that nothing tells, lists aside."""
        self.precision = precision
        self.weights, self.other_state = _weights(self.graph, self.contract, carried_state(model, step))
        self.blocks = _blocks(model, step, self.schedule.forward, self.weights)
        self.batch = sum(map(bytes_of, (v for v in self.graph.inputs if v.name in self.contract.batch)))

    @property
    def outside(self) -> list[PlannedWeight]:
        """Weights that belong to no block."""
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
        """Those of the forward pass that are spent again where blocks are computed twice."""
        return sum(flops(node) for block in self.blocks for node in block.nodes)

    def usage(self, *, recompute: bool, shards: Mapping[ir.Value, int] = {}) -> Usage:
        """What is in memory meanwhile; `shards`: into how many parts values are divided among devices."""
        sizes = self._sizes
        return self.schedule.usage(lambda v: sizes[v] // shards.get(v, 1), self.blocks if recompute else ())

    def computed_bytes(self, weight: PlannedWeight) -> int:
        """What a weight takes in the type that it is computed with."""
        if self.precision is None or weight.name not in self._in_products:
            return weight.bytes
        return min(weight.bytes, 2 * weight.elements)

    @property
    def copies(self) -> int:
        """What copies of weights in the type of products take, which are kept from the first product to the last."""
        both = ((self.computed_bytes(weight), weight.bytes) for weight in self.weights.values())
        return sum(few for few, all_ in both if few != all_)

    @functools.cached_property
    def _in_products(self) -> set[str]:
        """The names of weights that products read."""
        products = [node for node in self.schedule.forward if node.op_type in PRODUCTS]
        sources = (source_of(value, {"Transpose", "Reshape", "Identity"}) for node in products for value in node.inputs)
        return {value.name or "" for value in sources if value is not None}

    @functools.cached_property
    def _sizes(self) -> dict[ir.Value, int]:
        made = {v: bytes_of(v) for node in self.schedule.nodes for v in node.outputs}
        return made if self.precision is None else {**made, **_sizes_in_half(self.schedule)}


def _sizes_in_half(schedule: MemorySchedule) -> dict[ir.Value, int]:
    """Sizes with products in 16 bits: results stay so until something needs more, as `torch.autocast` has it."""
    width: dict[ir.Value, int] = {}
    backward = set(schedule.backward)
    for node in schedule.nodes:
        tensors = [v for v in node.inputs if v is not None and _is_float(v) and elements(v) > 1]
        widest = max((width.get(v) or bytes_of(v) // elements(v) for v in tensors), default=4)
        is_product = node.op_type in PRODUCTS or _adds_bias(node)
        few = 2 if is_product else 4 if node.op_type in _EXACT else widest
        width.update({v: min(few, bytes_of(v) // elements(v)) for v in node.outputs if _is_float(v) and elements(v)})
    for value in schedule.kept():
        readers = [node for node in value.consumers() if node in backward]
        if value in width and all(node.op_type in PRODUCTS | {"Reshape", "Transpose"} for node in readers):
            width[value] = min(2, width[value])  # a product keeps what it was given in 16 bits
    return {value: elements(value) * size for value, size in width.items() if value not in schedule.gradients}


def _adds_bias(node: ir.Node) -> bool:
    """Whether a node adds a row to a product, which frameworks do with the product."""
    made = [value.producer() for value in node.inputs if value is not None]
    rows = [len(dims_of(value) or ()) for value in node.inputs if value is not None and value.producer() is None]
    return node.op_type == "Add" and rows == [1] and any(each is not None and each.op_type in PRODUCTS for each in made)


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_floating_point()


def _refuse_open_sizes(graph: ir.Graph, contract: Contract) -> None:
    for value in graph.inputs:
        if value.name in contract.batch and dims_of(value) is None:
            rest = [str(d) if isinstance(d, int) else "128" for d in (value.shape or ())[1:]]
            shown = ", ".join(map(str, value.shape)) if value.shape is not None else "?"
            raise ArgumentError(
                f"the sizes of `{value.name}` are open: [{shown}]",
                hint=f"say them, for example `--shape {value.name}={','.join(['N', *rest])}`",
            )


def _stays_in_a_rule(value: ir.Value) -> bool:
    """Whether it is only a step of the derivative of one operator, for which a framework has one kernel."""
    node = value.producer()
    scope = (node.name or "").rpartition("/")[0] if node is not None else ""
    readers = [(reader.name or "").rpartition("/")[0] for reader in value.consumers()]
    return scope.startswith("grad/") and bool(readers) and all(reader == scope for reader in readers)


def _ends_cross_entropy(node: ir.Node) -> bool:
    """Frameworks go back through the logarithm of probabilities, and hold its gradient beside that of the logits."""
    return node.op_type == "ScatterElements" and (node.name or "").endswith("SoftmaxCrossEntropyLoss/ScatterElements")


def _attention(model: Model, lowered: ir.Graph) -> tuple[list[Kernel], set[tuple[int, ...] | None]]:
    """The attention in a step that has not been differentiated, by its values in the one that has been; and the shapes
    of scores, also turned."""
    nodes, known = list(model.graph), {value.name: value for value in values(lowered)}
    kernels, shapes = [], {_scores_of(node) for node in nodes if node.op_type == "Attention"}
    for match in matches(nodes, set(model.graph.outputs), ("Attention",)):
        if isinstance(match, Attention):
            output = match.nodes[-1].outputs[0]
            inner = [known.get(v.name) for node in match.nodes for v in node.outputs if v is not output]
            kept = [known.get(v.name) for v in (match.q, match.k, match.v, output)]
            kernels.append(Kernel([v for v in inner if v is not None], [v for v in kept if v is not None]))
            soft = (known.get(node.outputs[0].name) for node in match.nodes if node.op_type == "Softmax")
            shapes.update(dims_of(value) for value in soft)
    return kernels, {turned for s in shapes if s for turned in (s, (*s[:-2], s[-1], s[-2]))}


def _scores_of(node: ir.Node) -> tuple[int, ...] | None:
    q, k = (dims_of(value) if value is not None else None for value in node.inputs[:2])
    if q is None or k is None:
        return None
    heads = node.attributes.get_int("q_num_heads", q[1])
    return q[0], heads, q[-2], k[-2]


def _weights(graph: ir.Graph, contract: Contract, state: Iterable[State]) -> tuple[dict[str, PlannedWeight], int]:
    """What the forward pass reads of the state and of frozen weights; and the bytes of all other state."""
    gradients = {x: bytes_of(value) for value in graph.outputs if (x := contract.gradients.get(value.name or ""))}
    read = {value.name or "": value for value in graph.inputs if value.name in contract.state}
    added: dict[str, list[State]] = {name: [] for name in gradients}
    other = 0
    for each in state:
        owner = each.parameter or each.name.rpartition("/")[0]
        if each.name not in gradients and owner in added:
            added[owner].append(each)
        elif each.name not in gradients:
            other += each.nbytes
    known = {name: value for name, value in read.items() if name in gradients}
    known |= {name: value for name, value in graph.initializers.items() if _is_float(value) and elements(value) > 1}
    return {name: _weight(value, gradients.get(name, 0), added.get(name, [])) for name, value in known.items()}, other


def _weight(value: ir.Value, gradient: int, added: Sequence[State]) -> PlannedWeight:
    shape = dims_of(value) or ()
    slots = tuple(each.name for each in added if _stored_shape(each) == shape)
    return PlannedWeight(value.name or "", shape, bytes_of(value), gradient, sum(each.nbytes for each in added), slots)


def _stored_shape(state: State) -> tuple[int, ...]:
    tensor = state.value.const_value
    return tuple(tensor.shape.numpy()) if tensor is not None else ()


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(model: Model, step: int, forward: Sequence[ir.Node], weights: Collection[str]) -> list[LoweredBlock]:
    """The blocks of the inference graph, as they are in the forward pass of a lowered step."""
    parts = [part for part in cut_into_parts(model, weights) if part.kind is not None]
    made = {value.name: i for i, part in enumerate(parts) for node in part.nodes for value in node.outputs}
    in_training = model.step(step).fact("train.forward") or {}
    places: dict[ir.Node, int | None] = {}
    for node in reversed(forward):
        outputs = [in_training.get(value.name, value.name) for value in node.outputs]
        known = [made[name] for name in outputs if name in made]
        readers = {places[reader] for value in node.outputs for reader in value.consumers() if reader in places}
        # what a node was expanded to is where its readers are
        places[node] = known[0] if known else readers.pop() if len(readers) == 1 else None
    nodes: list[list[ir.Node]] = [[] for _ in parts]
    for node in forward:
        if (place := places[node]) is not None:
            nodes[place].append(node)
    own = [{value.name or "" for value in part.initializers} & set(weights) for part in parts]
    return [LoweredBlock(part.name, found, names) for part, found, names in zip(parts, nodes, own, strict=True)]


# ---- sizes and floating-point operations -----------------------------------------------------------------------------


def dims_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The sizes of a tensor; None if one of them is not known."""
    shape = value.shape if value is not None else None
    return tuple(shape.numpy()) if shape is not None and shape.is_static() else None


def elements(value: ir.Value | None) -> int:
    """As many numbers as a tensor has; none if that is not known."""
    dims = dims_of(value)
    return 0 if dims is None else math.prod(dims)


def bytes_of(value: ir.Value) -> int:
    return math.ceil(elements(value) * value.dtype.itemsize) if value.dtype is not None else 0


# A multiplication and an addition count as two. What is not a matmul counts one for each element that it makes: next to
# matmuls that is little.


def flops(node: ir.Node) -> int:
    """Those of a node, and of graphs nested in it, each of which runs once but for the body of a Scan."""
    own = _PRODUCTS.get(node.op_type)
    inner = sum(flops(each) for graph in nested_graphs(node) for each in graph)
    return (own(node) if own else sum(elements(output) for output in node.outputs)) + inner * _times(node)


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    return dims_of(value) or ()


def _times(node: ir.Node) -> int:
    read = node.inputs[-1] if node.op_type == "Scan" and node.inputs else None
    return next(iter(_sizes(read)), 1)


def _matmul(node: ir.Node) -> int:
    return 2 * elements(node.outputs[0]) * next(iter(_sizes(node.inputs[0])[-1:]), 0)


def _gemm(node: ir.Node) -> int:
    a = _sizes(node.inputs[0])
    inner = a[0 if node.attributes.get_int("transA", 0) else 1] if len(a) == 2 else 0
    return 2 * elements(node.outputs[0]) * inner


def _conv(node: ir.Node) -> int:
    return 2 * elements(node.outputs[0]) * math.prod(_sizes(node.inputs[1])[1:])


def _conv_transpose(node: ir.Node) -> int:
    return 2 * elements(node.inputs[0]) * math.prod(_sizes(node.inputs[1])[1:])


def _einsum(node: ir.Node) -> int:
    """Each combination of indices once for each factor."""
    terms = node.attributes.get_string("equation", "").replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=False):
        sizes |= dict(zip(term, _sizes(value), strict=False))
    return len(terms) * math.prod(sizes.values())


def _recurrent(node: ir.Node) -> int:
    """Each step multiplies the input and the last state by the weights of all gates."""
    length, batch, *_ = (*_sizes(node.inputs[0]), 0, 0)
    return 2 * length * batch * (elements(node.inputs[1]) + elements(node.inputs[2]))


_PRODUCTS: dict[str, Callable[[ir.Node], int]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
PRODUCTS = frozenset(_PRODUCTS)
"""Operators that are computed in the precision that is chosen for products."""
