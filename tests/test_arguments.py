"""What Python callers get wrong: names, types and ranges of arguments, refused with errors of ours before any work."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from marks import needs
from models import digits_mlp, small_cnn
from typer.testing import CliRunner

import onward
from onward.arguments import Range
from onward.cli.app import BUG
from onward.cli.commands import app
from onward.errors import ArgumentError
from onward.options import StepOptions, TrainOptions, options_of
from onward.recipe.initialize import INITIALIZERS
from onward.recipe.preprocessing.augmentations import AUGMENTATIONS
from onward.recipe.preprocessing.operations import OPERATIONS
from onward.recipe.spec import options_of as options_within

DATA = {"image": np.zeros((8, 64), np.float32), "labels": np.zeros(8, np.int64)}
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `digits.onnx` and `training.onnx`."""
    path = tmp_path_factory.mktemp("arguments")
    onnx.save(digits_mlp(), path / "digits.onnx")
    onward.prepare(digits_mlp(), loss="ce").save(path / "training.onnx")
    return path


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[None]:
    """What fails at the door leaves nothing behind."""
    monkeypatch.chdir(folder)
    before = sorted(os.listdir())
    yield
    assert sorted(os.listdir()) == before


def told(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(onward.Error) as caught:
        function(*arguments, **named)
    return f"{caught.value.message} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("epoch", 3, "`train` has no argument `epoch` | did you mean `epochs`?"),
        ("learning_rate", 1e-3, "did you mean `lr`?"),
        ("optimiser", "adam", "did you mean `optimizer`?"),
        ("epochs", -1, "`epochs` is -1, but must be at least 0"),
        ("epochs", "3", "`epochs` is `'3'`, but must be an integer, at least 0 | pass a number, without quotes"),
        ("epochs", NAN, "`epochs` is `nan`, but must be an integer"),
        ("epochs", True, "`epochs` is `True`"),
        ("batch_size", 0, "`batch_size` is 0, but must be at least 1"),
        ("batch_size", 8.0, "`batch_size` is `8.0`"),
        ("seed", -1, "`seed` is -1"),
        ("seed", "7", "`seed` is `'7'`, but must be an integer"),
        ("threads", 0, "`threads` is 0"),
        ("threads", 10**20, "`threads` is 100000000000000000000, but must be at least 1 and at most 1,024"),
        ("patience", 0, "`patience` is 0"),
        ("validation", 1.5, "`validation=1.5` is not a fraction"),
        ("validation", 0, "`validation=0` is not a fraction"),
        ("validation", NAN, "is not a fraction"),
        ("save_every", NAN, "`save_every` is nan"),
        ("last", "trop", "`last` is `'trop'`, but must be `keep`, `drop` or `pad` | did you mean `drop`?"),
        ("columns", ["a"], "`columns` is `['a']`, but must be a mapping"),
        ("run", 3, "`run` is `3`"),
        ("engine", None, "`engine` is `None`"),
        ("shuffle", "no", "`shuffle` is `'no'`, but must be `True` or `False`"),
        ("accumulate", 0, "`accumulate` is 0"),
        ("ema", 1.0, "`ema` is 1, but must be at least 0 and less than 1"),
        ("ema", NAN, "`ema` is nan"),
        ("lr", -1.0, "`lr` of optimizer `adamw` is -1, but must be at least 0"),
        ("lr", INFINITY, "`lr` is inf, but must be finite"),
        ("lr_decay", 0.0, "`lr_decay` is 0, but must be positive and at most 1"),
        ("loss_scale", NAN, "`loss_scale` is nan"),
        ("loss_scale", "0", "`loss_scale` is 0, but must be positive"),
        ("clip", NAN, "`clip` is nan"),
        ("clip", 0.0, "the limit of `clip=norm` is 0, but must be positive"),
        ("clip", True, "`clip` is `True`, but must be a string, a number"),
        ("variance", "x", "`variance` is `'x'`, but must be `population` or `sample`"),
        ("freeze", [3], "`freeze` is `[3]`"),
        ("groups", 3, "`groups` is `3`"),
        ("init", None, "`init` is `None`"),
        ("preprocess", 3, "3 is not a string, mapping or list"),
        ("teacher", 3, '`teacher` is `3`, not a model | write `teacher="large.onnx"`'),
        ("optimizer", {"name": "adam", "learning_rate": 1}, "no option `learning_rate` | did you mean `lr`?"),
    ],
)
def test_train_refuses(name: str, given: Any, said: str) -> None:
    assert said in told(onward.train, "digits.onnx", DATA, **{"loss": "ce", name: given})


def test_a_learning_rate_is_given_once() -> None:
    by_name = onward.prepare("digits.onnx", loss="ce", optimizer="sgd", lr=0.1)
    assert by_name.steps[0].fact("train.optimizer")[0]["hyper"]["lr"] == 0.1
    again = onward.prepare("digits.onnx", loss="ce", optimizer="sgd:lr=0.1")
    assert by_name.to_proto() == again.to_proto()
    assert "given twice" in told(onward.prepare, "digits.onnx", loss="ce", optimizer="adam:lr=1", lr=1)
    assert "is searched" in told(onward.find_lr, "digits.onnx", DATA, loss="ce", lr=1)


def test_a_number_says_how_many_classes_a_head_has() -> None:
    for given in (3, "3", "classes=3", {"classes": 3}):
        made = onward.prepare("digits.onnx", loss="ce", new_head=given)
        assert made.outputs[0].shape is not None and made.outputs[0].shape[1] == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: onward.train("digits.onnx"), "`train` needs `data`"),
        (lambda: onward.train("digits.onnx", DATA, 3), "takes 2 positional arguments, not 3 | pass the others"),
        (lambda: onward.prepare("digits.onnx", "ce"), "such as `loss=...`"),
        (lambda: onward.prepare("digits.onnx"), "nothing to learn from"),
        (lambda: onward.resume(None), "`run` is `None`"),
        (lambda: onward.resume("nope", epoch=3), "did you mean `epochs`?"),
        (lambda: onward.find_lr("digits.onnx", DATA, loss="ce", updates="x"), "`updates` is `'x'`"),
        (lambda: onward.find_lr("digits.onnx", DATA, loss="ce", lowest=NAN), "`lowest` is nan"),
        (lambda: onward.load(None), "a `NoneType` is not an ONNX model"),
        (lambda: onward.load(["digits.onnx"]), "a `list` is not an ONNX model"),
        (lambda: onward.load(digits_mlp().graph), "onnx.helper.make_model"),
        (lambda: onward.load(""), "the path of the model is empty"),
        (lambda: onward.check(3), "a `int` is not an ONNX model"),
        (lambda: onward.gradient("digits.onnx", 3, ["image"]), "`y` is `3`"),
        (lambda: onward.gradient("digits.onnx", "qqqq", ["image"]), "there are `image`, `fc1.weight`"),
        (lambda: onward.transform.rename("digits.onnx", ["x"]), "`names` is `['x']`, but must be a mapping"),
        (lambda: onward.transform.rename("digits.onnx", {"image": 3}), "`names` is"),
        (lambda: onward.transform.extract("digits.onnx", ["qqqq"], ["logits"]), "there are `image`"),
        (lambda: onward.transform.convert_opset("digits.onnx", "21"), "`version` is `'21'`"),
        (lambda: onward.lower("training.onnx", 1.5), "`steps` is `1.5`"),
        (lambda: onward.verify("training.onnx", engines=["onnxruntime"], updates=0), "`updates` is 0"),
        (lambda: onward.check_gradients("digits.onnx", order=3), "`order` is 3"),
        (lambda: onward.replace_head("digits.onnx", 2.5), "`classes` is `2.5`"),
        (lambda: onward.lora.add("digits.onnx", targets=3), "`targets` is `3`"),
        (lambda: onward.lora.load("digits.onnx", 3), "`path` is `3`"),
        (lambda: onward.load("training.onnx").save(3), "`path` is `3`"),
        (lambda: onward.load("training.onnx").step("x"), "`index` is `'x'`"),
        (lambda: onward.load("training.onnx").set("group0/lr", "x"), "`group0/lr` is double"),
        (lambda: onward.load("training.onnx").set("step", 1.5), "`step` is int64, which cannot hold 1.5"),
    ],
)
def test_calls_that_cannot_be(call: Any, said: str) -> None:
    assert said in told(call)


# ---- every option with every kind of wrong value ---------------------------------------------------------------------

WRONG: list[Any] = [
    0, 1, 1.5, True, 10**30, "", "x:y=1", [], [1], [None], [[]], ["x", 1], [{}], {}, {"a": None}, {"a": [1]},
    {"name": 1}, {"name": None}, {"name": "x", "y": [1]}, {1: 2}, b"x", object(), np.zeros(2),
]  # fmt: skip
NEEDED = {"move_with_image": {"augment": "flip"}, "distill": {"teacher": "digits.onnx"}}
"""What else must be given, so that an option counts."""
RECIPES = {one.name for one in options_of(StepOptions)}
RUNS = {one.name for one in options_of(TrainOptions)}


@pytest.fixture
def elsewhere(_inside: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of its own, for what is accepted."""
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        onnx.save(digits_mlp(8), "digits.onnx")
        onnx.save(small_cnn(2), "pictures.onnx")
        np.savez("d.npz", **DATA)
        yield


def accepted_or_refused(function: Any, *arguments: Any, **named: Any) -> None:
    """Anything but an error of ours is one."""
    with contextlib.suppress(onward.Error):
        function(*arguments, **named)


def model_for(name: str) -> str:
    return "pictures.onnx" if name in ("preprocess", "augment", "move_with_image") else "digits.onnx"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_options_of_recipes_with_wrong_values(name: str) -> None:
    for value in WRONG:
        given = {"loss": "ce", **NEEDED.get(name, {}), name: value}
        accepted_or_refused(onward.prepare, model_for(name), **given)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", sorted(RUNS - RECIPES))
def test_options_of_runs_with_wrong_values(name: str) -> None:
    for value in WRONG:
        given = {"model": "digits.onnx", "data": DATA, "loss": "ce", "epochs": 0, "quiet": True, name: value}
        if name != "epochs" or not isinstance(value, int):
            accepted_or_refused(onward.train, **given)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", sorted(RUNS - {"epochs"}))
def test_options_in_files_with_wrong_values(name: str) -> None:
    for value in WRONG:
        settings = {"model": model_for(name), "data": "d.npz", "loss": "ce", "epochs": 0, **NEEDED.get(name, {})}
        with contextlib.suppress(yaml.YAMLError):  # some values cannot be written to a file
            Path("run.yaml").write_text(yaml.safe_dump({**settings, name: value}))
            accepted_or_refused(onward.train, config="run.yaml", quiet=True)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("one", list(options_of(StepOptions)), ids=lambda one: one.name)
def test_options_of_commands_with_wrong_values(one: Any) -> None:
    for word in ("", "x", "1", "-1.5", "nan", "x=1", "a=b:c=1", ":", "=", "[]", "{}", "none", "x=", "[1,[2]]", "é"):
        loss = ["--loss", "ce"] if one.name != "loss" else []
        arguments = ["prepare", model_for(one.name), "--force", *loss, f"{one.flags[0]}={word}"]
        assert BUG not in CliRunner().invoke(app, arguments).output, arguments


def suboptions() -> Iterator[tuple[str, str, list[str]]]:
    """An option, a name that it can have, and the options of that."""
    known: dict[str, dict[str, Any]] = {
        "augment": dict(AUGMENTATIONS),
        "preprocess": {name: operation.build for name, operation in OPERATIONS.items()},
    }
    for option, entries in known.items():
        yield from ((option, name, list(options_within(function)[0])) for name, function in entries.items())
    yield from (("init", name, list(entry.options)) for name, entry in INITIALIZERS.items())
    yield "quantize", "int8", ["weights", "block", "keep", "targets", "operators", "ranges", "activations"]
    yield "prune", "magnitude", ["sparsity"]
    yield "clip", "norm", ["norm", "variant"]
    yield "distill", "kl", ["temperature", "weight", "axis", "student", "teacher"]
    yield "sample_weight", "w", ["by"]
    yield "loss_scale", "dynamic", ["growth_interval"]


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("option", "name", "names"), list(suboptions()))
def test_options_within_options_with_wrong_values(option: str, name: str, names: list[str]) -> None:
    for key in names:
        for value in WRONG:
            spec = {"name": name, key: value}
            given = {**NEEDED.get(option, {}), option: {"*": spec} if option == "init" else spec}
            accepted_or_refused(onward.prepare, model_for(option), loss="ce", **given)


def test_modules_of_frameworks_are_told_the_way_in() -> None:
    class Module:
        __module__ = "torch.nn.modules.linear"

    class Subclass(Module):
        pass

    class Layers:
        __module__ = "keras.src.models.sequential"

    for module, way in ((Subclass(), "onward.from_torch"), (Layers(), "onward.from_keras")):
        assert way in told(onward.train, module, DATA, loss="ce")


def test_numbers_of_numpy_and_single_names_are_taken() -> None:
    assert (
        onward.prepare("digits.onnx", loss="ce", accumulate=np.int64(2)).steps[0].fact("train.recipe")["accumulate"]
        == 2
    )
    assert [v.name for v in onward.gradient("digits.onnx", "logits", "image").outputs][-1] == "image/grad"


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse(Path(onward.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module.removeprefix("onward").lstrip(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == {name: home for home, names in onward._NAMES.items() for name in names}


def test_errors_are_also_those_of_python() -> None:
    with pytest.raises(TypeError):
        onward.train("digits.onnx", DATA, nope=1)
    with pytest.raises(ValueError):
        onward.train("digits.onnx", DATA, loss="ce", epochs=-1)
    assert issubclass(ArgumentError, onward.Error)


def test_every_public_function_is_checked() -> None:
    frameworks = ("from_", "to_")  # whose arguments are objects of others
    flat = {
        name: getattr(onward, name) for name in onward.__all__ if name.islower() and not name.startswith(frameworks)
    }
    rooms = {room: flat[room] for room in ("lora", "pipelines", "transform")}
    nested = {f"{room}.{name}": getattr(module, name) for room, module in rooms.items() for name in module.__all__}
    functions = {name: value for name, value in (flat | nested).items() if inspect.isfunction(value) and name != "load"}
    assert functions.keys() >= {"train", "lora.add", "transform.merge"}
    for name, function in functions.items():
        assert "is_checked" in vars(function), f"`onward.{name}` is not `checked`"
        typing.get_type_hints(inspect.unwrap(function), include_extras=True)  # all of them are there at run time


@needs("torch")
def test_arguments_of_converters_have_names() -> None:
    assert told(onward.from_torch, None).startswith("`from_torch` needs `example_inputs`")
    assert "did you mean `optimizer`?" in told(onward.from_torch, None, None, loss=None, optimiser=None)


@pytest.mark.parametrize(
    ("within", "inside", "outside", "words"),
    [
        (Range(), 0, NAN, "finite"),
        (Range(least=0), 0, -1, "at least 0"),
        (Range(above=0), 1e-300, 0, "positive"),
        (Range(above=0, finite=False), INFINITY, NAN, "positive"),
        (Range(least=0, below=1), 0.5, 1, "at least 0 and less than 1"),
        (Range(above=1, most=2**64), 2, INFINITY, "more than 1 and at most 18,446,744,073,709,551,616"),
    ],
)
def test_ranges(within: Range, inside: float, outside: float, words: str) -> None:
    assert inside in within and outside not in within and str(within) == words


def test_names_of_the_release_before_are_understood(folder: Path, tmp_path: Path) -> None:
    for name, command in (("show", "describe"), ("grad", "gradient")):
        told_of = [CliRunner().invoke(app, [each, "--help"]).output.splitlines()[0] for each in (name, command)]
        assert told_of[0] == told_of[1]
    out = str(tmp_path / "step.onnx")
    given = ["--part", "run", "--validation", "--noise=image", "-o", out]
    assert "wrote" in CliRunner().invoke(app, ["lower", "training.onnx", *given]).output
    assert onward.verify("training.onnx", engines=["numpy"], steps=1).ok  # type: ignore[call-arg]
    assert onward.plan("training.onnx", recompute=True).model["recompute"]
    assert "`verify` has no argument `steps`" in told(onward.verify, "training.onnx", steps=1, updates=1)
    former = {"pipeline": "make", "run_pipeline": "run", "join_pipeline": "join", "detach_pipeline": "detach"}
    for before, now in former.items():
        assert getattr(onward, before) is getattr(onward.pipelines, now) and before not in dir(onward)
