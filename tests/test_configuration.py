"""Options, which are declared once, and the files that hold them."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import failed, run
from models import digits_mlp
from runs import QUIET

import onward
from onward.configuration import read_configuration
from onward.options import StepOptions, TrainOptions, options_of
from onward.training.config import read_settings

BASE = "model: digits.onnx\ndata: digits.npz\nloss: ce\nthreads: 1\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    rng = np.random.default_rng(0)
    np.savez("digits.npz", image=rng.random((32, 64), np.float32), labels=rng.integers(0, 10, 32))
    Path("run.yaml").write_text(BASE)
    return tmp_path


def weights(path: str) -> dict[str, bytes]:
    return {tensor.name: tensor.raw_data for tensor in onnx.load(path).graph.initializer}


# ---- declared once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind", "command"),
    [(onward.train, TrainOptions, "train"), (onward.prepare, StepOptions, "prepare")],
    ids=["train", "prepare"],
)
def test_an_option_is_wherever_options_are(function: object, kind: type, command: str) -> None:
    told = run(command, "--help").stdout
    for option in options_of(kind):
        assert option.name in inspect.signature(function).parameters
        assert f"- `{option.name}`: " in inspect.getdoc(function)
        assert all(flag in told for flag in option.flags), option.name


# ---- objects ---------------------------------------------------------------------------------------------------------

RECIPE = onward.Recipe(loss="ce", optimizer="sgd", lr=0.1, freeze=["fc1.bias"])
CONFIG = onward.TrainConfig(epochs=2, batch_size=8, validation=0.25)


def test_objects_say_what_their_fields_say_alone(folder: Path) -> None:
    onward.train("digits.onnx", "digits.npz", recipe=RECIPE, config=CONFIG, seed=3, run="objects", **QUIET)
    fields = RECIPE.changed() | CONFIG.changed()
    onward.train("digits.onnx", "digits.npz", **fields, seed=3, run="fields", **QUIET)
    onward.train(recipe=RECIPE, config="fields/config.yaml", run="file", **QUIET)
    assert weights("objects/training.onnx") == weights("fields/training.onnx") == weights("file/training.onnx")
    found = onward.cross_validate(
        "digits.onnx",
        "digits.npz",
        recipe=RECIPE,
        config=dataclasses.replace(CONFIG, validation=None, folds=2),
        **QUIET,
    )
    assert found.folds == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": 3}, "`train` is given `epochs` twice, once in `config`"),
        ({"freeze": []}, "`train` is given `freeze` twice, once in `recipe`"),
        ({"recipe": onward.Recipe(loss="ce", append=True)}, "`append` of a recipe has no effect in `train`"),
        ({"config": 3}, "`config` is `3`"),
    ],
)
def test_what_an_object_says_is_said_once(given: dict[str, object], said: str, folder: Path) -> None:
    with pytest.raises(onward.Error, match=re.escape(said)):
        onward.train("digits.onnx", "digits.npz", **{"recipe": RECIPE, "config": CONFIG, **given})


def test_objects_show_what_differs_from_defaults() -> None:
    assert repr(RECIPE) == "Recipe(loss='ce', optimizer='sgd', lr=0.1, freeze=['fc1.bias'])"
    assert repr(onward.TrainConfig()) == "TrainConfig()"
    for one in (RECIPE, CONFIG):
        assert pickle.loads(pickle.dumps(one)) == one != dataclasses.replace(one, seed=1)
    with pytest.raises(onward.Error, match="`epochs` is -1"):
        onward.TrainConfig(epochs=-1)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_run_writes_the_file_that_starts_another_like_it(folder: Path) -> None:
    flags = ["--optimizer", "adamw:lr=1e-3", "--group", "*.bias:lr=0", "--freeze", "fc1.bias", "--validation", "0.25"]
    more = ["--seed", "3", "--epochs", "2", "--clip", "0.5", "--map", "image=image", "--no-shuffle", "--ema", "0.5"]
    run("train", "digits.onnx", "--data", "digits.npz", "--loss", "ce", *flags, *more, "--run", "first", "-q")
    run("train", "--config", "first/config.yaml", "--run", "second", "-q")
    onward.train(config="first/config.yaml", run="third", **QUIET)
    assert weights("first/training.onnx") == weights("second/training.onnx") == weights("third/training.onnx")
    assert read_settings("first/config.yaml") == read_settings("second/config.yaml")
    assert Path(read_settings("first/config.yaml")["data"]).is_absolute()


def test_a_reset_is_started_again_as_it_was(folder: Path) -> None:
    onward.prepare("digits.onnx", loss="ce", init="normal", seed=5).save("training.onnx")
    onward.train("training.onnx", "digits.npz", reset=True, run="first", **QUIET)
    onward.train(config="first/config.yaml", run="second", **QUIET)
    assert weights("first/training.onnx") == weights("second/training.onnx")
    assert "seed" not in read_settings("first/config.yaml")


def test_what_is_given_beside_a_file_counts(folder: Path) -> None:
    Path("run.toml").write_text(
        'model = "digits.onnx"\ndata = "digits.npz"\nloss = "ce"\nepochs = 2\nshuffle = false\nrun = "named"\n'
    )
    run("train", "--config", "run.toml", "--epochs", "3", "--shuffle", "-q")
    found = read_settings("named/config.yaml")
    assert (found["epochs"], found["shuffle"], found["batch_size"]) == (3, True, 32)
    run("prepare", "digits.onnx", "--config", "named/config.yaml", "--optimizer", "sgd", "-o", "made.onnx")
    recipe = onward.load("made.onnx").step().fact("train.recipe")
    assert (recipe["loss"], recipe["optimizer"]) == ("ce", "sgd")


def test_numbers_as_people_write_them(folder: Path) -> None:
    Path("run.yaml").write_text(
        BASE + "optimizer: {name: adamw, lr: 1e-3}\nloss_scale: 1e2\nlr_decay: 5e-1\nrun: made\n"
    )
    run("train", "--config", "run.yaml", "-q")
    recipe = onward.load("made/training.onnx").step().fact("train.recipe")
    assert (recipe["optimizer"]["lr"], recipe["loss_scale"], recipe["lr_decay"]) == (1e-3, 100, 0.5)


def test_what_came_from_python_must_be_given_again(folder: Path) -> None:
    data = dict(np.load("digits.npz"))
    onward.train(onward.load("digits.onnx"), data, loss="ce", run="first", **QUIET)
    assert failed("train", "--config", "first/config.yaml")[0] == "the model of this run came from Python"
    told, hint = failed("train", "digits.onnx", "--config", "first/config.yaml")
    assert told == "the data of this run came from Python" and "`data=...`" in hint
    onward.train("digits.onnx", data, config="first/config.yaml", run="second", **QUIET)
    assert weights("first/training.onnx") == weights("second/training.onnx")


MISTAKES = {
    "epoch: 3": ("`run.yaml` has the unknown option `epoch`", "did you mean `epochs`?"),
    "qqqq: 3": ("`qqqq`", "onward train --help"),
    "epochs: many": ("`epochs` is `'many'`, but must be an integer", "without quotes"),
    "batch_size: -1\nlast: some": ("`batch_size` is -1, but must be at least 1", ""),
    "last: keeep": ("`last` is `'keeep'`, but must be `keep`, `drop` or `pad`", "did you mean `keep`?"),
    "shuffle: 1": ("`shuffle` is `1`, but must be `True` or `False`", "onward train --help"),
    "validation: 3": ("`validation` is 3, but must be positive and less than 1", ""),
    "seed: 2020-01-01": ("`seed` in `run.yaml` is not a string", "quotes"),
    "epochs: 1\nepochs: 2": ("`epochs` is given twice", "epochs: 5"),
    "- 1": ("holds no mapping", "epochs: 5"),
    "a: b: c": ("is not valid YAML", "epochs: 5"),
    "\x00": ("is not valid YAML", "epochs: 5"),
    "epochs: " + "9" * 5000: ("is not valid YAML", "epochs: 5"),
    "loss: !!python/object/apply:os.system [exit]": ("could not determine a constructor for the tag", "epochs: 5"),
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]": ("uses YAML references", "write it out"),
    "[" * 100_000: ("is nested deeper than 50", "write it out"),
    "x: " + "y" * (1 << 21): ("is larger than 1 MiB", "epochs: 5"),
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:20])
def test_a_mistake_in_a_file_is_explained(text: str, folder: Path) -> None:
    Path("run.yaml").write_text(text)
    message, hint = MISTAKES[text]
    told, way_out = failed("train", "--config", "run.yaml")
    assert message in told and hint in way_out
    assert not Path("runs").exists()


def test_files_that_are_none(folder: Path) -> None:
    assert "cannot read `nowhere.yaml`" in failed("train", "--config", "nowhere.yaml")[0]
    assert "a folder, not a file" in failed("train", "--config", ".")[0]
    Path("run.toml").write_text("epochs = ")
    assert "`run.toml` is not valid TOML" in failed("train", "--config", "run.toml")[0]
    Path("run.toml").write_text("epochs = 1\n" + "#" * (1 << 20) + "\nepochz = 1\n")
    assert "`run.toml` is larger than 1 MiB" in failed("train", "--config", "run.toml")[0]


@pytest.mark.parametrize("text", ["{} = 1", "loss.{} = 1", "[{}]\nb = 1"])
def test_deep_toml_is_refused(text: str, folder: Path) -> None:
    """Dots in a key nest without a bracket."""
    Path("deep.toml").write_text(text.format(".".join(["a"] * 3000)))
    error, _ = failed("train", "--config", "deep.toml")
    assert "is nested deeper than 50 levels" in error


def test_many_keys_take_a_moment(tmp_path: Path) -> None:
    """Each is compared with those before it by its hash, not with each of them."""
    lines = [f"k{n}: 1\n" for n in range(2_000)]
    (tmp_path / "many.yaml").write_text("".join(lines))
    begin = time.process_time()
    assert len(read_configuration(tmp_path / "many.yaml")) == 2_000
    few = time.process_time() - begin
    (tmp_path / "more.yaml").write_text("".join(lines) + "".join(f"m{n}: 1\n" for n in range(4_000)))
    begin = time.process_time()
    assert len(read_configuration(tmp_path / "more.yaml")) == 6_000
    assert time.process_time() - begin < 6 * few


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "`a` is given twice"),
        ("? [1]\n: 2\n", "a key is a list"),
        (f"{1 << 61}: 1\n", "giant number"),
        ("a: " + "1:" * 400_000 + "1\n", "too many digits"),
        ("a: " + "1:" * 99 + "1.5\n", "too many digits"),
        ("a: 0x" + "f" * 9_000 + "\n", "too many digits"),
    ],
)
def test_yaml_that_takes_long_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(onward.Error, match=said):
        read_configuration(tmp_path / "x.yaml")
