"""Comparing a gradient with differences: no autodiff but ours, no mathematics but the forward pass.

A value is an array, a list of arrays (a sequence), or None (an Optional that holds nothing).
"""

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from reference_ops import OPERATORS
from sessions import session

from onward.differentiate import vjp

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
EPS = 1e-6


def to_double(proto):
    """The same model in float64, but for inputs that must be float32."""
    return in_type(proto, TensorProto.DOUBLE)


def in_type(proto, dtype):
    """The same model with its floating-point values in another type."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    _convert(proto.graph, dtype, settings(proto))
    return proto


def settings(proto):
    """The region, scales and sizes of a Resize: of a fixed type and length, and not differentiated."""
    return {name for node in proto.graph.node if node.op_type == "Resize" for name in node.input[1:]}


def tensor_type(value):
    """What the type of a value says of a tensor: of those in a sequence, of that in an Optional."""
    found = value.type
    while (kind := found.WhichOneof("value")) in ("sequence_type", "optional_type"):
        found = getattr(found, kind).elem_type
    return found.tensor_type


def _convert(graph, dtype, kept=frozenset()):
    for value in (*graph.input, *graph.output, *graph.value_info):
        if tensor_type(value).elem_type in FLOATS and value.name not in kept:
            tensor_type(value).elem_type = dtype
    for tensor in graph.initializer:
        if tensor.name not in kept:
            _convert_tensor(tensor, dtype)
    inner = ("stash_type", "softmax_precision") if dtype == TensorProto.DOUBLE else ()  # else they may stay wider
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            zero = helper.make_tensor("", TensorProto.FLOAT, [1], [0])
            node.attribute.append(helper.make_attribute("value", zero))
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _convert_tensor(attribute.t, dtype)
            elif attribute.type == AttributeProto.GRAPH:
                _convert(attribute.g, dtype)
            elif attribute.name in ("to", "dtype", *inner) and attribute.i in FLOATS:
                attribute.i = dtype


def _convert_tensor(tensor, dtype):
    if tensor.data_type in FLOATS:
        array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def with_symbolic_dims(proto):
    """The same model with no dimension known."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    del proto.graph.value_info[:]
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name not in settings(proto):
            for i, dim in enumerate(tensor_type(value).shape.dim):
                dim.dim_param = f"{value.name}_{i}"
    return proto


def is_valid(proto):
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def is_float(value):
    arrays = flat(value)
    return len(arrays) > 0 and all((a.dtype.kind == "f" or is_bfloat16(a)) and a.size > 0 for a in arrays)


def is_bfloat16(array):
    return isinstance(array, np.ndarray) and array.dtype == ml_dtypes.bfloat16


def flat(value):
    """The arrays in a value."""
    return [] if value is None else list(map(np.asarray, value)) if isinstance(value, list) else [np.asarray(value)]


def mapped(function, *values):
    """What a function makes of values: of an array, of each array in a list."""
    if isinstance(values[0], list):
        return [function(*arrays) for arrays in zip(*values, strict=True)]
    return function(*values)


def differentiable(proto, inputs):
    return [name for name, x in inputs.items() if is_float(x) and name not in settings(proto)]


def double(proto, inputs):
    kept = settings(proto)
    return {
        name: mapped(lambda a: a.astype(np.float64), x) if is_float(x) and name not in kept else x
        for name, x in inputs.items()
    }


def float_outputs(proto):
    return [v.name for v in proto.graph.output if tensor_type(v).elem_type in FLOATS]


def evaluate(proto, inputs):
    names = [value.name for value in proto.graph.output]
    with np.errstate(all="ignore"):
        return dict(zip(names, ReferenceEvaluator(proto, new_ops=OPERATORS).run(None, inputs), strict=True))


def check(proto, inputs, xs=None, *, order=2, rtol=1e-5, seed=0):
    """Check the gradients of every floating-point output with respect to `xs` (all such inputs), in float64."""
    inputs = double(proto, inputs)
    xs = differentiable(proto, inputs) if xs is None else list(xs)
    _check(to_double(proto), inputs, xs, order, rtol, seed)


def _check(proto, inputs, xs, order, rtol, seed):
    before = evaluate(proto, inputs)
    for y in float_outputs(proto):
        if not is_float(before[y]):
            continue
        rng = np.random.default_rng(seed)
        model = vjp(proto, y, xs).to_proto()
        if is_valid(proto):  # not every operator takes float64
            onnx.checker.check_model(model, full_check=True)
        dy = direction(rng, before[y])
        seed_name = model.graph.input[-1].name
        given = {**inputs, seed_name: dy}
        grads = gradients(model, given, xs)
        for x, grad in grads.items():
            found, wanted = ([(a.dtype, a.shape) for a in flat(value)] for value in (grad, inputs[x]))
            assert found == wanted, x
        _compare(proto, inputs, y, dy, grads, rng, rtol)
        if order > 1:
            _check(added_up(model, grads), given, [*xs, seed_name], order - 1, max(rtol, 1e-4), seed + 1)


def added_up(model, outputs):
    """The same model with one output in place of several: each weighted at random, and by its size.

    What is wrong with the derivative of one is wrong with that of the sum, which takes no longer than that of one.
    """
    arrays = list(outputs.values())
    if len(arrays) < 2 or not all(isinstance(a, np.ndarray) and np.isfinite(a).all() for a in arrays):
        return model
    model = onnx.ModelProto.FromString(model.SerializeToString())
    graph, rng = model.graph, np.random.default_rng(0)
    for i, array in enumerate(arrays):
        weights = rng.standard_normal(array.shape) / max(np.abs(array).max(), 1e-3)
        graph.initializer.append(numpy_helper.from_array(weights.astype(array.dtype), f"weights{i}"))
        graph.node.append(helper.make_node("Mul", [graph.output[i].name, f"weights{i}"], [f"weighted{i}"]))
        graph.node.append(helper.make_node("ReduceSum", [f"weighted{i}"], [f"part{i}"], keepdims=0))
    graph.node.append(helper.make_node("Sum", [f"part{i}" for i in range(len(arrays))], ["added_up"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("added_up", TensorProto.DOUBLE, []))
    return model


def direction(rng, y):
    """What to weight `y` with: nothing where it is infinite, as scores behind a mask are."""
    return mapped(lambda a: np.where(np.isfinite(a), rng.standard_normal(np.shape(a)), 0), y)


def gradients(model, inputs, xs):
    """What a model made by `vjp` computes, by the names of the inputs that it belongs to."""
    return {x: mapped(np.asarray, grad) for x, grad in zip(xs, evaluate(model, inputs).values(), strict=True)}


def _compare(proto, inputs, y, dy, grads, rng, rtol):
    step = {x: mapped(lambda a: rng.standard_normal(a.shape), grad) for x, grad in grads.items()}

    def moved(by):
        there = {x: mapped(lambda a, direction: a + by * direction, inputs[x], step[x]) for x in grads}
        return flat(evaluate(proto, {**inputs, **there})[y])

    with np.errstate(invalid="ignore"):
        change = [up - down for up, down in zip(moved(EPS), moved(-EPS), strict=True)]
    numeric = sum(np.sum(d[d != 0] * c[d != 0]) for d, c in zip(flat(dy), change, strict=True)) / (2 * EPS)
    products = [a * b for x in grads for a, b in zip(flat(grads[x]), flat(step[x]), strict=True)]
    ours = float(sum(p.sum() for p in products))
    scale = max(abs(numeric), abs(ours), float(sum(np.abs(p).sum() for p in products)), 1e-3)
    assert np.isfinite(ours), f"the gradient of {y} is not finite"
    assert abs(numeric - ours) <= rtol * scale, f"d{y}: {ours} by the rule, {numeric} by differences"


def assert_close(found, expected, tolerance):
    """Arrays by name, to within a part of their largest element; of the largest of all where one is all but zero."""
    assert found.keys() == expected.keys()
    sizes = {name: float(np.abs(wanted).max()) for name, wanted in expected.items()}
    largest = max(sizes.values())
    errors = {
        name: float(np.abs(found[name] - wanted).max()) / (sizes[name] if sizes[name] > 1e-7 * largest else largest)
        for name, wanted in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors: {wrong}"


def for_onnxruntime(proto, newest=26):
    """The same model at an operator set that ONNX Runtime loads; None if its operators are newer than that."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = min(opset.version, newest)
    proto.ir_version = min(proto.ir_version, 10)
    return proto if is_valid(proto) else None


def _is_exotic(x):
    """Whether ONNX Runtime takes no arrays of this type from Python, as of float8 or of integers with four bits."""
    return isinstance(x, np.ndarray) and x.dtype.kind == "V" and not is_bfloat16(x)


def _with_constants(proto, arrays):
    """The same model with some of its inputs given."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    for value in [value for value in proto.graph.input if value.name in arrays]:
        proto.graph.input.remove(value)
        proto.graph.initializer.append(numpy_helper.from_array(arrays[value.name], value.name))
    return proto


def check_on_onnxruntime(proto, inputs, xs=None, *, rtol=None, symbolic=False):
    """The gradients that ONNX Runtime computes in the model's own types agree with those in float64.

    With `symbolic`, it also computes those of the model with no dimension known.
    """
    if rtol is None:
        rtol = 5e-3 if any(a.dtype == np.float16 for x in inputs.values() for a in flat(x)) else 1e-3
    xs = differentiable(proto, inputs) if xs is None else list(xs)
    proto = for_onnxruntime(proto) or proto  # what is newer may be replaced on the way
    proto = _with_constants(proto, {name: x for name, x in inputs.items() if _is_exotic(x)})
    doubled = to_double(proto)
    before = evaluate(doubled, double(proto, inputs))
    for y in float_outputs(proto):
        dy = direction(np.random.default_rng(0), before[y])
        exact = vjp(doubled, y, xs).to_proto()
        expected = gradients(exact, {**double(proto, inputs), exact.graph.input[-1].name: dy}, xs)
        for source in (proto, with_symbolic_dims(proto))[: 1 + symbolic]:
            _run_on_onnxruntime(source, inputs, y, dy, expected, rtol)


def _run_on_onnxruntime(proto, inputs, y, dy, expected, rtol):
    model = for_onnxruntime(vjp(proto, y, list(expected)).to_proto())
    assert model is not None, "its operators are newer than ONNX Runtime"
    loaded = session(model)
    seed = model.graph.input[-1]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor_type(seed).elem_type)
    given = {**inputs, seed.name: mapped(lambda a: a.astype(dtype), dy)}
    feeds = {v.name: given[v.name] for v in loaded.get_inputs()}
    for x, grad in zip(expected, loaded.run(None, feeds), strict=True):
        for found, wanted in zip(flat(grad), flat(expected[x]), strict=True):
            scale = max(1e-6, float(np.abs(wanted).max()))
            np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * scale, equal_nan=False)
