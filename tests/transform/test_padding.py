"""SAME padding: one function on every engine, in the files that are written, and in TensorFlow, from which it comes."""

from __future__ import annotations

import functools
import itertools
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from marks import needs
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.engines import function, start
from onward.errors import UnsupportedError
from onward.model.serde import to_proto
from onward.training.run import in_form_of

OPERATORS = ("Conv", "MaxPool", "AveragePool", "AveragePool with padding", "LpPool", "ConvTranspose")
WINDOWS = (
    (3, 2, 1), (2, 2, 1), (3, 1, 1), (1, 2, 1), (2, 3, 1), (1, 3, 1), (2, 4, 1), (1, 4, 1), (3, 1, 2), (3, 2, 2),
    (2, 3, 2), (1, 4, 2),
)  # fmt: skip
"""Kernel, stride and dilation: strides below, at and above the kernel."""
SIZES = 8, 9


def window_node(operator, x, y, auto_pad, kernel, stride, dilation):
    """One operator on two channels, and its kernel if it has one."""
    name, _, include = operator.partition(" ")
    settings = {"strides": [stride] * 2, "dilations": [dilation] * 2, "auto_pad": auto_pad}
    if name.startswith("Conv"):
        array = np.random.default_rng(len(y)).standard_normal((2, 2, kernel, kernel)).astype(np.float32)
        return helper.make_node(name, [x, f"{y}.w"], [y], y, **settings), [numpy_helper.from_array(array, f"{y}.w")]
    settings["kernel_shape"] = [kernel] * 2
    if include:
        settings["count_include_pad"] = 1
    return helper.make_node(name, [x], [y], y, **settings), []


def is_agreed(operator, kernel, stride, dilation):
    return operator != "ConvTranspose" or stride <= (kernel - 1) * dilation + 1


CASES = [
    (operator, auto_pad, *window)
    for operator, auto_pad, window in itertools.product(OPERATORS, ("SAME_UPPER", "SAME_LOWER"), WINDOWS)
    if is_agreed(operator, *window)
]


def model_of(cases, sizes=SIZES):
    """Each case behind a 1x1 convolution, which is trained; their means side by side."""
    first = np.random.default_rng(0).standard_normal((2, 2, 1, 1)).astype(np.float32)
    nodes, stored = [helper.make_node("Conv", ["x", "first"], ["image"])], [numpy_helper.from_array(first, "first")]
    for i, case in enumerate(cases):
        operator, *window = case
        node, weights = window_node(operator, "image", f"y{i}", *window)
        nodes += [node, helper.make_node("GlobalAveragePool", [f"y{i}"], [f"mean{i}"])]
        stored += weights
    nodes.append(helper.make_node("Concat", [f"mean{i}" for i in range(len(cases))], ["means"], axis=1))
    nodes.append(helper.make_node("Flatten", ["means"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "windows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, *sizes])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2 * len(cases)])],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def image(sizes=SIZES):
    return np.random.default_rng(1).standard_normal((2, 2, *sizes)).astype(np.float32)


def on_stock_onnxruntime(model, feeds):
    proto = model if isinstance(model, onnx.ModelProto) else to_proto(model)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


FEW = 7


@functools.cache
def trained(every=1):
    """A training model of the table, its batch, and what the reference engine makes of it: loss, weights, outputs."""
    original = onward.load(model_of(CASES[::every]))
    with pytest.warns(UserWarning, match="written out"):
        model = onward.prepare(original, loss="mse", optimizer="sgd:lr=0.1")
    batch = {"x": image(), "target": np.ones((2, 2 * len(CASES[::every])), np.float32)}
    batch = {name: batch.get(name, batch["target"]) for name in start(model).inputs}
    return original, model, batch, step_on(model, batch, engine="numpy")


def step_on(model, batch, **options):
    with start(model, **options) as engine:
        loss = engine.step(batch)[engine.loss]
        return np.asarray(loss), engine.state(), engine.evaluate(batch)["y"], engine.updated()


def assert_alike(found, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_trained_is_what_the_file_computes(kernels):
    """The file that is written, on stock ONNX Runtime."""
    original, model, batch, (loss, state, y, _) = trained()
    found, after, outputs, updated = step_on(model, batch, kernels=kernels)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_alike(after, state)
    np.testing.assert_allclose(outputs, y, rtol=1e-4, atol=1e-5)
    for written in (in_form_of(original, updated), onward.lower(in_form_of(original, updated))):
        result = on_stock_onnxruntime(written, {"x": batch["x"]})["y"]
        np.testing.assert_allclose(result, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [FEW, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ("torch", "jax", "tensorflow")])
def test_frameworks_compute_the_same(engine, every):
    _, model, batch, (loss, state, y, _) = trained(every)
    found, after, outputs, _ = step_on(model, batch, engine=engine, compile=False)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert_alike(after, state)
    np.testing.assert_allclose(outputs, y, rtol=1e-4, atol=1e-5)


@needs("tensorflow")
@pytest.mark.parametrize("operator", ["Conv", "MaxPool", "AveragePool"])
def test_same_is_what_tensorflow_pads(operator):
    import tensorflow as tf

    x = image()
    for window in WINDOWS:
        kernel, stride, dilation = window
        if dilation > 1 and (stride > 1 or operator != "Conv"):  # of which TensorFlow has no kernels
            continue
        node, stored = window_node(operator, "x", "y", "SAME_UPPER", *window)
        typed = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
        graph = helper.make_graph(
            [node], "g", typed, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], stored
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
        last = tf.transpose(x, [0, 2, 3, 1])
        if operator == "Conv":
            w = numpy_helper.to_array(stored[0]).transpose(2, 3, 1, 0)
            expected = tf.nn.conv2d(last, w, stride, "SAME", dilations=dilation)
        else:
            pool = tf.nn.max_pool2d if operator == "MaxPool" else tf.nn.avg_pool2d
            expected = pool(last, kernel, stride, "SAME")
        found = function(model, engine="onnxruntime")({"x": x})["y"]
        np.testing.assert_allclose(found, tf.transpose(expected, [0, 3, 1, 2]), rtol=1e-4, atol=1e-5)


def test_gradients_are_of_the_padding_that_is_written():
    model = model_of([("Conv", "SAME_UPPER", 1, 4, 1), ("AveragePool", "SAME_LOWER", 2, 2, 2)])
    made = onward.gradient(model, "y", ["first"])
    feeds = {"x": image()}
    found = on_stock_onnxruntime(onward.lower(made, part="inference"), feeds)
    (gradient,) = (found[name] for name in found if name != "y")
    sums = []
    for change in (1e-2, -1e-2):
        other = onnx.ModelProto.FromString(model.SerializeToString())
        kernel = numpy_helper.to_array(other.graph.initializer[0]) + np.float32([[[[0]], [[change]]], [[[0]], [[0]]]])
        other.graph.initializer[0].CopyFrom(numpy_helper.from_array(kernel, "first"))
        sums.append(function(other, engine="numpy")(feeds)["y"].sum())
    np.testing.assert_allclose(gradient[0, 1, 0, 0], (sums[0] - sums[1]) / 2e-2, rtol=1e-3)


REFUSED = {
    "sizes that are not stated": (("Conv", "SAME_UPPER", 3, 2, 2), ("H", "W"), "depends on unknown sizes"),
    "zeros in the output": (("ConvTranspose", "SAME_UPPER", 1, 2, 1), SIZES, "negative"),
    "padding that pools cannot have": (("MaxPool", "SAME_UPPER", 3, 1, 3), SIZES, "as large as the kernel"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_padding_that_cannot_be_written_is_refused(what):
    """In the same words wherever a model comes in."""
    case, sizes, words = REFUSED[what]
    model = model_of([case], sizes)
    with pytest.raises(UnsupportedError, match=words):
        onward.prepare(model, loss="mse")
    with pytest.raises(UnsupportedError, match=words):
        onward.lower(model)
    for engine in ("onnxruntime", "numpy"):
        with pytest.raises(UnsupportedError, match=words):
            function(model, engine=engine)


@pytest.mark.parametrize("case", [("Conv", "SAME_UPPER", 1, 2, 1), ("Conv", "SAME_LOWER", 3, 1, 2)])
def test_sizes_need_not_be_known_where_all_give_the_same(case):
    model, x = model_of([case], ("H", "W")), image((9, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = onward.prepare(model, loss="mse")
    expected = function(model, engine="numpy")({"x": x})["y"]
    np.testing.assert_allclose(on_stock_onnxruntime(onward.lower(training, part="inference"), {"x": x})["y"], expected,
                               rtol=1e-4, atol=1e-5)  # fmt: skip
