"""Training models as plain ONNX: what each part computes, and what a file says about itself."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from broken_models import GOOD
from lowered import IMAGES, LABELS, SQUARE, TOKENS, Part, assert_close, case, own_metrics, part, penalised, stored
from models import digits_mlp, small_cnn, small_transformer
from onnx import numpy_helper, parser
from stepping import Stepper

import onward
from onward.engines import start
from onward.lowering.contract import contract_of
from onward.lowering.step import PARTS

__all__ = ["case"]  # a fixture

# ---- what the parts compute ------------------------------------------------------------------------------------------


def test_a_step_is_what_the_algorithm_computes(case):
    model, batch, lowered = case
    step, reference, state = lowered("step"), Stepper(model, own_gradients=True), stored(model)
    assert set(step.contract["state"]) == set(state)
    for _ in range(5):
        results, expected = step({**batch, **state}), reference(batch)
        metrics = dict(zip(step.contract["metrics"], own_metrics(model), strict=True))
        assert_close(
            {name: results[name] for name in metrics},
            {name: np.asarray(expected[own]) for name, own in metrics.items()},
        )
        state.update(step.new_state(results))
    assert_close(state, reference.state)


def test_gradients_and_apply_make_a_step(case):
    model, batch, lowered = case
    step, gradients, apply = (lowered(name) for name in ("step", "gradients", "apply"))
    state = stored(model)
    assert set(gradients.contract["gradients"].values()) == set(model.step().differentiated())
    for _ in range(3):
        whole = step({**batch, **state})
        expected = step.new_state(whole)
        first = gradients({**batch, **state})
        state.update(gradients.new_state(first))
        second = apply({**{name: first[name] for name in apply.contract["gradients"]}, **state})
        state.update(apply.new_state(second))
        # In one graph, ONNX Runtime leaves gradients in float32 that cross from one part to the other in float16.
        assert_close(state, expected, **({"rtol": 0.05, "atol": 1e-3} if "fc1.weight/master" in state else {}))
        metrics = {name: {**first, **second}[name] for name in step.contract["metrics"]}
        assert_close(metrics, {name: whole[name] for name in step.contract["metrics"]})


def test_an_evaluation_is_the_loss_of_what_inference_computes(case):
    """The outputs are those of the stripped model; the loss is computed from them by hand."""
    model, batch, lowered = case
    step, evaluation, state = lowered("step"), lowered("evaluation"), stored(model)
    state.update(step.new_state(step({**batch, **state})))
    for name, array in state.items():
        if name in model.graph.initializers:
            model = model.copy()
            model.set(name, array)
    proto = onward.transform.strip(model).to_proto()
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in proto.graph.output]
    known = {value.name for value in session.get_inputs()}
    outputs = dict(zip(names, session.run(names, {k: v for k, v in batch.items() if k in known}), strict=True))
    results = evaluation({**batch, **state})
    assert evaluation.contract["outputs"] == names and evaluation.contract["update"] == {}
    assert_close({name: results[name] for name in names}, outputs, rtol=1e-5)
    loss = results[evaluation.contract["loss"]]
    np.testing.assert_allclose(loss, loss_by_hand(outputs, batch, model), rtol=1e-3 if loss.dtype != "f4" else 1e-5)


def loss_by_hand(outputs, batch, model):
    if "loss" in outputs:
        return outputs["loss"]
    if "decoded" in outputs:
        return np.mean((outputs["decoded"] - batch["target"]) ** 2)
    scores = outputs["logits"].astype(np.float64)
    logarithms = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    smoothing = model.step().fact("train.loss")[0].get("options", {}).get("label_smoothing", 0.0)
    picked = logarithms[np.arange(len(scores)), batch["labels"]]
    return -np.mean((1 - smoothing) * picked + smoothing * logarithms.mean(1))


def test_state_and_initialization_hold_what_a_loop_starts_from(case):
    model, _, lowered = case
    state, initial = lowered("state"), lowered("initialization")
    assert state.new_state(state({})).keys() == initial.new_state(initial({})).keys() == stored(model).keys()
    for name, array in stored(model).items():
        np.testing.assert_array_equal(state({})[name], array, strict=True)
        if model.step().fact("train.recipe").get("init", "file") == "file":
            np.testing.assert_array_equal(initial({})[name], array, strict=True)


def test_an_initializer_starts_anew():
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", init={"fc1.*": "ones"}, ema=0.9)
    initial = part(model, "initialization")({})
    np.testing.assert_array_equal(initial["fc1.weight"], np.ones((8, 64), np.float32))
    np.testing.assert_array_equal(initial["ema/fc1.weight"], np.ones((8, 64), np.float32))
    np.testing.assert_array_equal(initial["fc2.weight"], stored(model)["fc2.weight"])


def test_recomputation_changes_no_number():
    model = onward.prepare(small_transformer(2), loss="value:loss", optimizer="sgd")
    state = stored(model)
    plain, again = part(model, "step"), part(model, "step", recompute=1)
    assert_close(again({**TOKENS, **state}), plain({**TOKENS, **state}), rtol=1e-5)


# ---- models that others wrote, and other shapes of training ----------------------------------------------------------


def test_two_steps_that_take_turns():
    """As in a GAN: each step trains its part of the model, with its own state."""
    model = onward.prepare(digits_mlp(8), loss="cross_entropy", optimizer="sgd:lr=0.1", freeze="fc2.*")
    model = onward.prepare(model, loss="cross_entropy", optimizer="adam", freeze="fc1.*", append=True)
    for index, trained in ((0, "fc1"), (1, "fc2")):
        labels = next(v.name for v in model.step(index).algorithm.inputs)
        batch = {"image": IMAGES, labels: LABELS}
        step = Part(onward.lower(model, index))
        reference = Stepper(model, index, own_gradients=True)
        state = stored(model, index)  # with what the other changes
        results = step({**batch, **state})
        reference(batch)
        assert_close(state | step.new_state(results), reference.state)
        assert set(onward.lower(model, index, part="gradients").graph.outputs[1].name.split(".")[:1]) == {trained}
        assert_close(Part(onward.lower(model, index, part="state"))({}), stored(model, index), 0, 0)


def made_up(values):
    """A batch for inputs of any kind: numbers, or one of two classes."""
    rng = np.random.default_rng(0)
    batch = {}
    for value in values:
        numbers = rng.normal(size=[size if isinstance(size, int) else 4 for size in value.shape])
        batch[value.name] = (numbers > 0 if value.dtype.is_integer() else numbers).astype(value.dtype.numpy())
    return batch


@pytest.mark.parametrize("name", GOOD)
def test_models_as_others_would_write_them(name):
    """Several steps, functions of their own, If and Loop, running statistics, gradients of gradients."""
    model = onward.load(GOOD[name]())
    for index in range(len(model.steps)):
        step, gradients = (Part(onward.lower(model, index, part=part)) for part in ("step", "gradients"))
        values = {value.name: value for value in (*model.inputs, *model.step(index).algorithm.inputs)}
        batch = made_up([values[name] for name in step.contract["batch"]])
        reference, state = Stepper(model, index, own_gradients=True), stored(model, index)
        for _ in range(3):
            reference(batch)
            old, state = state, state | step.new_state(step({**batch, **state}))
        assert_close(state, reference.state, rtol=1e-5)
        if name == "control_flow":
            with pytest.raises(onward.Error, match="the update reads `x`, which is neither a gradient nor state"):
                onward.lower(model, index, part="apply")
            continue
        apply, first = Part(onward.lower(model, index, part="apply")), gradients({**batch, **old})
        old |= gradients.new_state(first)
        assert_close(old | apply.new_state(apply({**first, **old})), state, rtol=1e-5)


@pytest.mark.parametrize("opset", [13, 18])
def test_gradients_of_gradients(opset):
    model = onward.load(penalised(opset))
    x, w = np.array([1.0, -2.0, 0.5], np.float32), np.array(0.5, np.float32)
    slope = 2 * x * w**2
    loss = np.mean((x * w) ** 2 + slope**2)
    gradient = np.mean(2 * x**2 * w + 16 * x**2 * w**3)
    results = part(model, "step")({"x": x, "w": w})
    np.testing.assert_allclose(results["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(results["new"], w - 0.1 * gradient, rtol=1e-6)
    first = part(model, "gradients")
    assert first.contract["gradients"] == {"dw": "w"} and first.contract["loss"] == "loss"
    found = first({"x": x, "w": w})
    np.testing.assert_allclose(found["dw"], gradient, rtol=1e-6)
    second = part(model, "apply")
    assert second.contract["gradients"] == {"dw": "w"}
    np.testing.assert_allclose(second({"dw": found["dw"], "w": w})["new"], w - 0.1 * gradient, rtol=1e-6)
    with pytest.raises(onward.Error, match="no initialization"):
        onward.lower(model, part="initialization")


def test_state_that_is_only_written_or_only_read_is_state_all_the_same():
    text = """<ir_version: 10, opset_import: ["": 21]>
      g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"""
    proto = onnx.parser.parse_model(text)
    info = proto.training_info.add()
    info.algorithm.CopyFrom(
        onnx.parser.parse_graph("a () => (float[2] kept, float[2] w2) <float[2] last = {0, 0}> {"
        " kept = Identity(x) w2 = Add(w, y) }")
    )  # fmt: skip
    info.initialization.CopyFrom(
        onnx.parser.parse_graph("i () => (float[2] zero) { zero = Constant<value = float[2] {0, 0}>() }")
    )
    for key, value in (("w", "w2"), ("last", "kept")):
        info.update_binding.add(key=key, value=value)
        info.initialization_binding.add(key=key, value="zero")
    model = onward.load(proto)
    step = part(model, "step")
    assert step.contract["batch"] == ["x"] and step.contract["state"] == ["w", "last"]
    state = step.new_state(step({"x": np.float32([3, 4]), **stored(model)}))
    np.testing.assert_array_equal(state["last"], [3, 4])
    np.testing.assert_array_equal(state["w"], [4, 10])
    initial = part(model, "initialization")
    np.testing.assert_array_equal(initial.new_state(initial({}))["w"], [0, 0])
    with start(model) as engine:
        engine.step({"x": np.float32([3, 4])})
        np.testing.assert_array_equal(engine.state()["last"], [3, 4])


@pytest.mark.parametrize("change", ["rename", "prefix", "inline"])
def test_an_evaluation_survives_other_names(change):
    """Which values inference has instead of those of training is recorded, not guessed from names."""
    model = onward.prepare(small_cnn(), loss="cross_entropy")
    expected = part(model, "evaluation")({**SQUARE, **stored(model)})["loss"]
    prefix = "m/" if change == "prefix" else ""
    if change == "rename":
        model = onward.transform.rename(model, {"relu": "rectified", "pool": "pooled", "bn": "normal"})
    model = (
        onward.transform.add_prefix(model, "m/")
        if prefix
        else onward.transform.inline(model)
        if change == "inline"
        else model
    )
    batch = {prefix + name: array for name, array in SQUARE.items()}
    np.testing.assert_allclose(part(model, "evaluation")({**batch, **stored(model)})[f"{prefix}loss"], expected)


def test_what_is_refused():
    model = onward.prepare(digits_mlp(8), loss="cross_entropy")
    with pytest.raises(onward.Error, match="unknown part `steps`") as caught:
        onward.lower(model, part="steps")
    assert "step" in caught.value.hint
    with pytest.raises(onward.Error, match="the model has no step 1"):
        onward.lower(model, 1)
    with pytest.raises(onward.Error, match="the model has no step 0"):
        onward.lower(digits_mlp(8), part="step")
    with pytest.raises(onward.Error, match="not a lowered model"):
        contract_of(model)
    assert list(PARTS) == ["step", "evaluation", "gradients", "apply", "initialization", "state", "inference"]


@pytest.mark.parametrize(
    ("shape", "perm", "result"), [("n, 4", "1, 0", "3"), ("2, n, 4", "0, 2, 1", "2, 3"), ("n, 4", None, "3")]
)
def test_a_transposed_matrix_times_a_vector(shape, perm, result):
    """ONNX Runtime 1.31 computes it wrongly as it stands, and this is how PyTorch exports `w.T @ v`."""
    attribute = f"<perm = [{perm}]>" if perm else ""
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x, float[n] v) => (float[{result}] y)
        {{ h = MatMul(x, w)  t = Transpose{attribute}(h)  y = MatMul(t, v) }}"""
    )
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((4, 3)).astype("f")
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    model = onward.prepare(proto, loss="mse", optimizer="sgd")
    x = rng.standard_normal([5 if size == "n" else int(size) for size in shape.split(", ")]).astype("f")
    v = rng.standard_normal(5).astype("f")
    expected = v @ (x @ weights)
    batch = {"x": x, "v": v, "target": np.zeros_like(expected)}
    found = {}
    for engine in ("onnxruntime", "numpy"):
        with start(model, engine=engine) as loaded:
            found[engine] = [float(loaded.step(batch)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(found["onnxruntime"], found["numpy"], rtol=1e-6)
    assert found["numpy"][0] == pytest.approx(float((expected**2).mean()), rel=1e-5)
