"""`evaluate` against scikit-learn and against the validation of a run; what files say about themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sklearn.metrics as sk
from commands import failed, run
from models import digits_mlp, small_cnn
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from runs import QUIET, RECIPE, digits

import onward
from onward.errors import DataError, RecipeError, UnknownNameError, UnsupportedError
from onward.recipe.description import Description

Arrays = dict[str, np.ndarray]


def linear(*dims: int | str, out: int, end: str | None = None, seed: int = 0) -> onnx.ModelProto:
    """A model of `y = x w`, with an activation at its end."""
    weights = np.random.default_rng(seed).normal(size=(dims[-1], out)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y" if end is None else "z"])]
    nodes += [helper.make_node(end, ["z"], ["y"])] if end is not None else []
    sizes = {"x": dims[-1], "y": out}
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [*dims[:-1], size]) for n, size in sizes.items()]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def scores(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return x @ numpy_helper.to_array(model.graph.initializer[0])


def evaluate(*arguments: Any, **options: Any) -> onward.Evaluation:
    return onward.evaluate(*arguments, **options, quiet=True, threads=1)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(210, 4)).astype(np.float32)


@pytest.mark.parametrize("end", [None, "Softmax", "LogSoftmax"])
def test_classes(end: str | None) -> None:
    model = linear("N", 4, out=3, end=end)
    z = scores(model, X).astype(np.float64)
    y = np.where(RNG.random(210) < 0.4, RNG.integers(0, 2, 210), z.argmax(1))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    made = evaluate(model, (X, y), task="classification", classes=["ant", "bee", "cat"])
    report = sk.classification_report(y, z.argmax(1), target_names=["ant", "bee", "cat"], output_dict=True)
    assert made.task == "classification" and made.rows == 210
    assert made.metrics["log_loss"] == pytest.approx(sk.log_loss(y, p), rel=1e-5)
    assert made.metrics["auc"] == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), rel=1e-5)
    assert np.array_equal(made.confusion, sk.confusion_matrix(y, z.argmax(1)))
    for name, row in made.per_class.items():
        assert row == pytest.approx({column.replace("f1-score", "f1"): v for column, v in report[name].items()})
    worst = np.argsort(np.log(p[np.arange(210), y]))[:10]
    assert [entry["row"] for entry in made.worst] == worst.tolist()
    assert made.worst[0]["label"] == ["ant", "bee", "cat"][y[worst[0]]]
    assert json.dumps(made.to_json())


def test_decisions() -> None:
    model = linear("N", 4, out=3)
    z = scores(model, X)
    y = (z + RNG.normal(size=z.shape) * 2 > 0).astype(np.float32)
    made = evaluate(model, (X, y), loss="bce_with_logits")
    assert made.task == "multi-label"
    assert made.metrics["exact_match"] == pytest.approx(sk.accuracy_score(y, z > 0))
    assert made.metrics["f1"] == pytest.approx(sk.f1_score(y, z > 0, average="micro"))
    assert made.metrics["loss"] == pytest.approx(made.metrics["log_loss"], rel=1e-5)
    assert np.array_equal(made.confusion, sk.multilabel_confusion_matrix(y, z > 0))
    f1 = sk.f1_score(y, z > 0, average=None)
    assert [row["f1"] for row in made.per_class.values()] == pytest.approx(f1.tolist())
    one = evaluate(linear("N", 4, out=1, end="Sigmoid"), (X, y[:, :1]), metrics=["auc", "f1"])
    p = scores(linear("N", 4, out=1), X)
    assert one.task == "binary"
    assert one.metrics == pytest.approx({"auc": sk.roc_auc_score(y[:, 0], p), "f1": sk.f1_score(y[:, 0], p[:, 0] > 0)})


def test_margins_are_no_probabilities() -> None:
    y = np.where(RNG.random((210, 1)) < 0.5, 1, -1).astype(np.float32)
    made = evaluate(linear("N", 4, out=1), (X, y), loss="hinge")
    assert made.metrics["auc"] == pytest.approx(sk.roc_auc_score(y, scores(linear("N", 4, out=1), X)))
    assert not {"log_loss", "ece", "best_threshold"} & made.metrics.keys()
    raw = onward.predict(linear("N", 4, out=1), (X,), loss="hinge", quiet=True)
    assert raw.arrays().keys() == {"row", "y"} and raw.notes == ["the loss `hinge` gives no probabilities: raw outputs"]


def test_positions_and_ignored_labels() -> None:
    model, x = linear("N", "T", 4, out=5), RNG.normal(size=(40, 7, 4)).astype(np.float32)
    chosen = scores(model, x).argmax(-1)
    y = np.where(RNG.random(chosen.shape) < 0.3, 2, chosen)
    y[RNG.random(chosen.shape) < 0.2] = -100
    made = evaluate(model, (x, y), loss="ce:axis=-1,ignore_index=-100", batch_size=16)
    counts = y >= 0
    assert made.task == "token-classification" and made.rows == 40
    assert made.metrics["mcc"] == pytest.approx(sk.matthews_corrcoef(y[counts], chosen[counts]))
    assert np.array_equal(made.confusion, sk.confusion_matrix(y[counts], chosen[counts]))


def test_masks() -> None:
    weights = RNG.normal(size=(4, 3, 1, 1)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "masks",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 6, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 6, 5])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = RNG.normal(size=(9, 3, 6, 5)).astype(np.float32)
    chosen = np.einsum("nchw,oc->nohw", x, weights[:, :, 0, 0]).argmax(1)
    y = np.where(RNG.random(chosen.shape) < 0.4, 1, chosen)
    y[:, 0] = 255
    made, counts = evaluate(model, (x, y), loss="ce:ignore_index=255"), y != 255
    assert made.task == "segmentation"
    assert made.metrics["iou"] == pytest.approx(sk.jaccard_score(y[counts], chosen[counts], average="macro"))
    assert made.metrics["dice"] == pytest.approx(sk.f1_score(y[counts], chosen[counts], average="macro"))
    iou = sk.jaccard_score(y[counts], chosen[counts], average=None).tolist()
    assert [row["iou"] for row in made.per_class.values()] == pytest.approx(iou)


def test_amounts_before_and_after() -> None:
    """The interval holds the change, and is as wide as the standard error of the differences of rows says."""
    model = linear("N", 4, out=1)
    y = (scores(model, X) + RNG.normal(size=(210, 1))).astype(np.float32)
    made = evaluate(model, (X, y), loss="mse", against=linear("N", 4, out=1, seed=1))
    wanted = sk.mean_squared_error(y, scores(model, X))
    assert made.metrics["loss"] == pytest.approx(made.metrics["mse"], rel=1e-5) == pytest.approx(wanted, rel=1e-5)
    assert made.residuals["median"] == pytest.approx(np.median(scores(model, X) - y), abs=1e-6)
    before = np.square(scores(linear("N", 4, out=1, seed=1), X) - y)
    rows = np.square(scores(model, X) - y) - before
    change = made.changes["mse"]
    assert change.before == pytest.approx(before.mean()) and change.change == pytest.approx(rows.mean(), rel=1e-5)
    assert change.low is not None and change.high is not None and change.low < change.change < change.high
    assert (change.high - change.low) / 2 == pytest.approx(1.96 * rows.std() / 210**0.5, rel=0.15)
    assert set(made.changes) == set(made.metrics) and made.changes["r2"].low is not None


def test_fixed_batches_and_engines() -> None:
    model = linear(8, 4, out=3, end="Softmax")
    y = scores(model, X[:21]).argmax(1)
    y[:5] = 0
    for engine in ("onnxruntime", "numpy"):
        made = onward.evaluate(model, (X[:21], y), metrics="accuracy", engine=engine, quiet=True)
        assert made.rows == 21 and made.metrics["accuracy"] == np.mean(scores(model, X[:21]).argmax(1) == y)
    with pytest.raises(DataError, match="batch size of the model is fixed to 8"):
        evaluate(model, (X, np.zeros(210, int)), batch_size=16)


def test_a_run_is_measured_as_it_measured_itself(tmp_path: Path) -> None:
    train, test = digits(), digits(40, seed=1)
    run = onward.train(digits_mlp(), train, validation=test, epochs=2, run=tmp_path / "run", **RECIPE, **QUIET)
    for which, model in (("last", run.load_last()), ("best", run.path / "best.onnx")):
        says, made = Description.read(onward.load(model)), evaluate(run, test, which=which)
        assert says.metrics == pytest.approx({name: made.metrics[name] for name in ("loss", "accuracy")}, rel=1e-6)
        assert evaluate(model, test).metrics == made.metrics
    training = run.load_training()
    assert evaluate(training, test).metrics == evaluate(run, test, which="last").metrics


# ---- the file says what it is ----------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of pictures in which a bright column tells the class, and a run that was trained on them."""
    monkeypatch.chdir(tmp_path)
    for part, count in (("train", 4), ("test", 2)):
        for number in range(10):
            folder = tmp_path / "photos" / part / f"class {number}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = RNG.integers(0, 60, (11, 13), dtype=np.uint8)
                pixels[:, number] = 250
                Image.fromarray(pixels).save(folder / f"{i}.png")
    onnx.save(small_cnn(), "cnn.onnx")
    onward.train("cnn.onnx", "photos/train", preprocess="resize:size=8x8 scale", epochs=1, run="run", **RECIPE, **QUIET)
    return tmp_path


def test_pictures(pictures: Path) -> None:
    says = Description.read(onward.load("run/last.onnx"))
    assert says.task == "classification" and says.loss == "logits=cross_entropy"
    assert says.classes == tuple(f"class {i}" for i in range(10))
    assert says.preprocess == {"image": "resize:size=8x8 scale"} and says.columns["labels"] == ["label"]
    made = evaluate("run/last.onnx", "photos")
    assert made.rows == 20 and "photos: takes `test`" in made.notes
    assert made.worst[0]["file"].startswith("photos/test/class ")
    output = run("evaluate", "run", "--data", "photos/test", "--json").stdout
    assert json.loads(output)["metrics"] == pytest.approx(made.metrics, nan_ok=True)
    assert "class 3" in run("evaluate", "run", "--data", "photos/test").stdout

    (pictures / "photos" / "test" / "zebra").mkdir()
    Image.new("L", (9, 9)).save("photos/test/zebra/1.png")
    message, _ = failed("evaluate", "run", "--data", "photos/test")
    assert message == "column `label` has the class `zebra`, which is not in run"
    message, hint = failed("evaluate", "cnn.onnx", "--data", "photos/test", "--task", "classification")
    assert message == "the data have 11 classes, the model 10, and it does not name them" and "--class" in hint


def test_color_images_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels that the preprocessing moves, and a resize: as in training, and as PyTorch resizes."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 255, (11, 13, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    nodes = [helper.make_node("Flatten", ["image"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["logits"])]
    weights = RNG.normal(size=(192, 2)).astype(np.float32)
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])
    graph = helper.make_graph(nodes, "colors", [image], [logits], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "net.onnx")
    settings: dict[str, Any] = {"preprocess": "resize:size=8 scale channels_first", "validation": "photos"}
    last = onward.train("net.onnx", "photos", loss="ce", run="run", epochs=1, **settings, **QUIET).load_last()
    made = evaluate(last, "photos")
    validated = json.loads(last.ir.metadata_props["onward.metrics"])
    assert made.metrics["loss"] == pytest.approx(validated["loss"], rel=1e-5)
    predictions = onward.predict(last, "photos", raw=True, quiet=True).arrays()
    files = predictions["file"].tolist()
    pixels = np.stack([np.asarray(Image.open(file), np.float32) for file in files])
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255, size=(8, 8), mode="bilinear", antialias=True
    )
    trained = last.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    assert np.allclose(predictions["logits"], resized.flatten(1).numpy() @ trained, atol=1e-4)
    Image.fromarray(RNG.integers(0, 255, (9, 20, 3), dtype=np.uint8)).save("photos/a/other size.png")
    settings = {"raw": True, "quiet": True}
    of_run, of_file = (onward.predict(m, "photos", which="last", **settings) for m in ("run", "run/training.onnx"))
    assert np.allclose(of_run.arrays()["logits"], of_file.arrays()["logits"], atol=1e-4) and not of_file.notes
    stripped = onward.transform.strip(onward.load("run/training.onnx"))  # its graph has the operations
    assert Description.read(stripped).preprocess == {}
    shown = run("describe", "run/last.onnx").stdout
    assert "preprocess  {" in shown and "task        classification" in shown
    joined = onward.pipelines.join(onward.pipelines.make("resize:size=8 scale channels_first", last), last)
    assert Description.read(joined).preprocess == {} and Description.read(joined).task == "classification"
    assert np.array_equal(onward.predict(stripped, files[0], **settings).arrays()["logits"], predictions["logits"][:1])


def test_losses_of_models_with_a_fixed_batch_size() -> None:
    y = RNG.integers(0, 3, 209)
    z = scores(linear(4, 4, out=3), X[:209]).astype(np.float64)
    expected = np.log(np.exp(z).sum(1)) - z[np.arange(209), y]
    weights = np.array([1, 2, 3])[y]
    made = evaluate(linear(4, 4, out=3), (X[:209], y), loss="ce:weight=[1,2,3]")
    assert made.metrics["loss"] == pytest.approx((weights * expected).sum() / weights.sum(), rel=1e-5)


def test_mean_losses_of_many_rows() -> None:
    """Weights and labels that do not count are not alike in all parts of the data."""
    x, model = RNG.normal(size=(9000, 4)).astype(np.float32), linear("N", 4, out=2)
    y = np.sort(RNG.integers(0, 2, 9000))
    p = np.exp(scores(model, x).astype(np.float64))
    p /= p.sum(1, keepdims=True)
    made = evaluate(model, (x, y), loss="ce:weight=[1,9]").metrics
    assert made["loss"] == pytest.approx(sk.log_loss(y, p, sample_weight=np.array([1, 9])[y]), rel=1e-5)
    y[:5000] = y[::3] = -100
    made = evaluate(model, (x, y), loss="ce:ignore_index=-100").metrics
    assert made["loss"] == pytest.approx(sk.log_loss(y[y >= 0], p[y >= 0], labels=[0, 1]), rel=1e-5)


def test_files_with_some_of_the_classes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": X[:, 0], "churn": np.where(X[:, 0] > 0, "yes", "no").astype(object)})
    made = onward.train(
        linear("N", 1, out=1), frame, loss="bce_with_logits", columns={"target": "churn"}, run=tmp_path / "run", **QUIET
    ).load_last()
    yes = frame[frame.churn == "yes"]
    weight = made.graph.initializers["w"].const_value.numpy().item()  # type: ignore[union-attr]
    assert evaluate(made, yes).metrics["recall"] == np.mean(weight * yes.x > 0)
    with pytest.raises(DataError, match="has the class `maybe`"):
        evaluate(made, frame.assign(churn=["yes", "no", "maybe"] * 70))


def test_further_training_keeps_the_numbers_of_classes(tmp_path: Path) -> None:
    """Names in another order than the alphabet's stay with their numbers, also if the new data lack some."""
    pandas = pytest.importorskip("pandas")
    y = np.array(["cat", "ant", "bee"])[scores(linear("N", 4, out=3), X).argmax(1)]
    frame = pandas.DataFrame({**{f"x{i}": X[:, i] for i in range(4)}, "animal": y})
    settings: dict[str, Any] = {"loss": "ce", "columns": {"x": [f"x{i}" for i in range(4)], "labels": "animal"}}
    model = linear("N", 4, out=3)
    made = onward.train(
        model, frame, run=tmp_path / "run", classes=["cat", "ant", "bee"], **settings, **QUIET
    ).load_last()
    again = onward.train(made, frame[frame.animal != "ant"], run=tmp_path / "more", **settings, **QUIET).load_last()
    assert Description.read(again).classes == ("cat", "ant", "bee")
    assert evaluate(again, frame).metrics["accuracy"] > 0.9


def test_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that was counted is in the training model, one in a file is named; tokens are no class names."""
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (int64[N, 3] ids) => (float[N, 2] y) <int64[1] ax = {1}>
        { v = Gather (e, ids) y = ReduceSum <keepdims = 0> (v, ax) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(9, 2)).astype(np.float32), "e"))
    lines = [f"{text} {i},{mood}" for i in range(20) for text, mood in (("a good day", "pos"), ("a sad night", "neg"))]
    Path("texts.csv").write_text("\n".join(["text,mood", *lines]))
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "good", "day", "sad", "night"]))
    settings: dict[str, Any] = {"loss": "ce", "optimizer": "adam:lr=0.1", "epochs": 9, **QUIET}
    counted = onward.train(model, "texts.csv", preprocess="tokenize:words,vocabulary=9,length=3", **settings, run="a")
    with pytest.raises(UnsupportedError, match="preprocessing that is not in the file") as caught:
        evaluate(counted, "texts.csv")
    assert "`training.onnx` of the run" in str(caught.value.hint)
    assert evaluate("a/training.onnx", "texts.csv").metrics["accuracy"] == 1
    words = "tokenize:words,vocabulary=vocab.txt,length=3,pad=[PAD],unknown=[UNK]"
    made = evaluate(onward.train(model, "texts.csv", preprocess=words, **settings, run="b"), "texts.csv")
    assert made.metrics["accuracy"] == 1 and list(made.per_class) == ["neg", "pos"]


def test_samples_on_another_axis(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[T, N, 3] x, float[1] scale) => (float[N, 2] y)
        <int64[1] ax = {0}> { s = ReduceSum <keepdims = 0> (x, ax) q = MatMul (s, w) y = Mul (q, scale) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(RNG.normal(size=(3, 2)).astype(np.float32), "w"))
    x = RNG.normal(size=(50, 4, 3)).astype(np.float32)
    data, options = (
        {"x": x, "labels": (x.sum((1, 2)) > 0).astype(int)},
        {"batch_axis": {"x": 1}, "constants": {"scale": [2.0]}},
    )
    made = onward.train(model, data, loss="ce", run=tmp_path / "run", **options, **QUIET).load_last()
    assert [str(value.shape) for value in made.inputs] == ["[T,N,3]", "[1]"]
    z = 2 * x.sum(1) @ made.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    assert evaluate(made, data).metrics["accuracy"] == np.mean(z.argmax(1) == data["labels"])


def test_files_of_ultralytics_are_understood(tmp_path: Path) -> None:
    model = linear("N", 4, out=3, end="Softmax")
    for key, text in {"names": "{0: 'ant', 1: 'bee', 2: 'cat'}", "task": "classify"}.items():
        model.metadata_props.add(key=key, value=text)
    y = scores(model, X).argmax(1)
    assert list(evaluate(model, (X, y)).per_class) == ["ant", "bee", "cat"]
    made = onward.train(model, (X, y), loss="z=cross_entropy", run=tmp_path / "run", **QUIET).load_last()
    assert evaluate(made, (X, y)).metrics.keys() > {"loss", "accuracy"}  # of `z`, which is no output
    assert Description.read(made).classes == ("ant", "bee", "cat") and "names" in made.metadata
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["images"], ["y"])],
        "mean",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, "height", "width"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3, 1, 1])],
    )
    means = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    means.metadata_props.add(key="imgsz", value="[8, 8]")
    Image.new("RGB", (20, 10), (255, 51, 0)).save(tmp_path / "a.png")
    made = onward.predict(means, tmp_path / "a.png", quiet=True)
    assert made.arrays()["y"].reshape(3) == pytest.approx([1, 0.2, 0]) and "resize:size=[8,8] scale" in made.notes[-1]
    model.metadata_props[1].value = "detect"
    with pytest.raises(RecipeError, match="the task of the model is `detect`"):
        evaluate(model, (X, y))


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=digits()["image"])
    with pytest.raises(DataError, match=r"x\.npz has no labels: no column for `labels`"):
        evaluate(digits_mlp(), tmp_path / "x.npz", loss="ce")
    with pytest.raises(RecipeError, match="the model does not say what its outputs are"):
        evaluate(digits_mlp(), digits())
    with pytest.raises(UnknownNameError, match="unknown loss `cross_entrpy`"):
        evaluate(digits_mlp(), digits(), loss="cross_entrpy")
    with pytest.raises(DataError, match="label 10 in row 3 of the data is out of range"):
        evaluate(digits_mlp(), {**digits(4), "labels": np.array([0, 1, 2, 10])}, loss="ce")
    with pytest.raises(DataError, match="2 class names for the 10 classes of `logits`"):
        evaluate(digits_mlp(), digits(), loss="ce", classes=["a", "b"])
