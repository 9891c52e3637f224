"""Comparing a rewrite with the operator that it replaces, as ONNX Runtime computes it: values and differences."""

import zlib

import gradcheck
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sessions import session

import onward


def case(op_type, inputs, outputs=1, *, domain="com.microsoft", constants=(), types=(), **attributes):
    """A graph of one operator, and what to feed it. Inputs that are None are left out.

    `types` are those of the outputs; outputs with a name like `_this` are not the graph's.
    """
    names = ["" if array is None else name for name, array in inputs.items()]
    while names and not names[-1]:
        names.pop()
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **attributes)
    given = {name: np.asarray(array) for name, array in inputs.items() if array is not None}
    graph = helper.make_graph(
        [node],
        "case",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in given.items()
            if name not in constants
        ],
        [
            helper.make_tensor_value_info(name, types[i] if types else TensorProto.FLOAT, None)
            for i, name in enumerate(results)
            if name and not name.startswith("_")
        ],
        [numpy_helper.from_array(given[name], name) for name in constants],
    )
    return graph, {name: array for name, array in given.items() if name not in constants}


def model(graph, opset, *, symbolic=False):
    """A model of a graph, with or without the sizes of its inputs."""
    imports = [
        helper.make_opsetid("", opset),
        helper.make_opsetid("com.microsoft", 1),
        helper.make_opsetid("ai.onnx.ml", 3),
        helper.make_opsetid("com.microsoft.nchwc", 1),
    ]
    proto = helper.make_model(graph, ir_version=10, opset_imports=imports)
    return gradcheck.with_symbolic_dims(proto) if symbolic else proto


def run(proto, inputs):
    return runner(proto)(inputs)


def runner(proto):
    """A function from inputs to outputs, by their names."""
    loaded = session(proto)
    names = [value.name for value in loaded.get_outputs()]
    return lambda inputs: dict(zip(names, loaded.run(None, inputs), strict=True))


def check(proto, inputs, *, xs=None, rtol=2e-5, step=0.02, gradient_rtol=5e-3, expected=None):
    """Values as the kernel's (or `expected`), gradients as its differences, of all floating-point inputs (or `xs`)."""
    kernel = None if expected is not None else runner(proto)
    wanted = kernel(inputs) if kernel else expected
    factors = {name: weights(name, y) for name, y in wanted.items() if gradcheck.is_float(y)}
    xs = [name for name, x in inputs.items() if gradcheck.is_float(x)] if xs is None else xs
    scored = _with_loss(proto, factors)
    made = onward.gradient(scored, "loss", xs).to_proto()
    assert not {node.domain for node in made.graph.node} & {"com.microsoft", "ai.onnx.ml"}
    found = run(made, inputs)
    for name, y in wanted.items():
        if gradcheck.is_float(y):
            np.testing.assert_allclose(found[name], y, rtol=rtol, atol=rtol * max(1, np.abs(y).max()), err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], y, err_msg=name)
    grads = {x: found[f"{x}/grad"] for x in xs}
    for x, grad in grads.items():
        assert grad.shape == inputs[x].shape and grad.dtype == inputs[x].dtype
    if kernel and grads:
        _compare(kernel, inputs, factors, grads, step, gradient_rtol)
    return grads


def weights(name, y):
    """What an output is multiplied with in the loss."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(np.shape(y)).astype(np.float32)


def _with_loss(proto, factors):
    """The model with one more output, which depends on all floating-point ones."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = proto.graph
    for name, weight in factors.items():
        graph.initializer.append(numpy_helper.from_array(weight, f"{name}/weight"))
        graph.node.append(helper.make_node("Mul", [name, f"{name}/weight"], [f"{name}/weighted"]))
        graph.node.append(helper.make_node("ReduceSum", [f"{name}/weighted"], [f"{name}/sum"], keepdims=0))
    graph.node.append(helper.make_node("Sum", [f"{name}/sum" for name in factors], ["loss"]))
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    return proto


def _compare(kernel, inputs, factors, grads, size, rtol):
    """Along one direction, with differences of the fourth order, since the kernels compute in float32."""
    rng = np.random.default_rng(7)
    step = {x: rng.standard_normal(inputs[x].shape) for x in grads}

    def loss(distance):
        moved = {**inputs, **{x: (inputs[x] + distance * step[x]).astype(np.float32) for x in grads}}
        found = kernel(moved)
        return sum(float(np.sum(found[name].astype(np.float64) * weight)) for name, weight in factors.items())

    numeric = (8 * (loss(size) - loss(-size)) - (loss(2 * size) - loss(-2 * size))) / (12 * size)
    parts = np.concatenate([(grads[x] * step[x]).reshape(-1) for x in grads])
    ours, scale = float(parts.sum()), float(np.sqrt(np.square(parts).sum()))
    assert np.isfinite(ours)
    assert abs(numeric - ours) <= rtol * max(scale, 1e-2), f"{ours} by the rewrite, {numeric} by differences"
