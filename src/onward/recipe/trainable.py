"""Selection of the trained tensors of a model.

The rule, in order. Candidates are constants with a floating-point type: initializers, outputs of
`Constant` or `ConstantOfShape`, or integers that `DequantizeLinear` converts. Then:

1. no gradient reaches it from the loss -> constant
2. running mean or variance of BatchNormalization, or the scale of an observed range -> statistics
3. a note of the exporter: a parameter or a buffer, or computed from one (PyTorch) -> that
4. only read as settings (limits, scales, masks, initial states) -> constant
5. the mean or the deviation that normalizes an input, (x - mean) / std -> constant
6. integers that cannot be rounded to: of 32 bits, or with several readers -> constant
7. a single number in arithmetic and not the bias of a layer with one output, or a number without
   axes that fills a factor of a matmul or starts a loop (a first state), or a mask (with an
   infinity or a number below -10000) -> constant; except numbers that PyTorch's tracing exporter
   stores under a name of the module
8. a fixed transform by its numbers: a basis of sinusoids, a filter bank, positions -> constant
9. created by an exporter of PyTorch, judged by name and node -> constant
10. everything else -> parameter

Patterns come last: `freeze` removes parameters, and `trainable` lists all that are trained and may
name constants of rules 3, 4, 5 and 7 to 9. Without `trainable`, a model with adapters trains only
these and a new head.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal

import numpy as np
import onnx_ir as ir

from onward.build import DOMAIN as OURS
from onward.constants import constant_tensor, tensor_in
from onward.errors import RecipeError, UnknownNameError, suggest_or_list
from onward.model import Model
from onward.model.state import PREPROCESSING, ROLE_KEY, SLOT_KEY
from onward.model.walk import nested_graphs, source_of
from onward.recipe.constants import blocks, expose, normalizes_input, stored_shape
from onward.recipe.exporter_notes import EXPORTER_CONSTANT, is_exporter_constant, is_held_in_trace, is_traced, origin
from onward.recipe.fixed_transforms import FIXED_TRANSFORM, fixed_transform
from onward.recipe.layers import find_head
from onward.rules.quantization import stands_for_floats
from onward.rules.registry import has_gradient
from onward.standard import ML_DOMAIN, is_standard
from onward.transform.quantized import can_be_trained

Role = Literal["parameter", "frozen", "constant", "statistics"]

# Operators that hand a tensor on: what reads their output decides.
TRANSPARENT = {
    "Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "CastLike", "Split", "Slice",
    "Concat", "Expand", "Tile", "QuantizeLinear", "SplitToSequence", "SequenceAt",
}  # fmt: skip

# Inputs that are settings, though gradients could flow into some of them. None: every input.
_SETTINGS: dict[str, set[int] | None] = {
    "Attention": {3},
    "Clip": {1, 2},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "DynamicQuantizeLinear": None,
    "GRU": {4, 5},
    "GridSample": {1},
    "LSTM": {4, 5, 6},
    "Max": None,
    "Min": None,
    "Mod": {1},
    "NegativeLogLikelihoodLoss": {2},
    "OneHot": None,
    "Pad": {2},
    "Pow": {1},
    "QuantizeLinear": {1, 2},
    "RNN": {4, 5},
    "Range": None,
    "Resize": {1, 2, 3},
    "RotaryEmbedding": {1, 2},
    "STFT": {2},
    "ScatterElements": {0, 2},
    "ScatterND": {0, 2},
    "SoftmaxCrossEntropyLoss": {2},
    "Upsample": {1},
    "Where": {1, 2},
}

# Operators that take quantized tensors: their floating-point inputs are scales.
_QUANTIZED = ("QLinear", "QGemm")

# Operators in which a single number is a constant: 1 / sqrt(d), an epsilon, a factor, zeros in the
# place of a bias.
_ARITHMETIC = {
    "Add", "Conv", "ConvTranspose", "Div", "Gemm", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sqrt", "Sub", "Sum",
    "Where",
}  # fmt: skip

# Operators whose factors have axes: a number that has none was spread out for them, as the first
# state of a loop is.
_PRODUCTS = {"MatMul", "Gemm"}

_MASK = -1e4

_UNREACHED = "no gradient reaches it from the loss"
_INTEGERS = "integers that nothing is rounded to"
_NEVER = {"hyper": "a number that steers training", PREPROCESSING: "part of the preprocessing"}
"""Roles of tensors that are never trained, with their meaning."""

HEAD, ADAPTERS = "head", ("lora_A", "lora_B")
"""Slots, in the tags of tensors, of tensors that were added for a new task."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decision about one candidate, with the reason."""

    name: str
    role: Role
    reason: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """The decisions about all candidates."""

    parameters: list[ir.Value]
    choices: list[Choice]

    def of(self, role: Role) -> list[Choice]:
        return [choice for choice in self.choices if choice.role == role]

    def with_parameters(self, added: Sequence[ir.Value], reason: str) -> Selection:
        """Return the selection with further trained tensors."""
        names = {value.name for value in added}
        others = [choice for choice in self.choices if choice.name not in names]
        return Selection([*self.parameters, *added], [*others, *(Choice(n or "", "parameter", reason) for n in names)])


def select(
    model: Model,
    targets: Iterable[ir.Value],
    trainable: Sequence[str] | None = None,
    freeze: Sequence[str] = (),
    roles: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Selection:
    """Decide which tensors are trained. Parameters in nodes become initializers.

    `roles` maps names of roles to parameters.
    """
    targets = list(targets)
    constants = dict(candidates(model.graph))
    choices = {choice.name: choice for choice in judge(model, targets)}
    patterns = [*(trainable or ()), *freeze]
    if missing := [pattern for pattern in patterns if not matching([pattern], choices, roles)]:
        names = ", ".join(f"`{pattern}`" for pattern in missing)
        hint = suggest_or_list(missing[0].strip("*"), choices)
        raise UnknownNameError(f"{names} matches no floating-point tensor of the model", hint=hint)
    if trainable is None:
        choices = _adapters_alone(model.graph, choices)
    choices = {name: _match(choice, trainable, freeze, roles) for name, choice in choices.items()}
    chosen = [name for name, choice in choices.items() if choice.role == "parameter"]
    if not chosen:
        raise RecipeError("nothing is left to train: " + _summary(choices.values()), hint=_way_out(model, targets))
    parameters = [expose(model.graph, constants[name][0]) for name in chosen]
    return Selection(parameters, list(choices.values()))


def judge(model: Model, targets: Iterable[ir.Value]) -> list[Choice]:
    """Apply the rule to every candidate, without patterns. Changes nothing."""
    edges = gradient_edges(targets)
    constants = dict(candidates(model.graph)).values()
    values = [value for value, _ in constants if value in edges]
    created = {value for value in values if is_exporter_constant(value, model)}
    others = [value for value in values if is_held_in_trace(value) and math.prod(stored_shape(value) or ()) > 1]
    of_exporter = created if others else set()
    traced = {value for value, _ in constants if is_held_in_trace(value)} if is_traced(model) else set()
    return [_judge(value, hidden, edges, of_exporter, traced) for value, hidden in constants]


def gradient_edges(targets: Iterable[ir.Value]) -> dict[ir.Value, list[tuple[ir.Node, int]]]:
    """Return where gradients of `targets` flow: value -> the node inputs that pass them on."""
    edges: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
    pending, seen = list(targets), set()
    while pending:
        node = pending.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [output for graph in nested_graphs(node) for output in graph.outputs]
        for i, value in enumerate(node.inputs):
            if value is not None and _matters(node, i) and _may_be_float(value):
                edges.setdefault(value, []).append((node, i))
                pending.append(value)
    return edges


def as_patterns(option: Sequence[str] | str | None) -> Sequence[str] | None:
    return [option] if isinstance(option, str) else option


def matching(
    patterns: Iterable[str], names: Iterable[str], roles: Mapping[str, Collection[str]] = MappingProxyType({})
) -> list[str]:
    """Return the names that match any of the patterns (`*` and `?`, or a role), in order."""
    patterns = list(patterns)
    exact = {name for pattern in patterns for name in roles.get(pattern, [pattern])}
    wild = [pattern for pattern in patterns if pattern not in roles and set("*?[") & set(pattern)]
    return [name for name in names if name in exact or any(fnmatchcase(name, pattern) for pattern in wild)]


def _matters(node: ir.Node, index: int) -> bool:
    """True if a gradient flows into an input, or it is a setting, which counts as read."""
    flows = has_gradient(node.domain, node.op_type, index) or _is_setting(node, index)
    return flows and not _is_carried_in_vain(node, index)


def _is_carried_in_vain(node: ir.Node, index: int) -> bool:
    """True if an input is the start of a Loop's carried value that nothing reads, e.g. a condition."""
    if node.op_type != "Loop" or index < 2:
        return False
    inside = [value for body in nested_graphs(node) for value in body.inputs[index : index + 1]]
    return not any(v.uses() or v.is_graph_output() for v in (*inside, *node.outputs[index - 2 : index - 1]))


def _may_be_float(value: ir.Value) -> bool:
    dtype = value.const_value.dtype if value.const_value is not None else value.dtype
    return dtype is None or dtype.is_floating_point() or (value.const_value is None and stands_for_floats(value))


def candidates(graph: ir.Graph) -> Iterator[tuple[str, tuple[ir.Value, str]]]:
    """Yield name, value and storage of every constant with a floating-point type."""
    for name, value in graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype.is_floating_point():
            yield name, (value, "")
    for node in graph:
        if not is_standard(node) or not node.outputs or not node.outputs[0].name:
            continue
        if _is_hidden_constant(node):
            yield node.outputs[0].name, (node.outputs[0], f"in a {node.op_type} node")


def _is_hidden_constant(node: ir.Node) -> bool:
    if node.op_type == "Constant":
        constant = tensor_in(node)
        return constant is not None and constant.dtype.is_floating_point()
    if node.op_type == "ConstantOfShape":
        tensor = node.attributes.get("value")
        dtype = tensor.as_tensor().dtype if tensor else ir.DataType.FLOAT
        return dtype.is_floating_point() and bool(node.inputs) and constant_tensor(node.inputs[0]) is not None
    if node.op_type == "DequantizeLinear" and node.inputs:
        return all(value is None or constant_tensor(value) is not None for value in node.inputs)
    return False


def _judge(
    value: ir.Value,
    hidden: str,
    edges: dict[ir.Value, list[tuple[ir.Node, int]]],
    of_exporter: Collection[ir.Value],
    of_module: Collection[ir.Value],
) -> Choice:
    name = value.name or ""
    if value not in edges:
        return Choice(name, "constant", _UNREACHED)
    holder = value.const_value or value.producer()
    role = holder.metadata_props.get(ROLE_KEY, "") if holder is not None else ""
    if role in _NEVER:
        return Choice(name, "constant", _NEVER[role])
    if role == "statistics":
        return Choice(name, "statistics", "measured by the step")
    readers = list(readers_of(value, edges))
    if readers and all(node.op_type == "BatchNormalization" and i >= 3 for node, i in readers):
        return Choice(name, "statistics", "running statistics of BatchNormalization")
    source = origin(value)
    if source == "parameter":
        return Choice(name, "parameter", "a parameter of the PyTorch module")
    if source == "buffer":
        return Choice(name, "constant", "a buffer of the PyTorch module")
    if readers and all(_is_setting(node, i) for node, i in readers):
        return Choice(name, "constant", f"a setting of {readers[0][0].op_type}")
    if _is_fixed_integers(value):
        return Choice(name, "constant", _INTEGERS)
    if value not in of_module and _is_number(value, readers):
        return Choice(name, "constant", "a single number")
    if readers and all(normalizes_input(node, i) for node, i in readers):
        return Choice(name, "constant", "part of a normalization of the input")
    if _is_mask(value, readers):
        return Choice(name, "constant", "a mask")
    if transform := fixed_transform(value, readers):
        return Choice(name, "constant", f"{FIXED_TRANSFORM}: {transform}")
    if source == "constant" or value in of_exporter:
        return Choice(name, "constant", EXPORTER_CONSTANT)
    return Choice(name, "parameter", hidden or f"read by {readers[0][0].op_type}" if readers else "read by the loss")


def readers_of(value: ir.Value, edges: Mapping[ir.Value, list[tuple[ir.Node, int]]]) -> Iterator[tuple[ir.Node, int]]:
    """Return the operators that use `value`, also through operators that only pass it on."""
    pending, seen = [value], {value}
    while pending:
        for node, i in edges.get(pending.pop(), ()):
            if node.op_type not in TRANSPARENT or _is_setting(node, i):
                yield node, i
                continue
            fresh = [output for output in node.outputs if output not in seen]
            seen.update(fresh)
            pending.extend(fresh)


def _is_setting(node: ir.Node, index: int) -> bool:
    if node.op_type.startswith(_QUANTIZED):
        return True
    if node.op_type not in _SETTINGS:
        return False
    settings = _SETTINGS[node.op_type]
    return settings is None or index in settings


def _is_fixed_integers(value: ir.Value) -> bool:
    """True if a tensor is stored as integers that a trained number cannot be rounded to."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return False
    integers = constant_tensor(node.inputs[0])
    return integers is None or not can_be_trained(node, integers)


def _is_number(value: ir.Value, readers: list[tuple[ir.Node, int]]) -> bool:
    shape = stored_shape(value)
    if shape is None or np.prod(shape) > 1:
        return False
    usual = _ARITHMETIC if shape else _ARITHMETIC | _PRODUCTS
    if not shape and any(node.op_type == "Expand" for node in value.consumers()):
        usual = usual | {"Loop", "Scan"}  # a first state
    # Functions of ours take their hyper-parameters as inputs.
    return all((node.op_type in usual or node.domain == OURS) and not _is_bias_of_one(node, i) for node, i in readers)


def _is_bias_of_one(node: ir.Node, index: int) -> bool:
    """True if input `index` is the bias of a layer with a single output, also a single number."""
    if node.op_type == "Gemm":
        weight, axis = node.inputs[1], 0 if node.attributes.get_int("transB", 0) else -1
    elif node.op_type in ("Conv", "ConvTranspose"):
        weight, axis = node.inputs[1], 0 if node.op_type == "Conv" else 1
    elif node.op_type == "Add" and (other := node.inputs[1 - index]) is not None and (layer := other.producer()):
        weight, axis = (layer.inputs[1] if layer.op_type == "MatMul" else None), -1
    else:
        return False
    shape = stored_shape(weight) if weight is not None else None
    return shape is not None and len(shape) > 0 and shape[axis] == 1


def _is_mask(value: ir.Value, readers: list[tuple[ir.Node, int]]) -> bool:
    """True if a tensor is added to scores to exclude some. Reads only added or compared ones."""
    if not readers or any(node.op_type not in ("Add", "Sub", "Mul", "Softmax", "Where") for node, _ in readers):
        return False
    tensor = constant_tensor(value)
    if tensor is None or tensor.dtype.bitwidth < 16:
        return False
    rows = (block.astype(np.float32, copy=False) for block in blocks(tensor.numpy()))
    return any(np.isinf(row).any() or row.min() <= _MASK for row in rows)


def _adapters_alone(graph: ir.Graph, choices: dict[str, Choice]) -> dict[str, Choice]:
    """Select only adapters and a new head, if the model has adapters."""
    tags = {n: v.const_value.metadata_props for n, v in graph.initializers.items() if v.const_value is not None}
    added = {name: tag[SLOT_KEY] for name, tag in tags.items() if tag.get(SLOT_KEY) in (HEAD, *ADAPTERS)}
    if not set(ADAPTERS) & set(added.values()):
        return choices
    reason = "the model has adapters"
    return {
        name: Choice(name, "frozen", reason) if choice.role == "parameter" and name not in added else choice
        for name, choice in choices.items()
    }


def _match(
    choice: Choice, trainable: Sequence[str] | None, freeze: Sequence[str], roles: Mapping[str, Collection[str]]
) -> Choice:
    # What no gradient reaches, what steers or prepares data, what cannot be put back, and
    # statistics cannot be trained whatever a pattern says.
    impossible = choice.role == "statistics" or choice.reason in (_UNREACHED, _INTEGERS, *_NEVER.values())
    if trainable is not None and not impossible:
        if matching(trainable, [choice.name], {} if choice.reason == EXPORTER_CONSTANT else roles):
            choice = Choice(choice.name, "parameter", "named as trainable")
        elif choice.role == "parameter":
            choice = Choice(choice.name, "frozen", "not named as trainable")
    if choice.role == "parameter" and matching(freeze, [choice.name], roles):
        pattern = next(pattern for pattern in freeze if matching([pattern], [choice.name], roles))
        return Choice(choice.name, "frozen", f"frozen by `{pattern}`")
    return choice


def _way_out(model: Model, targets: Iterable[ir.Value]) -> str:
    targets = list(targets)
    if ends := [f"`--loss {end.name}=LOSS`" for end in training_ends(model, targets) if end not in targets]:
        return f"train the last value with a gradient: {' or '.join(ends[:3])}"
    if classical := {f"`{node.op_type}`" for node in model.graph if node.domain == ML_DOMAIN}:
        return f"of `{ML_DOMAIN}`, LinearRegressor and LinearClassifier are trained, not {', '.join(sorted(classical))}"
    return "`onward describe MODEL --params` says what each tensor is"


_DEEPEST = 64
"""Most values before an output in which `training_ends` looks for weights."""


def training_ends(model: Model, outputs: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the last values before outputs that gradients take to weights, as before an ArgMax."""
    pending, seen, ends = list(outputs), set[ir.Value](), []
    while pending and len(seen) < _DEEPEST:
        value = pending.pop(0)
        node = value.producer()
        if node is None or value in seen:
            continue
        seen.add(value)
        is_float = value.dtype is None or value.dtype.is_floating_point()
        if is_float and any(choice.role == "parameter" for choice in judge(model, [value])):
            ends.append(value)
        else:
            pending += [value for value in node.inputs if value is not None]
    return ends


def _summary(choices: Iterable[Choice]) -> str:
    counts = Counter(choice.reason for choice in choices)
    return "; ".join(f"{count} tensors: {reason}" for reason, count in counts.items()) or "the model has no weights"


# ---- roles: biases, norms and the head -------------------------------------------------------------------------------

ROLES = {
    "biases": "what layers and normalizations add",
    "norms": "scales and biases of normalizations",
    "head": "weight and bias of the layer that gives the logits",
}

_WITH_BIAS = {"Conv": 2, "ConvTranspose": 2, "DeformConv": 3, "GRU": 3, "Gemm": 2, "LSTM": 3, "RNN": 3}
_MATMULS = {"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"}
_HAND_ON = {"Cast", "Identity", "Reshape", "Transpose"}

Edges = Mapping[ir.Value, list[tuple[ir.Node, int]]]


def roles(model: Model, targets: Iterable[ir.Value], patterns: Iterable[str]) -> dict[str, set[str]]:
    """Return the parameters of each pattern that is the name of a role and of no tensor.

    Also for patterns of names behind a Transpose, Cast or the like of a single tensor.
    """
    constants = dict(candidates(model.graph))
    patterns = list(patterns)
    aliases = _by_other_names([pattern for pattern in patterns if pattern not in ROLES], constants)
    role_patterns = [pattern for pattern in dict.fromkeys(patterns) if pattern in ROLES and pattern not in constants]
    if not role_patterns:
        return aliases
    edges = gradient_edges(targets)
    names_by_pattern: dict[str, set[str]] = dict(aliases)
    for role in role_patterns:
        if role == "head":
            head = find_head(model)
            bias = head.bias()
            stored = (head.weight, *([bias[0]] if bias else []))
            names_by_pattern[role] = {value.name for value in stored if value.name}
        else:
            belongs = _is_bias if role == "biases" else is_norm
            names_by_pattern[role] = {name for name, (value, _) in constants.items() if _has(value, edges, belongs)}
    return names_by_pattern


def _by_other_names(patterns: Iterable[str], constants: Mapping[str, tuple[ir.Value, str]]) -> dict[str, set[str]]:
    unknown = [pattern for pattern in patterns if not matching([pattern], constants)]
    if not unknown:
        return {}
    called = {name: list(_later_names(value)) for name, (value, _) in constants.items()}
    matches = {p: {name for name, others in called.items() if matching([p], others)} for p in unknown}
    return {pattern: names for pattern, names in matches.items() if names}


def _later_names(value: ir.Value) -> Iterator[str]:
    readers = value.consumers()
    while len(readers) == 1 and readers[0].op_type in _HAND_ON:
        value = readers[0].outputs[0]
        yield value.name or ""
        readers = value.consumers()


def _has(value: ir.Value, edges: Edges, belongs: Callable[[ir.Node, int], bool]) -> bool:
    used, shape = list(readers_of(value, edges)), stored_shape(value)
    is_vector = shape is not None and sum(size > 1 for size in shape) <= 1  # unlike positional embeddings
    is_bias = is_vector or all(_takes_bias(node, i) for node, i in used)
    return bool(used) and is_bias and all(belongs(node, i) for node, i in used)


def _takes_bias(node: ir.Node, index: int) -> bool:
    return _WITH_BIAS.get(node.op_type) == index


def _is_bias(node: ir.Node, index: int) -> bool:
    if _takes_bias(node, index):
        return True
    if node.op_type == "Add":
        source = _source(node.inputs[1 - index])
        return source is not None and (source.op_type in _MATMULS or _scales_a_norm(source))
    return is_norm(node, index) and index == _norm_inputs(node)[-1]


def is_norm(node: ir.Node, index: int) -> bool:
    """True if input `index` of a node is the scale or the bias of a normalization."""
    if node.op_type.endswith("Normalization"):
        return index in _norm_inputs(node)
    if node.op_type == "Mul":
        return _normalizes(_source(node.inputs[1 - index]))
    source = _source(node.inputs[1 - index]) if node.op_type == "Add" else None
    return source is not None and _scales_a_norm(source)


def _norm_inputs(node: ir.Node) -> tuple[int, int]:
    return (2, 3) if node.op_type.startswith("Skip") else (1, 2)


def _scales_a_norm(node: ir.Node) -> bool:
    return node.op_type == "Mul" and any(_normalizes(_source(value)) for value in node.inputs)


def _normalizes(node: ir.Node | None) -> bool:
    """True if a node is a normalization, or divides by a root as a written-out one does."""
    if node is None:
        return False
    if node.op_type.endswith("Normalization"):
        return True
    divisors = [node.inputs[1]] if node.op_type == "Div" else []
    if node.op_type == "Mul":
        factors = [_source(value) for value in node.inputs]
        divisors = [n.inputs[0] for n in factors if n is not None and n.op_type == "Reciprocal"]
    return any(n is not None and n.op_type == "Sqrt" for n in map(_source, divisors))


def _source(value: ir.Value | None) -> ir.Node | None:
    source = source_of(value, TRANSPARENT)
    return source.producer() if source is not None else None
