"""From data to the batches of a run: splits, classes, validation data, data frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from marks import needs
from models import digits_mlp, small_cnn
from runs import QUIET, RECIPE, digits, outputs, state
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

import onward
from onward.errors import DataError, UnknownNameError, UnsupportedError
from onward.training.api import find_lr, resume, train
from onward.training.data import in_parts, open_data, split
from onward.training.run import Run

# ---- labels and heads ------------------------------------------------------------------------------------------------


def test_a_head_for_more_classes_than_there_are_is_mentioned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, said = digits(), "the model has 10 classes, but the data have 3; to replace the last layer:"
    few = {**data, "labels": data["labels"] % 3}
    train(digits_mlp(), few, run="few", **RECIPE)
    assert f'{said} `new_head="classes=3"` (`--new-head classes=3`)' in capsys.readouterr().err
    text = "\n".join(
        ["labels," + ",".join(f"p{i}" for i in range(64)), *(f"{'abc'[i % 3]}" + ",0" * 64 for i in range(9))]
    )
    (folder / "few.csv").write_text(text)
    train(digits_mlp(), "few.csv", run="named", **RECIPE)
    assert said in capsys.readouterr().err
    train(digits_mlp(), few, new_head="classes=3", run="new", **RECIPE)
    train(digits_mlp(), data, run="all", **RECIPE)
    assert "10 classes, but" not in capsys.readouterr().err


def test_one_hot_labels_are_recognized(folder: Path) -> None:
    data = digits()
    one_hot = {"image": data["image"], "labels": np.eye(10, dtype=np.float32)[data["labels"]]}
    for columns in (one_hot, {"image": data["image"], "kind": one_hot["labels"].astype(np.int64)}):
        with pytest.raises(DataError) as caught:
            train(digits_mlp(), columns, **RECIPE, **QUIET)
        assert "`ce:target=probabilities`" in (caught.value.hint or "")
    train(digits_mlp(), one_hot, **{**RECIPE, "loss": "ce:target=probabilities"}, **QUIET)


def test_labels_beyond_the_head_name_their_row(folder: Path) -> None:
    data = digits()
    wrong = {**data, "labels": np.where(np.arange(96) == 40, 10, data["labels"])}
    with pytest.raises(
        DataError, match="label 10 in row 40 of the data is out of range: input `labels` has 10 classes"
    ):
        train(digits_mlp(), wrong, **RECIPE, **QUIET)


# ---- folders of parts ------------------------------------------------------------------------------------------------


def pictures(folder: Path, **classes: int) -> None:
    """So many pictures of each class, of 8 by 8."""
    from PIL import Image

    rng = np.random.default_rng(len(folder.parts[-1]))
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / name / f"{number}.png")


@needs("PIL")
def test_a_folder_with_train_and_val_is_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, count in {"train": 6, "val": 3, "test": 2}.items():
        pictures(folder / "photos" / part, cat=count, dog=count)
    (folder / "photos" / "readme.txt").write_text("photos")
    recipe = {**RECIPE, "preprocess": "scale"}
    run = train(small_cnn(), "photos", run="run", batch_size=4, threads=1, **recipe)
    assert run.read_config()["data"] == str(folder / "photos" / "train")
    assert run.read_config()["validation"] == str(folder / "photos" / "val")
    assert run.read_config()["classes"] == ["cat", "dog"]
    assert run.read_log()[0]["steps_per_epoch"] == 3
    said = "photos: trains on `train/`, validates with `val/`, leaves `test/` for an evaluation"
    assert said in capsys.readouterr().err
    alike = train(small_cnn(), "photos/train", validation="photos/val", run="alike", batch_size=4, **recipe, **QUIET)
    assert alike.results == run.read_results()
    share = train(small_cnn(), "photos", validation=0.5, run="share", batch_size=4, **recipe)
    assert share.config["validation"] == 0.5 and share.log[0]["steps_per_epoch"] == 2
    assert "ignores `val/`, since other validation data are given" in capsys.readouterr().err
    assert find_lr(small_cnn(), "photos", steps=10, **recipe).rates
    (folder / "photos").rename(folder / "moved")
    assert resume("run", "moved", epochs=2, quiet=True).config["validation"] == str(folder / "moved" / "val")


@needs("PIL")
def test_parts_that_are_not_clear_are_refused(folder: Path) -> None:
    pictures(folder / "a" / "train", cat=2, dog=2)
    pictures(folder / "a" / "val", cat=2, cow=2)
    with pytest.raises(DataError, match="has the class `cow`, which is not in the training data"):
        train(small_cnn(), "a", **RECIPE, preprocess="scale", **QUIET)
    with pytest.raises(DataError, match="a holds several datasets: `train/` and `val/`") as caught:
        train(small_cnn(), "a/train", validation="a", **RECIPE, preprocess="scale", **QUIET)
    assert caught.value.hint == "--data a/train --validation a/val"
    for names, problem in {
        ("val", "test"): "none of them for training",
        ("train", "val", "dev"): "two of them for the same purpose",
        ("train", "val", "more"): "and also `more/`",
    }.items():
        for name in names:
            pictures(folder / "-".join(names) / name, cat=1, dog=1)
        with pytest.raises(DataError, match=problem):
            train(small_cnn(), "-".join(names), **RECIPE, preprocess="scale", **QUIET)
    pictures(folder / "vehicles", car=2, train=2)  # these are classes
    run = train(small_cnn(), "vehicles", run="vehicles-run", **RECIPE, preprocess="scale", **QUIET)
    assert run.read_config()["classes"] == ["car", "train"]
    pictures(folder / "flat", train=2, val=2)
    with pytest.raises(DataError, match="the images in flat/train have no classes"):
        train(small_cnn(), "flat", **RECIPE, preprocess="scale", **QUIET)


def test_files_may_be_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in {"train-0": 12, "train-1": 8, "validation": 6, "test": 4}.items():
        (folder / "digits").mkdir(exist_ok=True)
        np.savez(folder / "digits" / f"{name}.npz", **{key: array[:rows] for key, array in digits().items()})
    run = train(digits_mlp(), "digits", run="run", batch_size=4, **RECIPE)
    assert run.read_log()[0]["steps_per_epoch"] == 5
    assert [Path(path).name for path in run.read_config()["data"]] == ["train-0.npz", "train-1.npz"]
    assert Path(run.read_config()["validation"]).name == "validation.npz"
    assert "trains on 2 files `train-0.npz` ..., validates with `validation.npz`" in capsys.readouterr().err
    for part in ("train", "validation"):  # as a `DatasetDict` is saved
        (folder / "saved" / part).mkdir(parents=True)
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    assert in_parts("saved")[:2] == ("saved/train", "saved/validation")


# ---- stratified splits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
def test_strata_have_their_shares_as_in_scikit_learn(fraction: float) -> None:
    classes = np.repeat(np.arange(5), [100, 50, 33, 10, 2])
    np.random.default_rng(0).shuffle(classes)
    parts = split(open_data({"row": np.arange(len(classes)), "class": classes}), fraction, seed=3, strata=classes)
    taken = [part.take(np.arange(len(part))) for part in parts]
    np.testing.assert_array_equal(np.sort(np.concatenate([t["row"] for t in taken])), np.arange(len(classes)))
    held_out = round(len(classes) * fraction)
    theirs = train_test_split(classes, test_size=held_out, stratify=classes, random_state=0)[1]
    ours = np.bincount(taken[1]["class"], minlength=5)
    assert (
        ours.sum() == held_out and np.abs(ours - np.bincount(theirs, minlength=5)).max() <= 1
    )  # where rests are equal
    other = split(open_data({"row": np.arange(len(classes))}), fraction, seed=4, strata=classes)[1]
    assert set(other.take(np.arange(held_out))["row"]) != set(taken[1]["row"])
    assert parts[1].row(0) == f"row {taken[1]['row'][0]} of the data"


def held_out_labels(run: Run, data: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The labels that a run validates with."""
    seen: list[np.ndarray] = []
    from onward.training import loop

    def evaluate(engine: Any, batches: Any, measures: Any) -> dict[str, float]:
        seen.extend(batch["labels"][:count] for batch, count in batches)
        return {"loss": 0.0, "accuracy": 0.0}

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", evaluate)
        resume(run, data, epochs=run.read_progress()["epoch"] + 1, quiet=True)
    return np.concatenate(seen)


def test_runs_are_stratified_unless_that_is_not_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {**digits(100), "labels": np.repeat([0, 1], [90, 10])}
    runs = {wanted: train(digits_mlp(), data, validation=0.2, stratify=wanted, run=f"run-{wanted}", **RECIPE, **QUIET)
            for wanted in (None, True, False)}  # fmt: skip
    found = {wanted: np.bincount(held_out_labels(run, data, monkeypatch)) for wanted, run in runs.items()}
    assert found[None].tolist() == found[True].tolist() == [18, 2]
    at_random = split(open_data(data), 0.2)[1].take(np.arange(20))["labels"]
    assert found[False].tolist() == np.bincount(at_random).tolist() != [18, 2]


def test_what_cannot_be_stratified(folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32)
    data = {"image": x, "targets": np.zeros((20, 10), np.float32)}
    with pytest.raises(UnsupportedError, match="needs one class per row"):
        train(digits_mlp(), data, loss="mse", validation=0.2, stratify=True, **QUIET)
    assert train(digits_mlp(), data, loss="mse", validation=0.2, run="run", **QUIET).results


# ---- classes ---------------------------------------------------------------------------------------------------------


def table(name: str, kinds: list[str], labels: str = "labels") -> str:
    """A CSV file in which the kind of an animal can be seen in its first number."""
    header = ",".join([*(f"p{i}" for i in range(64)), labels])
    order = {"bee": 0, "cat": 1, "dog": 2, "eel": 3}
    rows = [",".join([str(float(order[kind])), *["0.5"] * 63, kind]) for kind in kinds]
    Path(name).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return name


def test_validation_data_have_the_classes_of_the_training_data(folder: Path) -> None:
    """Without its own `bee`, a `cat` would be number 0 in it."""
    training = table("train.csv", ["bee", "cat", "dog"] * 8)
    fewer = train(
        digits_mlp(), training, validation=table("fewer.csv", ["cat", "dog"] * 4), run="fewer", **RECIPE, **QUIET
    )
    arrays = {
        "image": np.array([[1.0, *[0.5] * 63], [2.0, *[0.5] * 63]] * 4, np.float32),
        "labels": np.array([1, 2] * 4),
    }
    scores = outputs(fewer.last, arrays["image"])
    assert fewer.results["loss"] == pytest.approx(
        log_loss(arrays["labels"], np.exp(scores) / np.exp(scores).sum(1, keepdims=True), labels=range(10)), rel=1e-5
    )
    assert fewer.config["classes"] == ["bee", "cat", "dog"]
    with pytest.raises(DataError, match="column `labels` has the class `eel`, which is not in the training data"):
        train(digits_mlp(), training, validation=table("more.csv", ["cat", "eel"]), **RECIPE, **QUIET)
    with pytest.raises(DataError, match="has class names, but numbers in the training data"):
        train(digits_mlp(), digits(), validation="fewer.csv", **RECIPE, **QUIET)
    with pytest.raises(DataError, match="column `labels` has numbers, but class names in the training data"):
        train(digits_mlp(), training, validation=arrays, **RECIPE, **QUIET)


def test_a_resumed_run_keeps_its_classes(folder: Path) -> None:
    train(digits_mlp(), table("train.csv", ["bee", "cat", "dog"] * 8), run="run", **RECIPE, **QUIET)
    table("train.csv", ["cat", "dog", "dog"] * 8)
    resume("run", epochs=2, data_changed=True, quiet=True)
    table("train.csv", ["cat", "dog", "eel"] * 8)
    with pytest.raises(DataError, match="`eel`, which is not in the configuration of the run"):
        resume("run", epochs=3, quiet=True)


def test_more_classes_than_the_model_knows(folder: Path) -> None:
    rows = [",".join(["0.5"] * 64 + [f"kind{i}"]) for i in range(11)]
    Path("train.csv").write_text(
        "\n".join([",".join([*(f"p{i}" for i in range(64)), "labels"]), *rows]), encoding="utf-8"
    )
    with pytest.raises(DataError, match="the data have 11 classes, but the model has 10") as caught:
        train(digits_mlp(), "train.csv", **RECIPE, **QUIET)
    assert "--new-head classes=11" in (caught.value.hint or "")
    assert (
        len(train(digits_mlp(), "train.csv", run="run", new_head="classes=11", **RECIPE, **QUIET).config["classes"])
        == 11
    )


class ClassLabel:
    """As that of `datasets`."""

    def __init__(self, *names: str):
        self.names = list(names)


class Hub:
    """What a `datasets.Dataset` does, as far as it is asked to."""

    def __init__(self, data: dict[str, np.ndarray]):
        self._data, self.features = data, {"labels": ClassLabel("bee", "cat"), "image": object()}

    def __len__(self) -> int:
        return len(self._data["labels"])

    def with_format(self, kind: str, columns: list[str] | None = None) -> Hub:
        return Hub({name: self._data[name] for name in columns or self._data})

    def __getitem__(self, indices: list[int]) -> dict[str, np.ndarray]:
        return {name: array[indices] for name, array in self._data.items()}


def test_names_of_classes_from_hugging_face(folder: Path) -> None:
    data = {**digits(20), "labels": np.arange(20) % 2}
    run = train(digits_mlp(), Hub(data), run="run", **RECIPE, **QUIET)
    assert run.read_config()["classes"] == ["bee", "cat"]


@needs("pyarrow")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_names_of_classes_in_files_of_hugging_face(kind: str, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"label": {"names": ["bee", "cat"], "_type": "ClassLabel"}, "x": {"dtype": "float32", "_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table_ = pa.table({"x": np.zeros(4, np.float32), "label": np.arange(4) % 2}).replace_schema_metadata(metadata)
    if kind == "parquet":
        pq.write_table(table_, "data.parquet")
    else:
        with pa.OSFile("data.arrow", "wb") as file, pa.ipc.new_stream(file, table_.schema) as writer:
            writer.write_table(table_)
    columns = open_data(f"data.{kind}").columns
    assert columns["label"].classes == ("bee", "cat") and columns["x"].classes is None


# ---- validation ------------------------------------------------------------------------------------------------------


def test_samples_that_fill_a_batch_do_not_count(folder: Path) -> None:
    model = digits_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 32
    through = "m = ReduceMean<keepdims: int = 1>(raw) z = Sub(m, m) logits = Add(raw, z)"  # it takes no other size
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.extend(
        onnx.parser.parse_graph(f"g (float[N,10] raw) => (float[N,10] logits) {{ {through} }}").node
    )
    held_out = digits(50, seed=1)
    run = train(onward.prepare(model, **RECIPE), digits(64), validation=held_out, run="run", **QUIET)
    free = train(digits_mlp(), digits(64), validation=held_out, run="free", batch_size=32, **RECIPE, **QUIET)
    assert run.read_results() == pytest.approx(free.results, rel=1e-5)


def test_validation_data_may_have_other_names(folder: Path) -> None:
    held_out = digits(40, seed=1)
    named = train(digits_mlp(), digits(), validation=held_out, run="named", **RECIPE, **QUIET)
    renamed = {"pixels": held_out["image"], "digit": held_out["labels"]}
    other = train(digits_mlp(), digits(), validation=renamed, run="other", **RECIPE, **QUIET)
    assert named.results == other.results


def test_validation_data_take_the_columns_of_the_training_data(folder: Path) -> None:
    """`columns` are not asked for again, where a column has a name that an input has, too."""
    data, held_out = digits(), digits(40, seed=1)
    wrong = np.zeros_like(held_out["image"])
    plain = train(digits_mlp(), data, validation=held_out, run="plain", **RECIPE, **QUIET)
    mapped = train(
        digits_mlp(),
        {"right": data["image"], "labels": data["labels"]},
        validation={"right": held_out["image"], "image": wrong, "labels": held_out["labels"]},
        run="mapped",
        **RECIPE,
        **QUIET,
    )
    assert mapped.results == plain.results


@pytest.mark.parametrize(
    ("columns", "hint"),
    [
        ({"image": "Pixel"}, "did you mean `pixels`? columns are `pixels` (float32[64]), `digit` (int64[])"),
        ({"image": "zzz"}, "columns are `pixels` (float32[64]), `digit` (int64[])"),
        ({"images": "pixels"}, "did you mean `image`"),
    ],
)
def test_near_columns_are_named(columns: dict[str, str], hint: str) -> None:
    data = {"pixels": digits()["image"], "digit": digits()["labels"]}
    with pytest.raises(UnknownNameError) as caught:
        train(digits_mlp(), data, columns=columns, **RECIPE, **QUIET)
    assert (caught.value.hint or "").startswith(hint)


def test_a_near_column_of_another_type_is_named() -> None:
    data = {"image": digits()["image"], "label": digits()["labels"].astype(np.float64)}
    with pytest.raises(DataError, match="no column can be input `labels`") as caught:
        train(digits_mlp(), data, **RECIPE, **QUIET)
    assert (
        caught.value.hint
        == "if `label` holds the labels, they are floats: convert them, as in `label.astype(np.int64)`"
    )


# ---- data frames -----------------------------------------------------------------------------------------------------


@needs("pandas")
def test_data_frames(folder: Path) -> None:
    import pandas as pd

    data = digits(40)
    kinds = np.array(["cat", "bee", "dog"], object)[data["labels"] % 3]
    frame = pd.DataFrame({f"p{i}": data["image"][:, i] for i in range(64)} | {"labels": kinds})
    frame.to_csv("data.csv", index=False)
    run = train(digits_mlp(), frame, validation=0.2, run="frame", **RECIPE, **QUIET)
    again = train(digits_mlp(), "data.csv", validation=0.2, run="file", **RECIPE, **QUIET)
    assert run.read_config()["classes"] == again.read_config()["classes"] == ["bee", "cat", "dog"]
    assert all(np.array_equal(a, b) for a, b in zip(state(run).values(), state(again).values(), strict=True))
    assert resume(run, frame, epochs=2, quiet=True).progress["epoch"] == 2


@needs("pandas")
def test_columns_of_data_frames() -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "row": [1, 2, 3],  # a data set has a method of that name
            "amount": pd.array([1, 2, 3], "Int16"),
            "gap": pd.array([1, None, 3], "Int64"),
            "share": pd.array([0.5, None, 1], "Float32"),
            "size": pd.Categorical(["small", "large", "small"], ["small", "large"]),
            "is_new": [True, False, True],
            "picture": [np.full((2, 2), i, np.uint8) for i in range(3)],
            "when": pd.to_datetime(["2026-01-01"] * 3),
        },
        index=[7, 8, 9],
    )
    data = open_data(frame)
    assert {name: str(column) for name, column in data.columns.items()} == {
        "row": "int64[]",
        "amount": "int16[]",
        "gap": "text[] (no value in row 1)",
        "share": "float32[]",
        "size": "int64[] (2 classes)",
        "is_new": "bool[]",
        "picture": "uint8[2, 2]",
        "when": f"text[] ({frame['when'].dtype})",
    }
    rows = data.take(np.array([2, 0]))
    assert rows["amount"].tolist() == [3, 1] and rows["size"].tolist() == [0, 0]
    assert data.columns["size"].classes == ("small", "large")
    np.testing.assert_array_equal(rows["picture"], np.stack([frame["picture"][9], frame["picture"][7]]))


@needs("pandas")
def test_a_data_frame_with_a_name_twice() -> None:
    import pandas as pd

    with pytest.raises(DataError, match="has 2 columns named `a`"):
        open_data(pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"]))
