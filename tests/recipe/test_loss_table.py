"""The table of losses: options, targets, what is written; and the standard's own tests of its loss operators."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from loss_models import Array, lowered, model, on_onnxruntime, on_reference, value
from node_tests import NodeTest, onnx_node_tests

from onward.build import Builder
from onward.errors import RecipeError, UnknownNameError
from onward.recipe.losses import LOSSES, Target, loss

# ---- types, versions, and what is written ----------------------------------------------------------------------------

EXAMPLES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"label_smoothing": 0.1},
    "binary_cross_entropy": {"clip": 1e-3, "weight": 2.0},
    "bce_with_logits": {"pos_weight": 2.0},
    "poisson_nll": {"full": True, "log_input": False},
    "gaussian_nll": {"full": True},
    "ctc": {"zero_infinity": True},
}


def example(name: str, dtype: Any) -> list[Array]:
    """A prediction and its targets, with the shapes and types that the loss itself asks for."""
    rng = np.random.default_rng(0)
    shape = (6, 2, 4) if name == "ctc" else (2, 4)
    prediction = rng.uniform(0.1, 0.9, shape).astype(dtype)
    inputs = [prediction]
    for target in loss(name).targets(value("prediction", prediction), **EXAMPLES.get(name, {})):
        sizes = {"labels": (2, 3) if name == "ctc" else (2,), "input_lengths": 2, "target_lengths": 2}
        if target.dtype == ir.DataType.INT64:
            inputs.append(rng.integers(1, 3, sizes[target.name]))
        else:
            inputs.append(rng.uniform(0.1, 0.9, shape).astype(dtype))
    return inputs


@pytest.mark.parametrize("name", sorted({made.name for made in LOSSES.values()}))
def test_every_opset_and_type(name: str):
    options = EXAMPLES.get(name, {})
    expected = on_reference(model(name, *example(name, np.float64), **options), *example(name, np.float64))[0]
    for opset, (dtype, tolerance) in itertools.product(
        range(18, 27), [(np.float64, 1e-14), (np.float32, 1e-5), (np.float16, 2e-2)]
    ):
        inputs = example(name, dtype)
        (actual,) = on_onnxruntime(model(name, *inputs, opset=opset, **options), *inputs)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, err_msg=f"opset {opset}, {dtype.__name__}")


@pytest.mark.parametrize("name", sorted({made.name for made in LOSSES.values()}))
def test_functions_explain_themselves(name: str):
    """A body of standard operators and a formula; numbers on the call, in double precision."""
    proto = model(name, *example(name, np.float32), **EXAMPLES.get(name, {}))
    for function in proto.functions:
        assert " = " in function.doc_string
        assert {node.domain for node in function.node} == {""}
    numbers = {node.output[0]: node.attribute[0].t for node in proto.graph.node if node.op_type == "Constant"}
    calls = [node for node in proto.graph.node if node.domain == "onward"]
    assert {call.op_type for call in calls} == {function.name for function in proto.functions}
    assert {numbers[i].data_type for call in calls for i in call.input if i in numbers} <= {onnx.TensorProto.DOUBLE}


@pytest.mark.parametrize(
    ("options", "operator"), [({}, "SoftmaxCrossEntropyLoss"), ({"label_smoothing": 0.1}, "SmoothedCrossEntropy")]
)
def test_the_standards_operator_where_it_is_exact(options: dict[str, Any], operator: str):
    proto = model("cross_entropy", *example("cross_entropy", np.float32), **options)
    assert operator in {node.op_type for node in proto.graph.node}
    assert bool(proto.functions) == bool(options)


# ---- the table of losses ---------------------------------------------------------------------------------------------


def prediction_value(*dims: int | str | None, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="logits", type=ir.TensorType(dtype), shape=ir.Shape(dims))


def test_targets_follow_the_prediction():
    indices, floats = ir.DataType.INT64, ir.DataType.FLOAT
    image, text = prediction_value("N", 10, "H", "W"), prediction_value("N", None, 10)
    assert loss("ce").targets(image) == (Target("labels", indices, ir.Shape(["N", "H", "W"])),)
    assert loss("nll").targets(text, axis=-1) == (Target("labels", indices, ir.Shape(["N", None])),)
    assert loss("ce").targets(image, target="probabilities") == (Target("target", floats, image.shape),)
    assert loss("mse").targets(image) == (Target("target", floats, image.shape),)
    assert [target.name for target in loss("triplet").targets(image)] == ["positive", "negative"]
    assert [target.name for target in loss("gaussian_nll").targets(image)] == ["target", "variance"]
    expected = {"labels": ["N", None], "input_lengths": ["N"], "target_lengths": ["N"]}
    sequences = tuple(Target(name, indices, ir.Shape(shape)) for name, shape in expected.items())
    assert loss("ctc").targets(prediction_value(None, "N", 10)) == sequences
    assert loss("ctc").targets(prediction_value("N", 50, 10), batch_first=True) == sequences


def test_targets_of_an_unknown_shape():
    unknown = ir.Value(name="logits", type=ir.TensorType(ir.DataType.DOUBLE))
    assert loss("ce").targets(unknown) == (Target("labels", ir.DataType.INT64, None),)
    assert loss("mse").targets(unknown) == (Target("target", ir.DataType.DOUBLE, None),)
    with pytest.raises(RecipeError, match="type of `logits` is unknown"):
        loss("mse").targets(ir.Value(name="logits"))


def test_short_names_and_summaries():
    assert loss("ce") is loss("cross_entropy") and loss("bce") is loss("binary_cross_entropy")
    assert loss("mae") is loss("l1") and loss("kl") is loss("kl_div")
    assert loss("huber").options == {"delta": 1.0, "reduction": "mean"}
    assert all(made.summary.endswith(".") and len(made.summary) < 120 for made in LOSSES.values())


def test_unknown_names_are_answered_with_near_ones():
    with pytest.raises(UnknownNameError, match="unknown loss `crossentropy`") as error:
        loss("crossentropy")
    assert "`cross_entropy`" in error.value.hint
    with pytest.raises(RecipeError, match="`huber` has no option `dleta`, `reduce`") as error:
        loss("huber").targets(prediction_value("N"), dleta=1, reduce="sum")
    assert "`delta`" in error.value.hint


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "huber",
            {"delta": "big", "reduction": 3},
            "delta is 'big', not a finite number; reduction is 3, not a str",
        ),
        ("huber", {"delta": -1}, "delta is -1"),
        ("huber", {"delta": float("nan")}, "delta is nan"),
        ("smooth_l1", {"beta": 0}, "beta is 0"),
        ("mse", {"reduction": "average"}, "reduction is `average`"),
        ("kl_div", {"reduction": "average"}, "reduction is `average`"),
        ("cross_entropy", {"reduction": "batchmean"}, "reduction is `batchmean`"),
        ("cross_entropy", {"label_smoothing": 2}, "label_smoothing is 2"),
        ("cross_entropy", {"target": "labels"}, "target is `labels`"),
        ("cross_entropy", {"axis": 2}, "axis is `2`"),
        ("cross_entropy", {"weight": [1, 2, 3]}, "3 weights for 4 classes"),
        ("cross_entropy", {"weight": "heavy"}, "weight is 'heavy'"),
        ("cross_entropy", {"weight": 2.0}, "weight is 2.0"),
        ("cross_entropy", {"ignore_index": 1.5}, "ignore_index is 1.5"),
        ("cross_entropy", {"axis": True}, "axis is True, not an integer"),
        ("cross_entropy", {"target": "probabilities", "ignore_index": 1}, "no ignore_index"),
        ("binary_cross_entropy", {"clip": 0.6}, "clip is 0.6"),
        ("poisson_nll", {"full": 1}, "full is 1, not true or false"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str):
    inputs = [prediction_value("N", 4), prediction_value("N", 4)]
    op = Builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}), opset=21)
    with pytest.raises(RecipeError) as error:
        loss(name).build(op, *map(op, inputs), **options)
    assert message in str(error.value)


def test_numbers_of_numpy_are_numbers():
    inputs = example("cosine", np.float32)
    options = {"axis": np.int64(-1), "eps": np.float32(0.5)}
    assert model("cosine", *inputs, **options) == model("cosine", *inputs, axis=-1, eps=0.5)
    assert model("nll", *example("nll", np.float32), ignore_index=np.int64(1), weight=np.ones(4))


@pytest.mark.parametrize(("name", "dims"), [("cross_entropy", ("N",)), ("ctc", ("T", "C"))])
def test_predictions_of_too_few_axes_are_refused(name: str, dims: tuple[str, ...]):
    with pytest.raises(RecipeError, match="`logits` has the shape"):
        loss(name).targets(prediction_value(*dims))


# ---- the standard's own tests of its two loss operators --------------------------------------------------------------


@functools.cache
def loss_node_tests() -> list[NodeTest]:
    return [test for name, test in onnx_node_tests().items() if name.startswith(("test_sce_", "test_nllloss_"))]


def test_all_104_loss_node_tests_are_here():
    assert len(loss_node_tests()) == 104


@pytest.mark.parametrize("form", ["standard", "lowered"])
@pytest.mark.parametrize("test", loss_node_tests(), ids=lambda test: test.name)
def test_node_tests(test: NodeTest, form: str):
    proto = test.proto() if form == "standard" else lowered(test.proto())
    onnx.checker.check_model(proto, full_check=True)
    for inputs, outputs in test.data:
        for actual, expected in zip(on_onnxruntime(proto, *inputs), outputs, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=test.rtol, atol=test.atol)
