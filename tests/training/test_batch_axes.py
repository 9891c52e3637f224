"""Samples that are not on axis 0, and inputs that are no data: each sample as stock ONNX Runtime runs it alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from marks import needs
from runs import QUIET

import onward
from onward.errors import RecipeError, UnknownNameError, UnsupportedError

BODY = """<float[3, 2] weight = {1.0, 2.0, 3.0, 4.0, 0.5, 0.7},
  float[3, 3] mix = {1, 0.5, 0.1, 0.2, 0.3, 0.4, 0.9, -1, -2}, int64[1] axis = {0}> {
    mixed = MatMul(state, mix) stateN = Tanh(mixed) sum = ReduceSum<keepdims = 0>(stateN, axis)
    factor = Cast<to = 1>(rate) scaled = Mul(sum, factor) both = Add(input, scaled)
    product = MatMul(both, weight) output = Mul(product, scale)
}"""
SAMPLES = 6
CONSTANTS = {"rate": 3, "scale": [0.5, 2.0]}
SGD = {"loss": "output=mse", "optimizer": "sgd:lr=0.01", "trainable": ["weight", "mix"]}


def recurrent(inputs: str, outputs: str) -> onnx.ModelProto:
    """A model for opset 13 with a state of layers, samples and units, a number and a vector that are no data."""
    head = f'<ir_version: 8, opset_import: ["": 13]> g ({inputs}) => ({outputs}) '
    return onnx.parser.parse_model(head + BODY)


MODEL = recurrent(
    "float[batch, 3] input, float[2, batch, 3] state, int64 rate, float[2] scale",
    "float[batch, 2] output, float[2, batch, 3] stateN",
)
ALONE = recurrent(
    "float[3] input, float[2, 3] state, int64 rate, float[2] scale", "float[2] output, float[2, 3] stateN"
)


def arrays(without: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"input": (3,), "state": (2, 3), "target": (2,)}
    data = {name: rng.normal(size=(SAMPLES, *size)).astype("f") for name, size in sizes.items()}
    return {name: array for name, array in data.items() if name != without}


def stock_loss(model: onnx.ModelProto, data: dict[str, np.ndarray], axis: int | None = 1) -> float:
    """The loss by NumPy of a file in stock ONNX Runtime, sample by sample."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    results = []
    for x, state in zip(data["input"], data.get("state", np.zeros((SAMPLES, 2, 3), "f")), strict=True):
        sample = {"input": x, "state": state}
        if axis is not None:
            sample = {"input": x[None], "state": np.expand_dims(state, axis)}
        (y,) = session.run(["output"], {**sample, "rate": np.asarray(3), "scale": np.asarray([0.5, 2], "f")})
        results.append(y.reshape(2))
    return float(np.mean((np.stack(results) - data["target"]) ** 2))


def gradient(model: onnx.ModelProto, data: dict[str, np.ndarray], name: str, axis: int | None = 1) -> np.ndarray:
    """Finite differences of the loss in stock ONNX Runtime."""
    (stored,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    weight = onnx.numpy_helper.to_array(stored).copy()
    result = np.zeros_like(weight)
    for at in np.ndindex(weight.shape):
        losses = []
        for step in (0.01, -0.01):
            moved = weight.copy()
            moved[at] += step
            stored.CopyFrom(onnx.numpy_helper.from_array(moved, name))
            losses.append(stock_loss(model, data, axis))
        result[at] = (losses[0] - losses[1]) / 0.02
    stored.CopyFrom(onnx.numpy_helper.from_array(weight, name))
    return result


def interface(model: Any) -> list[tuple[str, list[Any]]]:
    graph = onward.load(model).to_proto().graph
    values = [*graph.input, *graph.output]
    return [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]) for v in values]


def check_run(run: Any, model: onnx.ModelProto, data: dict[str, np.ndarray], axis: int | None = 1) -> None:
    """One update of the run is that of finite differences; the result has the interface of the file."""
    log = run.read_log()
    results = {e["epoch"]: e["loss"] for e in log if e["event"] == "validation"}
    assert results[0] == pytest.approx(stock_loss(model, data, axis), 1e-5)
    best = run.load_last()
    for name in ("weight", "mix"):
        (before,) = (onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)
        update = (before - best.graph.initializers[name].const_value.numpy()) / 0.01
        np.testing.assert_allclose(update, gradient(model, data, name, axis), rtol=0.02, atol=0.02)
    assert interface(best) == interface(model)
    proto = best.to_proto()
    assert [node.op_type for node in proto.graph.node] == [node.op_type for node in model.graph.node]
    assert results[max(results)] == pytest.approx(stock_loss(proto, data, axis), 1e-5)


ENGINES = ["onnxruntime", "numpy", pytest.param("torch", marks=needs("torch")), pytest.param("jax", marks=needs("jax"))]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("without", ["", "state"])
def test_a_state_of_layers_and_samples(tmp_path: Path, engine: str, without: str) -> None:
    data = arrays(without)
    constants = CONSTANTS | ({"state": "zeros"} if without else {})
    settings = {**SGD, "constants": constants, "batch_size": SAMPLES, "engine": engine, "quiet": True}
    run = onward.train(MODEL, data, validation=data, run=tmp_path / "run", **settings)
    check_run(run, MODEL, data)
    assert ("samples of `state` are along axis 1" in (run.path / "log.jsonl").read_text()) is not bool(without)


def test_a_sample_is_a_whole_tensor(tmp_path: Path) -> None:
    """Without any axis of samples, gradients of single samples are accumulated."""
    data = arrays()
    settings = {**SGD, "constants": CONSTANTS, "batch_axis": {"input": "none", "state": "none"}, **QUIET}
    run = onward.train(ALONE, data, validation=data, run=tmp_path / "run", **settings)
    assert run.read_progress()["step"] == SAMPLES
    check_run(run, ALONE, data, None)


def test_an_output_without_samples_stands_for_one(tmp_path: Path) -> None:
    data = arrays()
    model = recurrent(
        "float[N, 3] input, float[2, N, 3] state, int64 rate, float[2] scale", "float[2] output, float[2, N, 3] stateN"
    )
    model.graph.node[-1].output[0] = "rows"
    squeeze = onnx.helper.make_node("Squeeze", ["rows", "axis"], ["output"])
    model.graph.node.append(squeeze)
    settings = {**SGD, "constants": CONSTANTS, "batch_axis": {"output": "none"}, **QUIET}
    run = onward.train(model, data, validation=data, run=tmp_path / "run", **settings)
    check_run(run, model, data)


def test_a_run_goes_on_from_its_files(tmp_path: Path) -> None:
    """The axes and constants of a run are in its files: for resume, configuration and generators."""
    data = arrays("state")
    settings = {**SGD, "constants": {**CONSTANTS, "scale": np.asarray([0.5, 2]), "state": "zeros"}, "batch_size": 4}
    whole = onward.train(MODEL, data, epochs=4, run=tmp_path / "whole", **settings, **QUIET)
    part = onward.train(MODEL, data, epochs=2, run=tmp_path / "part", **settings, **QUIET)
    onward.resume(tmp_path / "part", data, epochs=4, quiet=True)
    np.savez(tmp_path / "data.npz", **data)
    onnx.save(MODEL, tmp_path / "model.onnx")
    files = {"model": tmp_path / "model.onnx", "data": str(tmp_path / "data.npz")}
    again = onward.train(config=whole.path / "config.yaml", run=tmp_path / "again", **files, **QUIET)
    recipe = {name: value for name, value in settings.items() if name != "batch_size"}
    onward.prepare(MODEL, **recipe).save(tmp_path / "training.onnx")
    prepared = onward.train(tmp_path / "training.onnx", data, batch_size=4, epochs=4, run=tmp_path / "prep", **QUIET)
    for run in (part, again, prepared):
        np.testing.assert_array_equal(weights(run.load_last()), weights(whole.load_last()))
        assert interface(run.load_last()) == interface(MODEL)

    def batches():
        yield from ({name: array[at : at + 3] for name, array in data.items()} for at in (0, 3))

    streamed = onward.train(MODEL, batches, epochs=1, run=tmp_path / "stream", **recipe, **QUIET)
    assert streamed.read_progress()["samples"] == SAMPLES


def weights(model: onward.Model) -> np.ndarray:
    return model.graph.initializers["weight"].const_value.numpy()


def test_the_loop_in_a_file_trains_the_same(tmp_path: Path) -> None:
    data = arrays("state")
    recipe = {**SGD, "constants": CONSTANTS | {"state": "zeros"}}
    run = onward.train(MODEL, data, batch_size=4, epochs=2, shuffle=False, run=tmp_path / "run", **recipe, **QUIET)
    training = onward.prepare(MODEL, **recipe)
    lowered = onward.lower(training, part="run", batch_size=4, shuffle=False)
    session = onnxruntime.InferenceSession(lowered.to_proto().SerializeToString())
    feed: dict[str, Any] = {**data, "run/epochs": np.asarray(2), "run/steps": np.asarray(-1), "run/seed": np.asarray(0)}
    state = onward.lower(training, part="state").to_proto().SerializeToString()
    names = [value.name for value in onnxruntime.InferenceSession(state).get_outputs()]
    feed |= dict(zip(names, onnxruntime.InferenceSession(state).run(None, {}), strict=True))
    for value in session.get_inputs():
        feed.setdefault(value.name, np.zeros([], {"tensor(double)": "f8", "tensor(int64)": "i8"}.get(value.type, "f4")))
    outputs = [value.name for value in session.get_outputs()]
    new = dict(zip(outputs, session.run(None, feed), strict=True))["weight/new"]
    np.testing.assert_allclose(new, weights(run.load_last()), rtol=1e-5)


def test_ctc_takes_time_first_or_samples_first(tmp_path: Path) -> None:
    """An output of time, samples and classes is moved, and the loss with it."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 13]> g (float[batch, 5, 4] x) => (float[5, batch, 3] scores)
        <float[4, 3] w = {1, 0.5, 0, -1, 0.3, 0.2, 0.7, -0.4, 0.9, 0.1, 0.2, 0.3}>
        { first = Transpose<perm = [1, 0, 2]>(x) scores = MatMul(first, w) }"""
    )
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(6, 5, 4)).astype("f"), "labels": rng.integers(1, 3, (6, 2))}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    scores = torch.tensor(session.run(None, {"x": data["x"]})[0]).log_softmax(-1)
    lengths = torch.full((6,), 5), torch.full((6,), 2)
    expected = torch.nn.functional.ctc_loss(scores, torch.tensor(data["labels"]), *lengths)
    for loss in ("ctc:logits=true", "ctc:logits=true,batch_first=true"):
        run = onward.train(
            model, data, loss=loss, validation=data, epochs=0, engine="numpy", run=tmp_path / loss, quiet=True
        )
        assert run.read_results()["loss"] == pytest.approx(float(expected), 1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"constants": {"sate": "zeros"}}, "no input `sate`"),
        ({"constants": {"state": "zero"}}, "the constant `state` is `zero`"),
        ({"constants": {"rate": 0.5}}, "`rate` takes int64"),
        ({"constants": {"scale": [1, 2, 3]}}, "`scale` takes"),
        ({"batch_axis": {"state": 3}}, "`batch_axis` of `state` is `3`"),
        ({"batch_axis": {"sate": 1}}, "no input or output `sate`"),
        ({"constants": {"state": "zeros", "input": "zeros", **CONSTANTS}}, "no input is left for data"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((RecipeError, UnknownNameError), match=said):
        onward.prepare(MODEL, **SGD, **options)


def test_a_constant_of_an_unknown_size_is_refused() -> None:
    model = recurrent("float[?, 3] input, float[2, ?, 3] state, int64 rate, float[2] scale", "float[?, 2] output")
    with pytest.raises(RecipeError, match="axis 1 of `state` is open") as caught:
        onward.prepare(model, **SGD, constants=CONSTANTS | {"state": "zeros"})
    assert "`--batch-axis state=1`" in caught.value.hint
    onward.prepare(model, **SGD, constants=CONSTANTS | {"state": "zeros"}, batch_axis={"state": 1})


LINEAR = """<ir_version: 3, opset_import: ["": 13]> g (float[N, 4] x) => (float[N, 3] y)
    <float[4, 3] w = {1, 0.5, 0, -1, 0.3, 0.2, 0.7, -0.4, 0.9, 0.1, 0.2, 0.3}> { y = MatMul(x, w) }"""


@pytest.mark.parametrize("fault", ["initializer that is no input", "negative sizes", "output of another shape"])
def test_what_onnxruntime_runs_is_trained_with_a_remark(tmp_path: Path, fault: str) -> None:
    """The checker warns about a fault that ONNX Runtime takes, and training is as without it."""
    model, sound = onnx.parser.parse_model(LINEAR), onnx.parser.parse_model(LINEAR)
    sound.ir_version = 8
    model.ir_version = 3 if fault.startswith("initializer") else 8
    if fault.startswith("negative"):
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = -1
    if fault.startswith("output"):
        model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=7)
    assert {f.code for f in onward.check(model)} == {"OW118" if fault.startswith("negative") else "OW117"}
    data = {"x": arrays()["state"].reshape(SAMPLES, 6)[:, :4], "target": arrays()["input"]}
    settings = {"loss": "mse", "optimizer": "sgd:lr=0.1", **QUIET}
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        run = onward.train(model, data, run=tmp_path / "run", **settings)
    expected = onward.train(sound, data, run=tmp_path / "sound", **settings)
    arrays_of = [r.load_last().graph.initializers["w"].const_value.numpy() for r in (run, expected)]
    np.testing.assert_array_equal(*arrays_of)
    text = " ".join(str(remark.message) for remark in remarks)
    assert ("taken as open" in text) is fault.startswith("negative")
    assert ("`y` is declared as [N,3,7], and computed as [N,3]" in text) is fault.startswith("output")
    proto = run.load_last().to_proto()
    results = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": data["x"]})
    np.testing.assert_allclose(results[0], data["x"] @ arrays_of[0], rtol=1e-5)


def test_sizes_that_follow_the_inputs_are_open_though_an_output_states_those_of_an_example(tmp_path: Path) -> None:
    """As of exports with dynamic axes of the inputs alone: ONNX Runtime warns and runs them."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (float[1, 1, H, W] x) => (float[1, 1, 4, 4] y) <float[1, 1, 1, 1] w = {0.5}> {
            double = Conv(x, w)
            y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(double)
        }""")
    rng = np.random.default_rng(3)
    data = {"x": rng.normal(size=(4, 1, 6, 6)).astype("f"), "target": rng.normal(size=(4, 1, 3, 3)).astype("f")}
    with pytest.warns(UserWarning, match=r"`y` is declared as \[.*4,4\], but the sizes of axes \[2, 3\] follow"):
        run = onward.train(model, data, loss="mse", run=tmp_path / "run", epochs=1, quiet=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    predicted = np.concatenate([session.run(None, {"x": x[None]})[0] for x in data["x"]])
    (loss,) = [event["loss"] for event in run.read_log() if event["event"] == "epoch"]
    np.testing.assert_allclose(loss, ((predicted - data["target"]) ** 2).mean(), rtol=1e-5)


def test_a_sequence_as_input_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
        g (seq(float[N, 4]) xs) => (float[N, 3] y)
        <float[4, 3] w = {1, 0.5, 0, -1, 0.3, 0.2, 0.7, -0.4, 0.9, 0.1, 0, 1}>
        { x = ConcatFromSequence<axis = 0>(xs) y = MatMul(x, w) }""")
    with pytest.raises(UnsupportedError, match=r"input `xs` is a sequence\(float32\)"):
        onward.train(model, {"xs": arrays()["state"]}, loss="mse", run=tmp_path / "run")
