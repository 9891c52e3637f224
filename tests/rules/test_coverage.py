"""The table of derivatives as a whole: no operator is missing, it agrees with the schemas, and serves every float."""

import collections

import gradcheck
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, defs, helper
from rule_tables import CASES, known
from sessions import session

from onward.differentiate import vjp
from onward.rules import RULES, NoGradient

NEWEST = {schema.name: schema for schema in defs.get_all_schemas() if schema.domain == "" and not schema.deprecated}
"""The operators of the newest operator set."""


def _takes_floats(schema, formal):
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    return any("tensor(float)" in kind for kind in allowed.get(formal.type_str, [formal.type_str]))


def test_no_operator_is_missing():
    """What takes a float and gives a float has a rule, a rewrite or a body, or it is said why it has no gradient."""
    missing = [
        name
        for name, schema in NEWEST.items()
        if any(_takes_floats(schema, formal) for formal in schema.inputs)
        and any(_takes_floats(schema, formal) for formal in schema.outputs)
        and ("", name) not in RULES
        and not (schema.has_function or schema.has_context_dependent_function)
    ]
    assert missing == []


# ---- what the schemas say --------------------------------------------------------------------------------------------

Category = defs.OpSchema.DifferentiationCategory
BOUND, STATE = "the bound that applies has a gradient, as in PyTorch", "gradients go back through earlier steps"

MORE_THAN_THE_SCHEMA_SAYS = {
    ("AffineGrid", "theta"): "the grid is linear in it",
    ("CausalConvWithState", "past_state"): STATE,
    ("Clip", "max"): BOUND,
    ("Clip", "min"): BOUND,
    ("DFT", "input"): "the transform is linear in it",
    ("GRU", "initial_h"): STATE,
    ("GridSample", "grid"): "PyTorch has it, and what learns where to look needs it",
    ("LSTM", "initial_c"): STATE,
    ("LSTM", "initial_h"): STATE,
    ("LinearAttention", "past_state"): STATE,
    ("Mod", "B"): "the remainder is linear in it between jumps",
    ("NegativeLogLikelihoodLoss", "weight"): "the loss is a quotient of sums of it",
    ("OneHot", "values"): "the result is made of it",
    ("Pad", "constant_value"): "the padding is made of it",
    ("RNN", "initial_h"): STATE,
    ("STFT", "signal"): "the transform is linear in it",
    ("STFT", "window"): "the transform is linear in it",
    ("SoftmaxCrossEntropyLoss", "weights"): "the loss is a quotient of sums of it",
}
"""Inputs with a gradient that the schema calls not differentiable."""

LESS_THAN_THE_SCHEMA_SAYS = {
    ("Hardmax", "input"): "its result is constant but for jumps",
}
"""Inputs without a gradient that the schema calls differentiable."""


def _inputs_with_gradients():
    """The inputs, as (operator, name), that get a gradient in some case of one node."""
    found = set()
    for proto, inputs in CASES.values():
        node = proto.graph.node[0]
        if len(proto.graph.node) > 1 or node.domain or node.op_type not in NEWEST:
            continue
        formals = NEWEST[node.op_type].inputs
        xs = [x for x in gradcheck.differentiable(proto, inputs) if x in node.input]
        names = [(node.op_type, formals[min(list(node.input).index(x), len(formals) - 1)].name) for x in xs]
        if found.issuperset(names):
            continue
        for y in gradcheck.float_outputs(proto):
            grads = vjp(proto, y, xs).graph.outputs
            found |= {n for n, grad in zip(names, grads, strict=True) if grad.producer().op_type != "ConstantOfShape"}
    return found


def test_gradients_agree_with_the_schemas():
    """Each input that a schema calls differentiable gets a gradient, and no other that it knows of, but for a list."""
    found = _inputs_with_gradients()
    tags = {
        (name, formal.name): formal.differentiation_category
        for name, schema in NEWEST.items()
        for formal in schema.inputs
        if ("", name) in RULES
    }
    assert {key for key, tag in tags.items() if tag is Category.NonDifferentiable and key in found} == set(
        MORE_THAN_THE_SCHEMA_SAYS
    )
    assert {key for key, tag in tags.items() if tag is Category.Differentiable and key not in found} == set(
        LESS_THAN_THE_SCHEMA_SAYS
    )


# ---- half precision --------------------------------------------------------------------------------------------------

LARGE = "its numbers are too large for half precision"
SATURATED = "it saturates, and what is left of its slope is rounding"
STEEP = "its slope is too steep for half precision"

UNFIT = {
    "sampling_roi_align_adaptive": "the edges of its regions are rounded across pixels",
    "test_logsoftmax_large_number": LARGE,
    "test_simple_rnn_defaults": SATURATED,
    "test_simple_rnn_with_initial_bias": SATURATED,
    "test_rnn_seq_length": SATURATED,
    "test_softmax_large_number": LARGE,
    "test_tan": STEEP,
}
"""Cases whose examples make no sense in half precision."""

NO_BFLOAT16 = {
    "Col2Im": "Conv, which takes windows apart, knows it from operator set 22 on",
    "OptionalGetElement": "Identity knows no Optional of it",
    "QuantizeLinear": "Round knows it from operator set 22 on",
    "SplitToSequence": "ConcatFromSequence knows no sequence of it",
}
"""Operators that know bfloat16 while others that their derivative is made of do not."""

NOT_EVALUATED = "the reference evaluator does not compute it in bfloat16"
NOT_RUN = {
    ("AffineGrid", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("AffineGrid", TensorProto.FLOAT16): "ONNX Runtime fails on its body",
    ("AveragePool", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("CausalConvWithState", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("Celu", TensorProto.FLOAT16): "ONNX Runtime is older than operator set 28, which brought it",
    ("Conv", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("Det", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("LpPool", TensorProto.BFLOAT16): NOT_EVALUATED,
    ("MaxPool", TensorProto.BFLOAT16): NOT_EVALUATED,
}
"""Operators whose derivative is built in half precision but cannot be run here."""

TOLERANCE = {TensorProto.FLOAT16: 2e-2, TensorProto.BFLOAT16: 1e-1}


def _two_cases_for_each_operator():
    chosen = collections.defaultdict(list)
    for name, (proto, _) in CASES.items():
        operators = {
            node.op_type for node in proto.graph.node if known(node) and not isinstance(known(node), NoGradient)
        }
        for operator in operators if name not in UNFIT else ():
            if len(chosen[operator]) < 2:
                chosen[operator].append(name)
    return chosen


CHOSEN = _two_cases_for_each_operator()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("operator", sorted(CHOSEN))
def test_half_precision(operator, dtype):
    """Where the schema allows a type, gradients are built in it, and are nearly those in float64."""
    if dtype == TensorProto.BFLOAT16 and operator in NO_BFLOAT16:
        pytest.skip(NO_BFLOAT16[operator])
    for name in CHOSEN[operator]:
        proto, inputs = CASES[name]
        half = gradcheck.in_type(proto, dtype)
        if not gradcheck.is_valid(half):  # the operator does not take this type
            continue
        xs = gradcheck.differentiable(proto, inputs)
        for y in gradcheck.float_outputs(proto):
            model = vjp(half, y, xs).to_proto()
            onnx.checker.check_model(model, full_check=True)
            assert {gradcheck.tensor_type(value).elem_type for value in model.graph.output} == {dtype}
            if (operator, dtype) not in NOT_RUN:
                _compare(proto, inputs, y, xs, model, dtype)


def _compare(proto, inputs, y, xs, model, dtype):
    doubled, exact_inputs = gradcheck.to_double(proto), gradcheck.double(proto, inputs)
    dy = gradcheck.direction(np.random.default_rng(0), gradcheck.evaluate(doubled, exact_inputs)[y])
    exact = vjp(doubled, y, xs).to_proto()
    expected = gradcheck.gradients(exact, {**exact_inputs, exact.graph.input[-1].name: dy}, xs)
    kind, seed = helper.tensor_dtype_to_np_dtype(dtype), model.graph.input[-1].name
    rounded = {x: gradcheck.mapped(lambda a: a.astype(kind), inputs[x]) for x in xs}
    given = {**inputs, **rounded, seed: gradcheck.mapped(lambda a: a.astype(kind), dy)}
    found = _on_onnxruntime(model, given, xs) if dtype == TensorProto.FLOAT16 else gradcheck.gradients(model, given, xs)
    for x in xs:
        for grad, wanted in zip(gradcheck.flat(found[x]), gradcheck.flat(expected[x]), strict=True):
            scale = max(1e-6, float(np.abs(wanted).max()))
            np.testing.assert_allclose(grad.astype(np.float64), wanted, atol=TOLERANCE[dtype] * scale, equal_nan=False)


def _on_onnxruntime(model, given, xs):
    loaded = session(gradcheck.for_onnxruntime(model))
    return dict(zip(xs, loaded.run(None, {v.name: given[v.name] for v in loaded.get_inputs()}), strict=True))


# ---- no elements -----------------------------------------------------------------------------------------------------

BATCHES = [
    "test_averagepool_2d_default", "test_basic_conv_with_padding", "test_batchnorm_example", "test_clip",
    "test_convtranspose", "test_flatten_axis1", "test_gelu_tanh_1", "test_gemm_default_vector_bias",
    "test_globalmaxpool", "test_globalaveragepool", "test_instancenorm_example",
    "test_layer_normalization_2d_axis1", "test_logsoftmax_example_1", "test_maxpool_2d_default",
    "test_prelu_broadcast", "test_reduce_mean_keepdims_random", "test_reduce_prod_keepdims_random", "test_relu",
    "test_softmax_example", "test_transpose_default", "test_unsqueeze_axis_1",
]  # fmt: skip
"""Cases whose first input has a batch along its first axis, and in which nothing else has."""


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", BATCHES)
def test_batch_of_nothing(name, symbolic):
    """The gradient of what holds no elements holds none; that of a parameter is zero."""
    proto, inputs = CASES[name]
    first = next(iter(inputs))
    given = inputs | {first: inputs[first][:0]}
    proto = gradcheck.for_onnxruntime(proto)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    for value in proto.graph.output:
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{i}"
    proto = gradcheck.with_symbolic_dims(proto) if symbolic else proto
    y, *_ = gradcheck.float_outputs(proto)
    xs = gradcheck.differentiable(proto, inputs)
    model = vjp(proto, y, xs).to_proto()
    (empty,) = ort.InferenceSession(proto.SerializeToString()).run([y], given)
    for x, grad in _on_onnxruntime(model, {**given, model.graph.input[-1].name: np.ones_like(empty)}, xs).items():
        assert grad.shape == given[x].shape and not np.any(grad), x
