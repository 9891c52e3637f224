"""The reference in numpy: operators as on ONNX Runtime, steps as on ONNX Runtime, rules as differences."""

import gradcheck
import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from control_flow import CASES as CONTROL_FLOW
from lowered import CASES as TRAINING
from lowered import FLAT, SQUARE, assert_close, penalised
from marks import needs
from models import digits_mlp, small_cnn
from rule_tables import FAMILIES
from sessions import session

import onward
from onward.engines import function, start
from onward.engines.framework_engine import Interpreted
from onward.engines.numpy import Numpy
from onward.engines.operator_forms import express
from onward.errors import UnknownNameError, UnsupportedError
from onward.model import load

# ---- operators -------------------------------------------------------------------------------------------------------

OPERATORS = {
    **{f"{family.__name__}.{name}": case for family in FAMILIES for name, case in family.CASES.items()},
    **{f"control_flow.{name}": case for name, case in CONTROL_FLOW.items()},
}
NOT_AS_ON_ONNXRUNTIME = {
    "rule_cases.attention.scores_behind_a_mask": "it writes the lowest number for minus infinity",
    "rule_cases.movement.split_with_an_output_left_out": "it crashes",
    "rule_cases.recurrent.gru_reverse": "for a sequence of no elements it returns zeros, not the initial state",
}


def on_onnxruntime(proto, inputs):
    """What ONNX Runtime computes; None if it refuses."""
    try:
        loaded = session(gradcheck.for_onnxruntime(proto) or proto)
        found = loaded.run(None, {value.name: inputs[value.name] for value in loaded.get_inputs()})
    except Exception:  # it has many ways to say so
        return None
    return dict(zip((value.name for value in loaded.get_outputs()), found, strict=True))


def read_only(array):
    """Of which an operator must not change an element."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_as_on_onnxruntime(name):
    """Where it does not compute a case, as the evaluator of `onnx` has it."""
    proto, inputs = OPERATORS[name][:2]
    expected = None if name in NOT_AS_ON_ONNXRUNTIME else on_onnxruntime(proto, inputs)
    expected = expected or gradcheck.evaluate(proto, inputs)
    found = function(load(proto))({name: gradcheck.mapped(read_only, value) for name, value in inputs.items()})
    half = any(array.itemsize == 2 for value in inputs.values() for array in gradcheck.flat(value))
    rtol = 2e-3 if half or "float16" in name else 2e-5
    for output, wanted in expected.items():
        for ours, theirs in zip(gradcheck.flat(found[output]), gradcheck.flat(wanted), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            if gradcheck.is_float(theirs):
                ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol, err_msg=output)


def test_nothing_scanned_leaves_an_empty_axis():
    text = """<ir_version: 10, opset_import: ["" : 21]>
        f (float[2] start, float[2,T] x) => (float[2] last, float[2,T] sums) {
            last, sums = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1],
                body = add (float[2] before, float[2] next) => (float[2] after, float[2] sum) {
                    after = Add (before, next)
                    sum = Identity (after)
                }> (start, x)
        }"""
    start = np.array([1, 2], np.float32)
    for count in (0, 3):
        x = np.ones((2, count), np.float32)
        found = function(onnx.parser.parse_model(text))({"start": start, "x": x})
        np.testing.assert_array_equal(found["sums"], start[:, None] + np.cumsum(x, 1))
        np.testing.assert_array_equal(found["last"], start + count)


def test_text():
    text = """<ir_version: 10, opset_import: ["" : 21]>
        f (string[N] x) => (string[N] y, bool[N] same, float[N] z) <string[1] end = {"5"}> {
            begin = Constant <value_strings = ["1."]> ()
            x_end = StringConcat (x, end)
            y = StringConcat (begin, x_end)
            same = Equal (x, end)
            z = Cast <to = 1> (y)
        }"""
    found = function(onnx.parser.parse_model(text))({"x": np.array(["2", "5"], object)})
    assert found["y"].tolist() == ["1.25", "1.55"] and found["same"].tolist() == [False, True]
    np.testing.assert_array_equal(found["z"], np.array([1.25, 1.55], np.float32))


@pytest.mark.parametrize(
    ("call", "mean", "deviation"),
    [
        ("RandomNormal <shape = [100, 1000], mean = 3.0, scale = 2.0>", 3, 2),
        ("RandomUniform <shape = [100, 1000], low = -1.0, high = 5.0>", 2, 6 / 12**0.5),
        ("RandomNormalLike <mean = 3.0, scale = 2.0>", 3, 2),
        ("RandomUniformLike <low = -1.0, high = 5.0>", 2, 6 / 12**0.5),
        ("Bernoulli", 0.25, 0.1875**0.5),
        ("Dropout", 0.25, (0.25**2 / 3) ** 0.5),
        ("Multinomial <sample_size = 1000, dtype = 1>", 499.5, ((1000**2 - 1) / 12) ** 0.5),
    ],
)
def test_random_numbers(call, mean, deviation):
    """Of 100 rows of 1000, all 0.25; their moments are right, and a seed repeats them."""
    arguments = {"Dropout": "x, ratio, training"}.get(call, "" if "shape" in call else "x")
    text = """<ir_version: 10, opset_import: ["" : 22]>
        f (float[N,M] x) => (float[N,M] y, float[N,M] same, float[N,M] other)
        <float ratio = {0.25}, bool training = {1}> {"""
    first, second = (1, 2) if call == "Dropout" else (1.5, 2.5)
    for name, seed in (("y", first), ("same", first), ("other", second)):
        seeded = f"{call[:-1]}, seed = {seed}>" if ">" in call else f"{call} <seed = {seed}>"
        text += f"{name} = {seeded} ({arguments}) "
    x = np.full((100, 1000), 0.25, np.float32)
    found = function(onnx.parser.parse_model(text + "}"))({"x": x})
    np.testing.assert_array_equal(found["y"], found["same"])
    assert (found["y"] != found["other"]).any()
    assert found["y"].mean(dtype=np.float64) == pytest.approx(mean, abs=5 * deviation / len(x.ravel()) ** 0.5)
    assert found["y"].std(dtype=np.float64) == pytest.approx(deviation, rel=0.02)


def test_a_body_of_a_newer_operator_set_is_of_no_use():
    """Relu has been a function since operator set 14, whose body is of 18."""
    text = '<ir_version: 9, opset_import: ["" : 14]> f (float[N] x) => (float[N] y) { y = Relu (x) }'
    with pytest.raises(UnsupportedError, match="Relu"):
        express(load(onnx.parser.parse_model(text)), Numpy.operators.keys() - {"Relu"}, {}, "numpy")


# ---- steps -----------------------------------------------------------------------------------------------------------


WITH_IDLE_PARAMETERS = ("cnn", "transformer", "transformer with dropout")
"""The gradients of some are rounding errors. They would be whole steps to optimizers that divide by their size."""


@pytest.mark.slow("transformer with dropout")
@pytest.mark.parametrize("name", TRAINING)
def test_steps_are_as_on_onnxruntime(name):
    proto, batch, recipe = TRAINING[name]
    more = {"optimizer": "momentum:lr=0.1"} if name in WITH_IDLE_PARAMETERS else {}
    model = onward.prepare(proto(), **recipe | more)
    fewer = {name: array[: len(array) // 2] for name, array in batch.items()}
    tolerance = 2e-2 if name == "float16" else 1e-5
    with start(model, engine="numpy") as ours, start(model, kernels=False) as theirs:
        assert_close(ours.gradients(batch), theirs.gradients(batch), tolerance, tolerance)
        for one in (batch, fewer, batch):
            assert_close(ours.step(one), dict(theirs.step(one)), tolerance, tolerance)
        assert_close(ours.state(), theirs.state(), tolerance, tolerance)
        assert_close(ours.evaluate(batch), theirs.evaluate(batch), tolerance, tolerance)


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "vit", "bert", "gpt2", "lstm", "autoencoder", "if and loop", "while"])
def test_larger_models_train_as_on_onnxruntime(name):
    import training_cases as torch_models

    case = torch_models.CASES[name]
    subject = torch_models.made(case)
    model = torch_models.prepared(case, subject, torch_models.exported(case, subject))
    with start(model, engine="numpy") as ours, start(model, threads=1) as theirs:
        for size in (8, 3, 8):
            batch = torch_models.arrays(subject.batch(size))
            assert float(ours.step(batch)[ours.loss]) == pytest.approx(float(theirs.step(batch)[ours.loss]), rel=1e-4)
        state = theirs.state()
        for parameter, array in ours.state().items():
            if case.idle not in parameter:
                scale = max(1.0, float(np.abs(state[parameter]).max()))
                np.testing.assert_allclose(array, state[parameter], rtol=1e-3, atol=1e-3 * scale, err_msg=parameter)


# ---- other types, and differences ------------------------------------------------------------------------------------


def doubled(proto, batch):
    images = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in batch.items()}
    return gradcheck.to_double(proto), images


def test_float64_stays_float64():
    recipe = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.1,momentum=0.9", "schedule": "cosine:steps=9"}
    proto, batch = doubled(digits_mlp(8), FLAT)
    model = onward.prepare(proto, **recipe)
    with start(model, engine="numpy") as ours, start(model) as theirs:
        for _ in range(3):
            assert_close(ours.step(batch), dict(theirs.step(batch)), 1e-12, 1e-12)
        assert {array.dtype for name, array in ours.state().items() if name.startswith("fc")} == {np.dtype(np.float64)}
        assert_close(ours.state(), theirs.state(), 1e-12, 1e-12)


@pytest.mark.parametrize("proto", [digits_mlp(), small_cnn()], ids=["mlp", "cnn"])
def test_bfloat16_stays_near_float32(proto):
    """Which ONNX Runtime does not compute on CPUs."""
    recipe = {"loss": "cross_entropy", "optimizer": "sgd:lr=0.05"}
    half = gradcheck.in_type(proto, onnx.TensorProto.BFLOAT16)
    batch = SQUARE if len(proto.graph.input[0].type.tensor_type.shape.dim) == 4 else FLAT
    rounded = batch | {"image": batch["image"].astype(ml_dtypes.bfloat16)}
    with (
        start(onward.prepare(half, **recipe), engine="numpy") as narrow,
        start(onward.prepare(proto, **recipe)) as wide,
    ):
        for _ in range(3):
            assert float(narrow.step(rounded)["loss"]) == pytest.approx(float(wide.step(batch)["loss"]), rel=2e-2)
        state = narrow.state()
        for parameter in (name for name in wide.state() if name.endswith(".weight")):
            assert state[parameter].dtype == ml_dtypes.bfloat16


def test_the_rules_agree_with_differences():
    proto, batch = doubled(small_cnn(2), SQUARE)
    model = onward.prepare(proto, loss="cross_entropy", optimizer="sgd:lr=0.1")
    rules, differences = start(model, engine="numpy"), Interpreted(model, 0, Numpy(), rules=False)
    assert_close(rules.gradients(batch), differences.gradients(batch), 1e-7, 1e-8)


def test_the_rules_agree_with_differences_of_differences():
    proto, batch = doubled(penalised(21), {"x": np.array([0.5, -1.5, 2])})
    rules, differences = start(proto, engine="numpy"), Interpreted(load(proto), 0, Numpy(), rules=False)
    assert_close(rules.step(batch), differences.step(batch), 1e-4, 1e-4)
    assert_close(rules.state(), differences.state(), 1e-4, 1e-4)


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_names_that_are_no_inputs(engine):
    text = """<ir_version: 10, opset_import: ["" : 22]>
        f (float[N] image, float[N] weight) => (float[N] y) <float factor = {2.0}> { y = Mul (image, factor) }"""
    run = function(onnx.parser.parse_model(text), engine=engine)
    with pytest.raises(UnknownNameError, match="`image` is missing, `images` is not an input") as caught:
        run({"images": np.ones(2, np.float32), "weight": np.ones(2, np.float32)})
    assert caught.value.hint == "did you mean `image`?"
