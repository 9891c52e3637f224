"""Checkpoints of onnxruntime-training 1.19: read, trained on, and written, as it would have gone on itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from paths import CHECKPOINTS

import onward
from onward.checkpoint.embedded import FACT
from onward.checkpoint.formats import ort
from onward.checkpoint.ort.files import IDENTIFIER, data_file, read_ort, write_ort
from onward.checkpoint.ort.flatbuffers import Number, Vector, Writer
from onward.engines import start
from onward.recipe.spec import Spec

RECORDED = CHECKPOINTS / "ort"
LOSSES = json.loads((RECORDED / "losses.json").read_text())
NAMES = tuple(LOSSES)


def batch(name: str, step: int) -> dict[str, np.ndarray]:
    """As `make_ort.py` has them."""
    rng = np.random.default_rng(step)
    x = rng.normal(scale=0.2 if name == "binary" else 1, size=(6, 4)).astype(np.float32)
    if name in ("entropy", "normed"):
        return {"x": x, "labels": rng.integers(0, 3, 6)}
    return {"x": x, "target": rng.uniform(size=(6, 3)).astype(np.float32)}


def schema(path: Path) -> Any:
    """A checkpoint by the classes that ONNX Runtime has for it."""
    import onnxruntime.tools.ort_format_model  # noqa: F401  (which makes the next one known)
    from ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

    return Checkpoint.GetRootAs(path.read_bytes(), 0)


def by_schema(path: Path) -> dict[str, Any]:
    root = schema(path)
    module, bag = root.ModuleState(), root.PropertyBag()
    outside = data_file(path).read_bytes() if module.HasExternalData() else b""

    def tensors(get: Any, count: int) -> dict[str, np.ndarray]:
        found = {}
        for tensor in map(get, range(count)):
            at, size = tensor.ExternalDataOffset(), 4 * int(np.prod(tensor.DimsAsNumpy()))
            data = outside[at : at + size] if at >= 0 else tensor.RawDataAsNumpy().tobytes()
            found[tensor.Name().decode()] = np.frombuffer(data, np.float32).reshape(tensor.DimsAsNumpy())
        return found

    groups = {}
    for group in map(root.OptimizerGroups, range(root.OptimizerGroupsLength())):
        states = map(group.OptimizerStates, range(group.OptimizerStatesLength()))
        groups[group.GroupName().decode()] = {
            "step": group.Step(),
            "initial_learning_rate": group.InitialLearningRate(),
            "optimizer_states": {s.ParamName().decode(): tensors(s.Momentums, s.MomentumsLength()) for s in states},
        }
    kinds = ((bag.Ints, bag.IntsLength()), (bag.Floats, bag.FloatsLength()), (bag.Strings, bag.StringsLength()))
    properties = {each.Name().decode(): each.Value() for get, count in kinds for each in map(get, range(count))}
    return {
        "version": root.Version(),
        "module_state": {
            "requires_grad_params": tensors(module.RequiresGradParams, module.RequiresGradParamsLength()),
            "frozen_params": tensors(module.FrozenParams, module.FrozenParamsLength()),
            "is_nominal_state": module.IsNominalState(),
        },
        "optimizer_groups": groups,
        "properties": {key: v.decode() if isinstance(v, bytes) else v for key, v in properties.items()},
    }


def same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, np.ndarray):
        assert ours.shape == theirs.shape and np.array_equal(ours.array(), theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_read_as_by_the_classes_of_onnxruntime(name: str) -> None:
    path = RECORDED / name / "checkpoint"
    same(read_ort(path), by_schema(path))
    checkpoint = onward.open_checkpoint(RECORDED / name)
    assert checkpoint.step == 5 and checkpoint.progress["note"] == "of a phone"
    trained = {"first.weight", "first.bias", "second.weight", "second.bias", *(["scale"] if name == "normed" else [])}
    assert set(checkpoint.optimizers[0].groups[0].parameters) == trained


@pytest.mark.parametrize("most_inside", [1 << 40, 0])
def test_written_for_the_classes_of_onnxruntime(tmp_path: Path, most_inside: int) -> None:
    tree = read_ort(RECORDED / "entropy" / "checkpoint")
    write_ort(tree, tmp_path / "checkpoint", most_inside)
    assert data_file(tmp_path / "checkpoint").exists() == (most_inside == 0)
    same(tree, by_schema(tmp_path / "checkpoint"))
    same(read_ort(tmp_path / "checkpoint"), by_schema(RECORDED / "entropy" / "checkpoint"))


# ---- going on --------------------------------------------------------------------------------------------------------


def imported(folder: Path) -> onward.Model:
    """A training model that goes on from a folder, at the rate at which the recorded runs did."""
    spec = onward.open_checkpoint(folder).optimizers[0].groups[0].optimizer
    assert spec is not None
    return onward.from_checkpoint(folder, optimizer={"name": spec.name, "lr": 0.05})


def losses_of(model: onward.Model, name: str) -> list[float]:
    with start(model) as engine:
        return [float(engine.step(batch(name, step))["loss"]) for step in range(5, 10)]


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on(name: str) -> None:
    """On stock ONNX Runtime, with gradients of ours. Their corrections of Adam's bias are in float32."""
    assert losses_of(imported(RECORDED / name), name) == pytest.approx(LOSSES[name], rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_model_for_evaluation(tmp_path: Path, name: str) -> None:
    """The forward part of the one for training is the same."""
    folder = tmp_path / name
    shutil.copytree(RECORDED / name, folder)
    (folder / "eval_model.onnx").unlink()
    assert losses_of(imported(folder), name) == pytest.approx(LOSSES[name], rel=1e-6)


def test_names_with_a_prefix(tmp_path: Path) -> None:
    """As `generate_artifacts(prefix=...)` gives them, to two models in a folder."""
    for name in ("squares", "entropy"):
        for path in (RECORDED / name).iterdir():
            shutil.copy(path, tmp_path / f"{name}_{path.name}")
    with pytest.raises(onward.Error, match="several checkpoints"):
        onward.open_checkpoint(tmp_path)
    checkpoint = onward.open_checkpoint(tmp_path / "squares_checkpoint")
    assert checkpoint.optimizers[0].families == ("sgd",)
    assert losses_of(imported(tmp_path / "squares_checkpoint"), "squares") == pytest.approx(LOSSES["squares"], rel=1e-6)


def test_before_the_first_step(tmp_path: Path) -> None:
    """A checkpoint without the state of an optimizer begins one, as onnxruntime-training does."""
    folder = tmp_path / "binary"
    shutil.copytree(RECORDED / "binary", folder)
    tree = read_ort(RECORDED / "binary" / "checkpoint")
    write_ort({**tree, "optimizer_groups": {}}, folder / "checkpoint")
    model = onward.from_checkpoint(folder)
    assert model.array("step") == 0 and not model.array("first.weight/exp_avg").any()
    assert losses_of(model, "binary")[0] == pytest.approx(LOSSES["binary"][0], rel=1e-6)


def test_a_loss_without_a_name_stays_a_graph(tmp_path: Path) -> None:
    folder = tmp_path / "squares"
    shutil.copytree(RECORDED / "squares", folder)
    model = onnx.load(folder / "eval_model.onnx")
    loss = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Mul", [loss, loss], ["squared"]))
    model.graph.output[0].name = "squared"
    onnx.save(model, folder / "eval_model.onnx")
    assert ort.graph(folder).loss == "value:squared"
    first = losses_of(imported(folder), "squares")[0]
    assert first == pytest.approx(LOSSES["squares"][0] ** 2, rel=1e-6)


def test_operators_for_training_alone(tmp_path: Path) -> None:
    """They get the names that they have otherwise."""
    folder = tmp_path / "entropy"
    shutil.copytree(RECORDED / "entropy", folder)
    (folder / "eval_model.onnx").unlink()
    model = onnx.load(folder / "training_model.onnx")
    for node in model.graph.node:
        if node.op_type == "SoftmaxCrossEntropyLoss":
            node.op_type, node.domain = "SoftmaxCrossEntropyLossInternal", "com.microsoft"
            del node.attribute[1:]
            node.input.extend(["", "ignored"])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(2), "ignored"))
    onnx.save(model, folder / "training_model.onnx")
    assert losses_of(imported(folder), "entropy") == pytest.approx(LOSSES["entropy"], rel=1e-6)


# ---- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_onnxruntime_training_goes_on(tmp_path: Path, name: str) -> None:
    """From what is written, in an environment that has it: `make ort-training` makes one."""
    python = os.environ.get("ONWARD_ORT_TRAINING_PYTHON")
    if not python:
        pytest.skip("ONWARD_ORT_TRAINING_PYTHON names no Python that has onnxruntime-training")
    folders = [tmp_path / "model" / name, tmp_path / "checkpoint" / name]
    onward.from_checkpoint(RECORDED / name).save(tmp_path / "run.onnx")
    onward.to_checkpoint(tmp_path / "run.onnx", folders[0], format="ort")
    onward.to_checkpoint(RECORDED / name, folders[1], format="ort")
    script = RECORDED.parent / "make_ort.py"
    made = subprocess.run([python, script, "resume", *folders], capture_output=True, text=True, check=True)
    for losses in json.loads(made.stdout.splitlines()[-1]):  # libraries greet
        assert losses == pytest.approx(LOSSES[name], rel=1e-6)


def test_what_they_cannot_hold_is_refused(tmp_path: Path) -> None:
    checkpoint = onward.open_checkpoint(RECORDED / "squares")
    (kept,) = checkpoint.optimizers
    group = dataclasses.replace(kept.groups[0], optimizer=Spec("sgd", {"momentum": 0.9}))
    other = dataclasses.replace(checkpoint, optimizers=(dataclasses.replace(kept, groups=(group,)),))
    with pytest.raises(onward.Error, match="no optimizer equal to"):
        ort.write(other, tmp_path / "out")
    for number in (1 << 70, 1e60):
        with pytest.raises(onward.Error, match="too large for the file format"):
            onward.to_checkpoint(
                dataclasses.replace(checkpoint, progress={"x": number}), tmp_path / "out", format="ort"
            )
    model = onward.from_checkpoint(RECORDED / "entropy", optimizer="adamw:eps=1e-5")
    with pytest.raises(onward.Error, match=r"optimizer_model\.onnx.* computes"):
        onward.to_checkpoint(model, tmp_path / "out", format="ort")
    assert not (tmp_path / "out").exists()


def test_settings_are_those_of_the_format_that_is_written(tmp_path: Path) -> None:
    onward.to_checkpoint(RECORDED / "squares", tmp_path / "x.pt", format="torch")
    (group,) = onward.open_checkpoint(tmp_path / "x.pt").optimizers[0].groups
    assert group.settings.keys() >= {"lr", "momentum", "dampening", "nesterov"}
    with pytest.raises(onward.Error, match="PyTorch has no optimizer of its own"):
        onward.to_checkpoint(RECORDED / "entropy", tmp_path / "y.pt", format="torch")


def test_a_model_cannot_say_which_files_are_copied(tmp_path: Path) -> None:
    """It says of which checkpoint it was made; files beside that are copied if there is one."""
    shutil.copytree(RECORDED / "entropy", tmp_path / "entropy")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "eval_model.onnx").write_text("a secret")
    (tmp_path / "entropy" / "key").write_text("a secret")
    model = onward.from_checkpoint(tmp_path / "entropy")
    facts = model.step().algorithm.metadata_props
    good = facts[FACT]
    for number, (path, file) in enumerate((("private", "eval_model.onnx"), ("entropy", "key"))):
        changed = json.loads(good)
        changed["checkpoint"]["$Checkpoint"] |= {
            "path": {"$path": str(tmp_path / path)},
            "files": {"$tuple": [file]},
        }
        facts[FACT] = json.dumps(changed)
        made = onward.to_checkpoint(model, tmp_path / f"out{number}", format="ort")
        assert [each.name for each in made.iterdir()] == ["checkpoint"]
    facts[FACT] = good
    assert len(list(onward.to_checkpoint(model, tmp_path / "out", format="ort").iterdir())) == 4


# ---- damaged ---------------------------------------------------------------------------------------------------------


def looked_at(path: Path) -> str:
    """What is said of a file; nothing if it is well."""
    try:
        tree = read_ort(path)
    except onward.Error as error:
        return str(error)
    for tensor in tree["module_state"].get("requires_grad_params", {}).values():
        tensor.array()
    return ""


def test_damaged_at_every_place(tmp_path: Path) -> None:
    good = (RECORDED / "entropy" / "checkpoint").read_bytes()
    path = tmp_path / "checkpoint"
    for end in range(0, len(good) - 4, 3):  # which may end in padding
        path.write_bytes(good[:end])
        assert "not a whole checkpoint" in looked_at(path)
    for at in range(0, len(good) - 4, 4):
        for word in (0, 1, at, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
            path.write_bytes(good[:at] + struct.pack("<I", word) + good[at + 4 :])
            looked_at(path)


def test_small_files_that_would_be_large(tmp_path: Path) -> None:
    """A table that stands in many places, and a tensor of more than there is."""
    path = tmp_path / "checkpoint"
    groups = [{0: f"group{number}", 1: Number("q", 1)} for number in range(3)]
    with open(path, "wb") as file:
        Writer({0: Number("i", 2), 2: groups}, IDENTIFIER).write_to(file)
    data = bytearray(path.read_bytes())
    vector = data.index(struct.pack("<I", 3), 8)
    last = vector + 12 + struct.unpack_from("<I", data, vector + 12)[0]
    for place in range(vector + 4, vector + 12, 4):
        struct.pack_into("<I", data, place, last - place)
    path.write_bytes(data)
    assert "`group2` occurs twice" in looked_at(path)
    for sizes in ((1 << 40, 1 << 40), (-1, -5), (6,)):
        scale = onward.open_checkpoint(RECORDED / "squares").tensors["scale"]
        fields = {0: "t", 2: Vector("q", sizes), 3: Number("i", 1), 4: scale}
        with open(path, "wb") as file:
            Writer({0: Number("i", 2), 1: {0: [fields]}}, IDENTIFIER).write_to(file)
        assert "a tensor" in looked_at(path)


def test_unknown_version_and_nominal(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for root, said in (({0: Number("i", 3)}, "version 3"), ({0: Number("i", 2), 1: {2: Number("?", True)}}, "nominal")):
        with open(path, "wb") as file:
            Writer(root, IDENTIFIER).write_to(file)
        with pytest.raises(onward.Error, match=said):
            onward.open_checkpoint(path)
