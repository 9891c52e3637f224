"""Entire training as one plain ONNX model: what `onward train` does, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from commands import run as command
from models import digits_mlp, small_cnn
from runs import RECIPE, digits
from web_runtime import node_modules, run_node
from whole_runs import (
    CASES,
    CE,
    EARLY,
    FINISHED,
    NOT_FINITE,
    Results,
    WholeRun,
    assert_close,
    check_same,
    gan_case,
    javascript,
    tokens,
    trained,
    write_for_javascript,
)

import onward
from onward.build import Builder, Names
from onward.errors import DataError, RecipeError, UnknownNameError, UnsupportedError
from onward.lowering.run.data import shuffled_rows
from onward.training.data.views import Order


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_train_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    whole = case.whole()
    results = whole(case.data, 3, validation=case.held_out, seed=5)
    check_same(whole, results, case.trained(tmp_path, 3, seed=5))
    assert results.outputs[whole.contract["stopped"]] == FINISHED
    pieces = whole.in_pieces(case.data, 3, 4, validation=case.held_out, seed=5)
    for output, array in results.outputs.items():
        np.testing.assert_array_equal(array, pieces.outputs[output], err_msg=output)


def test_a_gan_takes_turns_with_the_noise_it_is_given(tmp_path: Path) -> None:
    case = gan_case()
    whole = case.whole()
    results = whole(case.data | case.drawn(range(2), 3), 2, seed=3, validation=case.measured_with(3))
    check_same(whole, results, case.trained(tmp_path, 2, seed=3))
    assert whole.contract["noise"] == ["z", "validation/z"] and whole.position(results)["step"] == 4


# ---- how it ends -----------------------------------------------------------------------------------------------------


def test_it_stops_early_and_stays_so(tmp_path: Path) -> None:
    training = onward.prepare(digits_mlp(8), **CE, optimizer="sgd:lr=3")  # which is too much
    data, held_out = digits(40), digits(20, seed=1)
    options = {"batch_size": 16, "patience": 2, "monitor": "loss"}
    whole = WholeRun(training, validation=True, **options)
    results = whole(data, 50, validation=held_out)
    check_same(whole, results, trained(training, data, tmp_path, validation=held_out, epochs=50, **options))
    assert results.outputs["run/stopped"] == EARLY and 2 <= whole.position(results)["epoch"] < 50
    again = whole(data, 50, validation=held_out, carried=results.carried)
    assert again.outputs["run/stopped"] == EARLY and not again.outputs["loss"].size
    for name, array in again.carried.items():
        np.testing.assert_array_equal(array, results.carried[name])


def test_a_loss_that_is_not_finite_is_not_learned_from(tmp_path: Path) -> None:
    training = onward.prepare(digits_mlp(8), **CE, optimizer="sgd:lr=1e18")
    data = digits(80)
    whole = WholeRun(training, batch_size=8)
    results = whole(data, 3)
    with pytest.raises(onward.errors.TrainingError, match="the loss of step"):
        trained(training, data, tmp_path, batch_size=8, epochs=3)
    check_same(whole, results, onward.Run(tmp_path / "run"))
    assert results.outputs["run/stopped"] == NOT_FINITE and np.isfinite(results.outputs["loss"]).all()
    assert results.outputs["loss"].size > 1  # so that there are steps to be made again
    pieces = whole.in_pieces(data, 3, 2)
    for name, array in results.outputs.items():
        np.testing.assert_array_equal(pieces.outputs[name], array, err_msg=name)


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["onnxruntime", "numpy"])
def test_the_order_of_samples_is_that_of_train(engine: str) -> None:
    names, integer = ("count", "seed", "epoch"), ir.TensorType(ir.DataType.INT64)
    given = [ir.Value(name=name, type=integer, shape=ir.Shape([1] * (name != "count"))) for name in names]
    graph = ir.Graph(given, [], nodes=[], opset_imports={"": 21}, name="order")
    op = Builder(graph, opset=21, names=Names(names))
    graph.outputs.append(shuffled_rows(op, *map(op, given)).value)
    compute = onward.engines.function(onward.Model(ir.Model(graph, ir_version=10)), engine=engine)
    for count in (1, 2, 3, 15, 16, 17, 1000, 12345):
        for seed, epoch in ((0, 0), (7, 1), (2**53, 12), (2**64 - 1, 3)):
            numbers = {"seed": np.array([seed], np.uint64).view(np.int64), "epoch": np.array([epoch])}
            (rows,) = compute({"count": np.array(count), **numbers}).values()
            np.testing.assert_array_equal(rows, Order(count, seed, epoch)(np.arange(count)))


@pytest.mark.parametrize("options", [{"last": "drop"}, {"last": "pad"}, {"shuffle": False}], ids=str)
def test_batches_are_those_of_train(options: dict[str, Any], tmp_path: Path) -> None:
    training, data = onward.prepare(digits_mlp(8), **RECIPE), digits(45)
    whole = WholeRun(training, batch_size=16, **options)
    check_same(whole, whole(data, 2), trained(training, data, tmp_path, batch_size=16, epochs=2, **options))


@pytest.mark.parametrize("last", ["keep", "pad"])
def test_a_model_for_one_size_of_batch(last: str, tmp_path: Path) -> None:
    """What does not fill a batch is left out of training, and of validation data nothing is."""
    proto = digits_mlp(8)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 16
    training, data, held_out = onward.prepare(proto, **RECIPE), digits(40), digits(37, seed=1)
    whole = WholeRun(training, validation=True, last=last)
    run = trained(training, data, tmp_path, validation=held_out, epochs=2, last=last)
    check_same(whole, whole(data, 2, validation=held_out), run)


def test_amounts_are_measured_within_rounding(tmp_path: Path) -> None:
    training = onward.prepare(digits_mlp(8), loss="mse", optimizer="adam:lr=1e-2")
    data, held_out = ({"image": of["image"], "target": of["image"][:, :10]} for of in (digits(40), digits(21, seed=1)))
    whole = WholeRun(training, validation=True, batch_size=16, metrics=["mae", "rmse"])
    results = whole(data, 3, validation=held_out)
    run = trained(training, data, tmp_path, validation=held_out, epochs=3, batch_size=16, metrics=["mae", "rmse"])
    measured = [event for event in run.log if event["event"] == "validation"]
    _check_close(results, measured, "mae", "rmse")
    assert results.outputs["epoch/validation/loss"].tolist() == [event["loss"] for event in measured]


def _check_close(results: Results, measured: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        found = results.outputs[f"epoch/validation/{name}"]
        np.testing.assert_allclose(found, [event[name] for event in measured], rtol=1e-14)


def test_means_over_classes_are_measured_within_rounding(tmp_path: Path) -> None:
    training, names = (
        onward.prepare(digits_mlp(8), loss="cross_entropy:ignore_index=-100"),
        ["precision", "recall", "f1"],
    )
    data, held_out = digits(40), digits(70, seed=1)
    held_out["labels"][::4] = -100
    whole = WholeRun(training, validation=True, batch_size=16, metrics=names)
    run = trained(training, data, tmp_path, validation=held_out, epochs=3, batch_size=16, metrics=names)
    measured = [event for event in run.log if event["event"] == "validation"]
    _check_close(whole(data, 3, validation=held_out), measured, *names)


def test_decisions_and_ignored_labels_count_as_they_do_in_train(tmp_path: Path) -> None:
    data, held_out = digits(40), digits(21, seed=1)
    held_out["labels"][::4] = -100
    training = onward.prepare(digits_mlp(8), loss="cross_entropy:ignore_index=-100")
    whole = WholeRun(training, validation=True, batch_size=16)
    run = trained(training, data, tmp_path / "a", validation=held_out, epochs=2, batch_size=16)
    check_same(whole, whole(data, 2, validation=held_out), run)
    data, held_out = (
        {"image": of["image"], "target": (of["image"][:, :10] > 0).astype(np.float32)} for of in (data, held_out)
    )
    training, names = onward.prepare(digits_mlp(8), loss="bce_with_logits"), ["accuracy", "f1"]
    whole = WholeRun(training, validation=True, batch_size=16, metrics=names)
    run = trained(training, data, tmp_path / "b", validation=held_out, epochs=2, batch_size=16, metrics=names)
    check_same(whole, whole(data, 2, validation=held_out), run)


def test_classes_along_the_last_axis(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
      bigrams (int64[N, T] tokens) => (float[N, T, 32] logits) { logits = Gather(table, tokens) }"""
    proto = onnx.parser.parse_model(text)
    table = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    training = onward.prepare(proto, loss="cross_entropy:axis=-1", optimizer="adam:lr=0.5")
    options = {"batch_size": 8, "metrics": ["accuracy", "top_k:k=3"]}
    data, held_out = ({"tokens": of["tokens"], "labels": (of["tokens"] + 1) % 32} for of in (tokens(30), tokens(9)))
    whole = WholeRun(training, validation=True, **options)
    results = whole(data, 3, validation=held_out)
    check_same(whole, results, trained(training, data, tmp_path, validation=held_out, epochs=3, **options))
    assert whole.position(results)["best"] > 0.5


# ---- elsewhere -------------------------------------------------------------------------------------------------------


SLOWER = [pytest.param("mlp", engine, marks=pytest.mark.slow) for engine in ("jax", "tensorflow")]


@pytest.mark.parametrize(("name", "engine"), [*((n, e) for n in CASES for e in ("numpy", "torch")), *SLOWER])
def test_every_engine_runs_it(name: str, engine: str) -> None:
    if engine != "numpy":
        pytest.importorskip(engine)
    case = CASES[name]()

    def compute(model: onward.Model) -> Any:
        return onward.engines.function(model, engine=engine)

    on_runtime, elsewhere = (
        whole(case.data, 2, validation=case.held_out) for whole in (case.whole(), case.whole(compute))
    )
    for output, array in on_runtime.outputs.items():
        assert_close(output, elsewhere.outputs[output], array)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    training = onward.prepare(digits_mlp(8), **RECIPE)
    with pytest.raises(RecipeError, match="`batch_size` works with the part `run` only"):
        onward.lower(training, batch_size=4)
    with pytest.raises(UnsupportedError, match="`auc` cannot be computed in the graph"):
        onward.lower(training, part="run", validation=True, metrics="auc")
    with pytest.raises(UnknownNameError, match="the step has no input `z` for noise"):
        onward.lower(training, part="run", noise="z")
    with pytest.raises(RecipeError, match="`patience` needs validation data"):
        onward.lower(training, part="run", patience=2)
    proto = digits_mlp(8)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 16
    with pytest.raises(DataError, match="takes batches of 16, not of 8"):
        onward.lower(onward.prepare(proto, **RECIPE), part="run", batch_size=8)


# ---- the command line, and other languages ---------------------------------------------------------------------------


def test_the_command_writes_it_with_its_contract(tmp_path: Path) -> None:
    onward.prepare(digits_mlp(8), **RECIPE).save(tmp_path / "training.onnx")
    options = [
        "--validation",
        "--batch-size",
        "8",
        "--last",
        "drop",
        "--no-shuffle",
        "--patience",
        "3",
        "--metric",
        "top_k:k=2",
    ]
    command("lower", str(tmp_path / "training.onnx"), "--part", "run", *options, "-o", str(tmp_path / "train.onnx"))
    written = onward.load(tmp_path / "train.onnx")
    settled = {"batch_size": 8, "last": "drop", "shuffle": False, "patience": 3, "metrics": ["top_k:k=2"]}
    made = onward.lower(tmp_path / "training.onnx", part="run", validation=True, **settled)  # type: ignore[arg-type]
    assert written.to_proto() == made.to_proto()
    assert json.loads((tmp_path / "train.json").read_text()) == json.loads(written.metadata["train.lowered"])


@pytest.mark.slow
def test_the_javascript_of_the_page_trains_in_webassembly(tmp_path: Path) -> None:
    training = onward.prepare(small_cnn(4), **RECIPE, augment="flip", ema=0.9)
    data, held_out = digits(70, flat=False), digits(33, flat=False, seed=1)
    whole = WholeRun(training, validation=True, batch_size=16)
    write_for_javascript(tmp_path, whole, data | {f"validation/{k}": v for k, v in held_out.items()})
    (tmp_path / "node_modules").symlink_to(node_modules())
    printed = [line.split() for line in run_node(tmp_path, javascript()).splitlines()]
    losses = np.array([float(number) for _, *numbers in printed for number in numbers])
    np.testing.assert_allclose(losses, whole(data, 10, validation=held_out).outputs["loss"], atol=1e-5)
