"""Runs: what goes in, and what comes out."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import digits_mlp, small_cnn
from onnx import numpy_helper
from runs import QUIET, RECIPE, Arrays, accuracy, digits, outputs, state

import onward
from onward.errors import DataError, InvalidModelError, RecipeError, TrainingError, UnsupportedError
from onward.training.api import find_lr, resume, train
from onward.training.run import Run

# ---- the main job ----------------------------------------------------------------------------------------------------


def test_a_run_makes_a_better_model(folder: Path) -> None:
    data, held_out = digits(400), digits(100, seed=1)
    run = train(digits_mlp(), data, validation=held_out, epochs=8, run="run", **RECIPE, **QUIET)
    events = [e for e in run.read_log() if e["event"] == "validation"]
    assert len(events) == 9 and events[0]["step"] == 0
    best = max(events, key=lambda e: e["accuracy"])
    assert best["accuracy"] > events[0]["accuracy"] + 0.2
    assert accuracy(run.load_best(), held_out) == pytest.approx(best["accuracy"])
    assert accuracy(run.load_last(), held_out) == pytest.approx(run.read_results()["accuracy"])
    steps = [e for e in run.read_log() if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 8 * 13 + 1)) and steps[-1]["samples"] == 8 * 400
    assert run.read_progress()["epoch"] == 8 and run.read_log()[-1]["reason"] == "finished"
    assert sorted(p.name for p in run.path.iterdir()) == [
        ".lock", "best.onnx", "config.yaml", "last.onnx", "log.jsonl", "original.onnx", "training.onnx",
    ]  # fmt: skip


def test_the_loss_of_validation_is_that_of_onnx_runtime(folder: Path) -> None:
    data = digits(50)
    run = train(digits_mlp(), digits(), validation=data, run="run", **RECIPE, **QUIET)
    logits = outputs(run.load_last(), data["image"]).astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(1))
    assert run.read_results()["loss"] == pytest.approx(
        np.mean(log_sum - logits[np.arange(50), data["labels"]]), rel=1e-5
    )


@pytest.mark.parametrize(
    ("loss", "targets", "hint"),
    [
        ("bce_with_logits", {"target": np.full((96, 10), 255, np.float32)}, "targets from 0 to 1"),
        ("bce:scale=0.5", {"target": np.full((96, 10), 255, np.float32)}, "targets from 0 to 1"),
        ("nll", {"labels": digits()["labels"]}, "`--loss cross_entropy`"),
    ],
)
def test_a_negative_loss_that_cannot_be_negative_stops_the_run(
    folder: Path, loss: str, targets: Arrays, hint: str
) -> None:
    model = digits_mlp()
    model.graph.node[-1].output[0] = "scores"
    last = "Softmax" if loss == "nll" else "Sigmoid" if loss.startswith("bce:") else "Identity"
    model.graph.node.append(onnx.helper.make_node(last, ["scores"], ["logits"]))
    with warnings.catch_warnings(), pytest.raises(TrainingError, match="cannot be negative") as caught:
        warnings.simplefilter("ignore")
        train(model, {"image": digits()["image"], **targets}, loss=loss, run="run", **QUIET)
    assert hint in (caught.value.hint or "")


def test_ctc_without_lengths_in_the_data(folder: Path) -> None:
    """The lengths are the full width and the labels before their padding: the same run as with them."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N,T,8] x) => (float[N,T,5] y) <float[8,5] w = {W}> { y = MatMul(x, w) }""".replace(
        "W", ",".join(f"{x:.3f}" for x in np.random.default_rng(0).normal(size=40))
    ))  # fmt: skip
    labels = np.array([[1, 2, 0, 0], [3, 3, 4, -1], [2, 0, 0, 0], [4, 1, 2, 3]] * 2)
    data = {"x": np.random.default_rng(1).normal(size=(8, 9, 8)).astype(np.float32), "labels": labels}
    lengths = {"input_lengths": np.full(8, 9), "target_lengths": np.array([2, 3, 1, 4] * 2)}
    options: dict[str, object] = {"loss": "ctc:logits=true,batch_first=true", "optimizer": "sgd:lr=0.1", **QUIET}
    runs = [
        train(model, {**data, **{name: lengths[name] for name in names}}, run=f"run{i}", **options)
        for i, names in enumerate([[*lengths], [], ["input_lengths"], ["target_lengths"]])
    ]
    weights = [state(run)["w"] for run in runs]
    for other in weights[1:]:
        np.testing.assert_array_equal(other, weights[0])


def test_without_validation_the_best_model_is_the_last(folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", **RECIPE, **QUIET)
    assert run.path.parent == Path("runs") and run.path.name.startswith("digits-")
    assert run.load_best().to_proto() == run.load_last().to_proto() == onward.load(run.path / "last.onnx").to_proto()
    assert train("digits.onnx", "digits.npz", **RECIPE, **QUIET).path != run.path


def test_early_stopping(folder: Path) -> None:
    data = {"image": digits()["image"], "labels": np.zeros(96, np.int64)}
    other = {"image": digits()["image"], "labels": np.ones(96, np.int64)}
    settings = {"validation": other, "monitor": "loss", "patience": 2, **RECIPE, **QUIET}
    run = train(digits_mlp(), data, epochs=20, run="run", **settings)
    assert run.read_log()[-1]["reason"] == "early_stopping" and run.read_progress()["epoch"] == 2
    assert run.load_best().to_proto().graph == onward.load(digits_mlp()).to_proto().graph
    assert resume(run, data, validation=other, quiet=True).progress["epoch"] == 2


def test_a_first_result_that_is_no_number_is_no_epoch_to_wait_for(folder: Path) -> None:
    held_out = {"image": digits(8)["image"], "labels": np.zeros(8, np.int64)}  # one class has no curve
    settings = {"validation": held_out, "metrics": "auc", "patience": 2, **RECIPE, **QUIET}
    run = train(digits_mlp(), digits(), epochs=5, run="run", **settings)
    assert run.read_progress()["epoch"] == 2 and not (run.path / "best.onnx").exists()
    assert run.load_best().to_proto() == run.load_last().to_proto()


def test_a_new_run_of_a_training_model_begins_anew(folder: Path) -> None:
    first = train(digits_mlp(), digits(), epochs=2, run="first", **RECIPE, **QUIET)
    again = train("first/training.onnx", digits(), epochs=2, run="again", **QUIET)
    assert again.read_progress()["epoch"] == 2 and again.read_progress()["step"] == first.read_progress()["step"] == 6
    assert state(again)["step"] == 12


def test_streams(folder: Path) -> None:
    data = digits()

    def batches(epoch: int) -> Iterator[Arrays]:
        for at in range(0, 90, 20 + 10 * epoch):
            yield {name: array[at : at + 20] for name, array in data.items()}

    run = train(digits_mlp(), batches, epochs=2, run="run", **RECIPE, **QUIET)
    assert run.read_progress()["step"] == 5 + 3 and run.read_log()[0]["steps_per_epoch"] is None
    with pytest.raises(DataError, match="came from Python"):
        resume(run)
    assert resume(run, batches, epochs=3, quiet=True).progress["epoch"] == 3
    assert run.read_config()["epochs"] == 3


def test_a_torch_data_loader(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    data = digits(40)
    rows = torch.utils.data.TensorDataset(torch.tensor(data["image"]), torch.tensor(data["labels"]))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    run = train(digits_mlp(), loader, run="run", **RECIPE, **QUIET)
    plain = train(digits_mlp(), data, shuffle=False, batch_size=16, run="plain", **RECIPE, **QUIET)
    assert all(np.array_equal(a, b) for a, b in zip(state(run).values(), state(plain).values(), strict=True))


# ---- sizes of batches ------------------------------------------------------------------------------------------------


def fixed(size: int, *, through: str = "") -> onnx.ModelProto:
    """The classifier for batches of one size; `through` is what happens to its output."""
    model = digits_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = size
    if through:
        model.graph.node[-1].output[0] = "raw"
        graph = onnx.parser.parse_graph(f"g (float[N,10] raw) => (float[N,10] logits) {{ {through} }}")
        model.graph.node.extend(graph.node)
    return model


RESHAPED = """s = Constant<value_ints: ints = [1, 2, 5]>() r = Reshape(raw, s)
              t = Constant<value_ints: ints = [1, -1]>() logits = Reshape(r, t)"""
MIXED = "m = ReduceMean<keepdims: int = 1>(raw) logits = Sub(raw, m)"


@pytest.mark.parametrize("through", ["", RESHAPED])
def test_a_model_for_one_sample_is_trained_with_many(through: str, folder: Path) -> None:
    original = fixed(1, through=through)
    run = train(original, digits(), validation=digits(50), run="run", **RECIPE, **QUIET)
    free = train(digits_mlp(), digits(), validation=digits(50), run="free", **RECIPE, **QUIET)
    assert run.read_progress()["step"] == 3 and run.read_results() == pytest.approx(free.results)
    assert [d.dim_value for d in run.load_best().to_proto().graph.input[0].type.tensor_type.shape.dim] == [1, 64]
    assert run.load_best().to_proto().graph.node == onward.load(original).to_proto().graph.node


def test_a_model_that_cannot_take_more(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = train(fixed(1, through=MIXED), digits(12), run="run", threads=1, **RECIPE)
    assert run.read_progress()["step"] == 12
    told = capfd.readouterr().err
    assert told.count("works for batches of 1 only: `logits` of a sample depends on the other samples") == 1
    assert told.count("each update accumulates 12 batches of 1, with the gradient of a batch of 12") == 1
    for loss in ("ce:ignore_index=0", "ce:reduction=sum", "ce:weight=[1,1,1,1,1,1,1,1,1,2]"):
        with pytest.raises(UnsupportedError, match=r"batches of 1 only.* is not a mean over samples"):
            train(fixed(1, through=MIXED), digits(), batch_size=8, **{**RECIPE, "loss": loss}, **QUIET)
    with pytest.raises(UnsupportedError, match="batches of 1 only"):
        train(fixed(1, through=MIXED), digits(), batch_size=8, accumulate=2, **RECIPE, **QUIET)


ALONE = """n = Constant<value_ints: ints = [1, 10]>() flat = Reshape(raw, n) s = Squeeze(flat)
           a = Constant<value_ints: ints = [0]>() logits = Unsqueeze(s, a)"""


def test_accumulated_batches_of_one_have_the_gradient_of_the_batch(folder: Path) -> None:
    """The model computes what its free form does; Squeeze without axes keeps it from larger batches."""
    recipe = {"loss": "cross_entropy", "optimizer": "adamw:lr=1e-2", "clip": "norm:0.1"}
    settings: dict[str, Any] = dict(shuffle=False, epochs=3, batch_size=8, validation=digits(20, seed=1), **QUIET)
    alone = train(fixed(1, through=ALONE), digits(40), run="alone", **recipe, **settings)
    free = train(digits_mlp(), digits(40), run="free", **recipe, **settings)
    assert alone.read_results() == pytest.approx(free.read_results(), rel=1e-5)
    for name, array in state(free).items():
        if name in free.load_best().graph.initializers:
            np.testing.assert_allclose(state(alone)[name], array, rtol=1e-4, atol=1e-6)


def test_a_last_batch_that_is_not_full(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, data, held_out = fixed(32), digits(80), digits(50, seed=1)
    run = train(model, data, validation=held_out, epochs=2, run="run", threads=1, **RECIPE)
    assert run.read_progress()["step"] == 4 and run.read_progress()["samples"] == 128
    assert capfd.readouterr().err.count("16 rows of each epoch do not fill a batch of 32 and are dropped") == 1
    best = max(e["accuracy"] for e in run.read_log() if e["event"] == "validation")
    assert accuracy_in_batches(run.load_best(), held_out, 32) == pytest.approx(best)
    assert train(model, data, last="pad", run="padded", **RECIPE, **QUIET).progress["step"] == 3
    with pytest.raises(DataError, match="takes batches of 32, not of 16"):
        train(onward.prepare(model, **RECIPE), data, batch_size=16, **QUIET)


def recurrent(inputs: str, result: str = "batch, 2") -> onnx.ModelProto:
    """A model of samples and a state."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        recurrent ({inputs}) => (float[{result}] output)
        <float[2, 2] weight = {{1.0, 2.0, 3.0, 4.0}}, int64[1] axis = {{0}}>
        {{ sum = ReduceSum<keepdims = 0> (state, axis) both = Add (input, sum) output = MatMul (both, weight) }}"""
    )


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("float[a, b, 2] input, float[b, a, 2] state", "`b` is axis 0 of `state` and axis 1 of `input`"),
        ("float[B, 2] input, float[2, batch, 2] state", "`batch` is axis 1 of `state`, and samples are axis 0"),
        ("float[1, 2] input, float[2, 1, 2] state", "axis 0 is 1 for `input` but 2 for `state`"),
        ("float[B, 2] input, float[2, N, 2] state", "`state` takes 2 rows per batch, and `input` any number"),
        ("float[?, 2] input, float[2, ?, 2] state", "`state` takes 2 rows per batch, and `input` any number"),
        ("float[?, 2] input, float[frames, ?, 2] state", "axis 0 of `state` is `frames`, which is not a batch"),
    ],
)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_batch_that_may_not_be_axis_0_is_refused(folder: Path, inputs: str, said: str, batch_size: Any) -> None:
    """No size of batch is right for the layers of a state, and none is hinted at."""
    model = recurrent(inputs, "D, E")
    rng = np.random.default_rng(0)
    data = {"input": rng.normal(size=(8, 2)), "state": rng.normal(size=(8, 2, 2)), "target": rng.normal(size=(8, 2))}
    data = {name: array.astype(np.float32) for name, array in data.items()}
    settings = {"loss": "mse", "optimizer": "sgd:lr=0.1", "trainable": "weight"}
    for given in (data, lambda: iter([data])):
        with pytest.raises(DataError) as caught:
            train(model, given, batch_size=batch_size, **settings, **QUIET)
        assert said in str(caught.value) and "--batch-axis" in str(caught.value.hint)
    with pytest.raises(DataError, match=re.escape(said)):
        onward.lower(onward.prepare(model, **settings), part="run", batch_size=batch_size)
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_columns_of_different_lengths_name_the_axis_of_rows() -> None:
    with pytest.raises(DataError) as caught:
        train(digits_mlp(), {"image": np.zeros((64, 8)), "labels": np.zeros(8, int), "other": np.zeros(8)}, loss="ce")
    assert "rows are axis 0, but those of `image` may be axis 1: transpose it" in str(caught.value.hint)


def test_a_stream_with_a_last_batch_that_does_not_fit(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = digits(80)

    def batches() -> Iterator[Arrays]:
        yield from ({name: array[at : at + 32] for name, array in data.items()} for at in (0, 32, 64))

    run = train(fixed(32), batches, validation=batches, epochs=2, run="run", threads=1, **RECIPE)
    assert run.read_progress()["step"] == 4
    assert capfd.readouterr().err.count("dropping batches that do not have 32 samples, such as one with 16") == 1


def accuracy_in_batches(model: onward.Model, data: Arrays, size: int) -> float:
    rows = np.arange(-(-len(data["labels"]) // size) * size) % len(data["labels"])
    logits = [outputs(model, data["image"][part]) for part in rows.reshape(-1, size)]
    return float(np.mean(np.concatenate(logits)[: len(data["labels"])].argmax(1) == data["labels"]))


def test_accumulation_is_a_larger_batch(folder: Path) -> None:
    settings = {"shuffle": False, "loss": "cross_entropy", "optimizer": "sgd:lr=0.1", **QUIET}
    small = train(digits_mlp(), digits(), batch_size=8, accumulate=4, run="small", **settings)
    large = train(digits_mlp(), digits(), batch_size=32, run="large", **settings)
    for name, array in state(large).items():
        np.testing.assert_allclose(state(small)[name], array, rtol=1e-5, atol=1e-6)


# ---- the model that comes out ----------------------------------------------------------------------------------------


def without_weights(model: onnx.ModelProto, names: set[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.name in names:
            tensor.raw_data = b""
            tensor.ClearField("float_data")
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    kept = [entry for entry in model.metadata_props if not entry.key.startswith("onward.")]  # what it says it is
    del copy.metadata_props[:]
    copy.metadata_props.extend(kept)
    return copy


TRAINED = {f"{layer}.{kind}" for layer in ("conv", "bn", "fc") for kind in ("weight", "bias")}
TRAINED |= {"bn.running_mean", "bn.running_var"}


def test_only_weights_change(folder: Path) -> None:
    given = small_cnn()
    given.producer_name, given.doc_string, given.model_version = "somebody", "a model", 7
    given.metadata_props.add(key="license", value="free")
    given.graph.node[0].doc_string = "the first"
    onnx.save(given, "model.onnx")
    run = train("model.onnx", "data.npz", run="run", **RECIPE, **QUIET)
    made = onnx.load(run.path / "last.onnx")
    assert without_weights(made, TRAINED) == without_weights(given, TRAINED)
    new = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    for tensor in given.graph.initializer:
        assert np.array_equal(new[tensor.name], numpy_helper.to_array(tensor)) == (tensor.name not in TRAINED)
    assert all(np.array_equal(new[name], state(run)[name]) for name in TRAINED)


def test_old_models_stay_old(folder: Path) -> None:
    given = digits_mlp()
    given.opset_import[0].version = 11
    run = train(given, digits(), run="run", **RECIPE, **QUIET)
    assert run.model.opset > 11
    made, names = run.load_last().to_proto(), {tensor.name for tensor in given.graph.initializer}
    assert made.opset_import[0].version == 11
    assert without_weights(made, names) == without_weights(onward.load(given).to_proto(), names)


def test_weights_in_nodes(folder: Path) -> None:
    given = digits_mlp()
    tensors = {tensor.name: tensor for tensor in given.graph.initializer}
    given.graph.initializer.remove(tensors["fc2.weight"])
    node = onnx.helper.make_node("Constant", [], ["fc2.weight"], value=tensors["fc2.weight"])
    given.graph.node.insert(0, node)
    run = train(given, digits(), run="run", **RECIPE, **QUIET)
    made = run.load_last().to_proto().graph.node[0]
    assert made.op_type == "Constant"
    assert np.array_equal(numpy_helper.to_array(made.attribute[0].t), state(run)["fc2.weight"])


def test_weights_in_other_files(folder: Path) -> None:
    onnx.save(digits_mlp(256), "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=512)
    before = Path("weights.bin").read_bytes()
    settings = {"epochs": 2, "save_every": 0, "validation": 0.2, **RECIPE, **QUIET, "freeze": "fc1*"}
    run = train("model.onnx", digits(), run="run", **settings)
    assert Path("weights.bin").read_bytes() == before
    assert len(list(run.path.glob("*.data"))) <= 6  # one per model, and the one before of those that were replaced
    plain = train(digits_mlp(256), digits(), run="plain", **settings)
    names = {tensor.name for tensor in digits_mlp().graph.initializer}
    for name in ("best.onnx", "last.onnx"):
        made, wanted = onnx.load(run.path / name), onnx.load(plain.path / name)
        arrays = [{t.name: numpy_helper.to_array(t).tobytes() for t in m.graph.initializer} for m in (made, wanted)]
        assert arrays[0] == arrays[1] and arrays[0].keys() == names
    assert np.array_equal(state(resume(run, digits(), epochs=3, quiet=True))["step"], 9)


def test_averages_are_what_is_validated_and_exported(folder: Path) -> None:
    held_out = digits(50, seed=1)
    run = train(digits_mlp(), digits(), epochs=3, validation=held_out, run="run", ema=0.9, **RECIPE, **QUIET)
    made = {t.name: numpy_helper.to_array(t) for t in run.load_last().to_proto().graph.initializer}
    averages = state(run)
    assert all(np.array_equal(array, averages[f"ema/{name}"]) for name, array in made.items())
    assert not np.array_equal(made["fc1.weight"], averages["fc1.weight"])
    assert accuracy(run.load_last(), held_out) == pytest.approx(run.read_results()["accuracy"])
    plain = train(digits_mlp(), digits(), epochs=3, run="plain", **RECIPE, **QUIET)
    assert all(np.array_equal(averages[name], array) for name, array in state(plain).items())


def test_a_new_head(folder: Path) -> None:
    data = digits()
    data["labels"] %= 3
    run = train(digits_mlp(), data, run="run", new_head="classes=3", **RECIPE, **QUIET)
    assert outputs(run.load_best(), data["image"]).shape == (96, 3)


def test_adapters_are_merged(folder: Path) -> None:
    run = train(digits_mlp(), digits(), run="run", lora="rank=2,targets=*", **RECIPE, **QUIET)
    given, made = onward.load(digits_mlp()).to_proto(), run.load_last().to_proto()
    names = {"fc1.weight", "fc2.weight"}
    assert without_weights(made, names) == without_weights(given, names)
    images = digits()["image"]
    np.testing.assert_allclose(
        outputs(run.load_last(), images), outputs(onward.transform.strip(run.model), images), rtol=1e-4, atol=1e-5
    )


# ---- learning rates --------------------------------------------------------------------------------------------------


def test_find_lr(folder: Path) -> None:
    model = onward.load(digits_mlp())
    before = model.to_proto()
    found = find_lr(model, digits(), loss="cross_entropy", optimizer="sgd", highest=10)
    assert model.to_proto() == before and not list(folder.glob("run*"))
    assert found.rates[0] == 1e-6 and len(found.rates) == len(found.losses) <= 100
    assert found.suggested == pytest.approx(found.rates[int(np.argmin(found.losses))] / 10) and found.suggested > 1e-3
    usual = train(model, digits(), run="usual", loss="cross_entropy", optimizer=f"sgd:lr={found.suggested}", **QUIET)
    timid = train(model, digits(), run="timid", loss="cross_entropy", optimizer="sgd:lr=1e-5", **QUIET)
    assert last_loss(usual) < last_loss(timid)


def test_find_lr_keeps_the_proportions_of_groups(folder: Path) -> None:
    def losses(rate: float, *groups: str, lowest: float = 1e-4) -> tuple[float, ...]:
        recipe = {"loss": "cross_entropy", "optimizer": f"sgd:lr={rate}", "groups": groups}
        return find_lr(digits_mlp(), digits(), steps=20, lowest=lowest, highest=lowest * 100, **recipe).losses

    alone, twice = losses(0.1), losses(0.1, "fc2.*:lr=0.2")
    assert losses(0.1, "fc2.*:lr=0.1") == alone != twice
    assert losses(1e-3, "fc2.*:lr=2e-3") == pytest.approx(twice, rel=1e-6)
    assert losses(0.1, "*:lr=1", lowest=1e-5) == pytest.approx(losses(1, lowest=1e-4), rel=1e-6)
    with pytest.raises(RecipeError, match="rate of 0 cannot rise"):
        losses(0)


def last_loss(run: Run) -> float:
    return float([e["loss"] for e in run.read_log() if e["event"] == "step"][-1])


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("cosine:steps=5", "the schedule ends at step 5 of 12: the learning rate is 0 from there"),
        ("polynomial:steps=2,every=3", "the schedule ends at step 6 of 12"),
        ("cosine:steps=12", None),
        ("cosine:steps=5,min=1e-3", None),
        ("linear:steps=5,start_factor=0.1,end_factor=1", None),
        ("cosine_restarts:period=5", None),
    ],
)
def test_a_schedule_that_ends_before_the_run(schedule: str, said: str | None, folder: Path) -> None:
    run = train("digits.onnx", "digits.npz", **RECIPE, schedule=schedule, epochs=2, batch_size=16, run="run", **QUIET)
    notes = [event["text"] for event in run.read_log() if event["event"] == "note"]
    assert (notes == []) if said is None else said in notes[0]
    if said is not None:
        hint = notes[0].rpartition("`steps=")[2].rstrip("`")
        longer = schedule.replace(schedule.partition("steps=")[2].partition(",")[0], hint, 1)
        settings = {**RECIPE, "schedule": longer, "epochs": 2, "batch_size": 16}
        assert "note" not in {event["event"] for event in train("digits.onnx", "digits.npz", **settings, **QUIET).log}


def test_a_schedule_of_a_file_that_is_trained_on(folder: Path) -> None:
    """Its counter is where it is, and accumulation makes fewer updates."""
    model = onward.prepare("digits.onnx", **RECIPE, schedule="cosine:steps=10", accumulate=2)
    first = train(model, "digits.npz", epochs=2, batch_size=16, run="first", **QUIET)  # 6 updates
    second = train(first.model, "digits.npz", epochs=2, batch_size=16, run="second", **QUIET)
    notes = [[event["text"] for event in run.read_log() if event["event"] == "note"] for run in (first, second)]
    assert not notes[0] and "the schedule ends at step 10 of 12" in notes[1][0]


# ---- what cannot be trained ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
def test_functions_that_are_nested_deep(engine: str, folder: Path) -> None:
    """The inliner of `onnx` goes 100 deep; ours inlines them."""
    model, count = digits_mlp(), 400
    opsets = [onnx.helper.make_opsetid("", model.opset_import[0].version), onnx.helper.make_opsetid("deep", 1)]
    for number in range(count):
        inner = ("Identity", "") if number == count - 1 else (f"F{number + 1}", "deep")
        body = onnx.helper.make_node(inner[0], ["x"], ["y"], domain=inner[1])
        model.functions.append(onnx.helper.make_function("deep", f"F{number}", ["x"], ["y"], [body], opsets))
    model.opset_import.append(opsets[1])
    first = model.graph.node[0]
    model.graph.node.insert(0, onnx.helper.make_node("F0", [first.input[0]], ["same"], domain="deep"))
    model.graph.node[1].input[0] = "same"
    with pytest.raises(UnsupportedError, match="nested too deep for onnx") as caught:
        train(model, "digits.npz", **RECIPE, engine=engine, run="run", quiet=True)
    assert "onward inline" in (caught.value.hint or "")
    train(onward.transform.inline(model), "digits.npz", **RECIPE, engine=engine, run="run", quiet=True)


def test_an_input_without_a_type(folder: Path) -> None:
    model = digits_mlp()
    model.graph.input[0].ClearField("type")
    with pytest.raises(InvalidModelError, match="the input `image` has no type"):
        train(model, "digits.npz", **RECIPE, engine="numpy", run="run", quiet=True)


def test_too_little_memory(folder: Path) -> None:
    """A model of 20 KB is read where there is no room for 2 GiB; what does not fit is said with a hint."""
    resource = pytest.importorskip("resource")
    program = """if True:
        import sys, numpy, onward, onward.training.data
        from resource import RLIMIT_AS, setrlimit
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        setrlimit(RLIMIT_AS, (used + (512 << 20),) * 2)
        onward.load("digits.onnx")
        try:
            onward.training.data.open_data({"x": range(1 << 30)})
        except onward.errors.OutOfMemoryError as error:
            print(error)
    """
    if not Path("/proc/self/statm").exists() or resource is None:
        pytest.skip("needs /proc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0 and "not enough memory to read the data\nhint: close" in done.stdout, done.stderr
