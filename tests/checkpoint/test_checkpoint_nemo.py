"""Files of NVIDIA NeMo: a tar file with a model, and checkpoints of Lightning with configurations in them."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_runs import same_tree
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.checkpoint.formats.lightning import plain
from onward.checkpoint.pytorch.archive import read_torch_file
from onward.checkpoint.pytorch.pickle_objects import Name, Object
from onward.configuration import parse_yaml

pytest.importorskip("yaml")
MODEL, RUN = CHECKPOINTS / "nemo" / "model.nemo", CHECKPOINTS / "nemo" / "run.ckpt"
LOSSES = [0.6198889017105103, 0.7372826337814331, 0.6171274781227112, 0.7017439603805542, 0.7760101556777954]
"""Of the steps after the run that was recorded."""
SCHEDULE = {"name": "CosineAnnealing", "warmup_steps": 3, "min_lr": 0.001, "max_steps": 12}


def packed(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo("./" + name.replace("__", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        read = {each.name.removeprefix("./"): archive.extractfile(each) for each in archive if each.isreg()}
        return {name: file.read() for name, file in read.items() if file is not None}


@needs("torch")
def test_a_model_of_nemo_both_ways(tmp_path: Path) -> None:
    """What is written holds the same files, and PyTorch loads the weights."""
    import torch

    found = onward.open_checkpoint(MODEL)
    before = members(MODEL)
    (words,) = found.files
    assert (found.format, found.title) == ("nemo", "NeMo 3.0.0") and words.endswith("_words.txt")
    assert found.configuration["target"] == "__main__.Tiny" and found.arguments["sched"] == SCHEDULE
    weights = torch.load(io.BytesIO(before["model_weights.ckpt"]), weights_only=True)
    assert list(found.tensors) == list(weights)
    for name, tensor in weights.items():
        assert np.array_equal(found.tensors[name].array(), tensor.numpy())

    onward.to_checkpoint(found, tmp_path / "y.nemo", format="nemo")
    after = members(tmp_path / "y.nemo")
    again = torch.load(io.BytesIO(after["model_weights.ckpt"]), weights_only=True)
    same_tree(again, weights)
    assert after[words] == before[words] == b"yes\nno\n" and after.keys() == before.keys()
    assert parse_yaml(after["model_config.yaml"], "y") == found.configuration


def test_files_of_nemo_that_are_refused(tmp_path: Path) -> None:
    whole, data = MODEL.read_bytes(), members(MODEL)["model_weights.ckpt"]
    for number, (content, words) in enumerate([
        (gzip.compress(whole), "compressed"),
        (whole[:400], "not a whole"),
        (whole[:2000], "has no `model_weights.ckpt`"),
        (packed(tmp_path / "a", model_config__yaml=b"a: 1").read_bytes(), "has no `model_weights.ckpt`"),
        (packed(tmp_path / "c", model_config__yaml=b"a: !!python/object:os.system {}",
                model_weights__ckpt=data).read_bytes(), "not valid YAML"),
        (packed(tmp_path / "d", model_config__yaml=b"a: &a [1, 1]\nb: [*a, *a]",
                model_weights__ckpt=data).read_bytes(), "uses YAML references"),
        (packed(tmp_path / "e", model_config__yaml=b"[" * 5000, model_weights__ckpt=data).read_bytes(), "deeper"),
    ]):  # fmt: skip
        (tmp_path / f"{number}.nemo").write_bytes(content)
        with pytest.raises(onward.Error, match=words):
            onward.open_checkpoint(tmp_path / f"{number}.nemo")
    with pytest.raises(onward.Error, match="configuration of NeMo, which is missing"):
        onward.to_checkpoint(onward.open_checkpoint(CHECKPOINTS / "lightning.ckpt"), tmp_path / "z", format="nemo")


def test_configurations_in_checkpoints_are_data() -> None:
    found = onward.open_checkpoint(RUN)
    configuration = found.arguments["cfg"]
    assert configuration["optim"]["sched"] == SCHEDULE and configuration["optim"]["betas"] == [0.9, 0.98]
    assert configuration["nothing"] is None and configuration["nemo_version"] == "3.0.0"
    assert found.title == "Lightning 2.4.0" and any("omegaconf" in name for name in found.executes)


def test_configurations_that_never_end() -> None:
    loop = Object(Name("omegaconf.dictconfig", "DictConfig"))
    loop.state = {"_content": {"a": loop}}
    found = plain(loop)
    assert found["a"] is found
    turning = Object(Name("omegaconf.nodes", "AnyNode"))
    turning.state = {"_val": turning}
    with pytest.raises(onward.Error, match="nested"):
        plain(turning)


# ---- runs ------------------------------------------------------------------------------------------------------------


def tiny(folder: Path) -> onward.Model:
    """What the model of NeMo computes, as `make_nemo.py` has it."""
    import torch

    layers = {"first": torch.nn.Linear(3, 4), "between": torch.nn.Tanh(), "second": torch.nn.Linear(4, 2)}
    module = torch.nn.Sequential(OrderedDict(layers))
    arguments: Any = {"input_names": ["x"], "dynamic_shapes": ({0: "n"},), "optimize": False, "verbose": False}
    torch.onnx.export(module, (torch.zeros(8, 3),), folder / "model.onnx", dynamo=True, **arguments)
    return onward.load(folder / "model.onnx")


@needs("torch")
def test_a_run_of_nemo_goes_on(tmp_path: Path) -> None:
    """Here, with the losses that NeMo had: its schedule is known, too."""
    import torch

    model = onward.from_checkpoint(RUN, like=tiny(tmp_path), loss="cross_entropy")
    assert model.array("step") == 5
    onward.to_checkpoint(model, tmp_path / "back.ckpt", format="lightning")
    before, after = (read_torch_file(path)["hyper_parameters"] for path in (RUN, tmp_path / "back.ckpt"))
    assert plain(after) == plain(before)
    optimizer = after.state["_content"]["cfg"]
    assert optimizer.state["_parent"] is after  # parts of configurations know what they are parts of
    torch.manual_seed(1)
    inputs, labels = torch.rand(40, 3).numpy(), torch.randint(2, (40,)).numpy()
    running = onward.engines.start(model)
    batches = [slice(at, at + 8) for at in range(0, 40, 8)]
    losses = [float(running.step({"x": inputs[at], "labels": labels[at]})["loss"]) for at in batches]
    np.testing.assert_allclose(losses, LOSSES, rtol=1e-5)


@pytest.mark.slow
@needs("torch")
def test_nemo_goes_on(tmp_path: Path) -> None:
    """NeMo itself, from what is written, with the very losses of a run that was never interrupted."""
    python = os.environ.get("ONWARD_NEMO_PYTHON")
    if not python:
        pytest.skip("ONWARD_NEMO_PYTHON names no Python that has nemo-toolkit")

    def nemo(do: str, *paths: Path) -> list[list[float]]:
        script = CHECKPOINTS / "make_nemo.py"
        made = subprocess.run([python, script, do, *paths], capture_output=True, text=True, check=True)
        losses: list[list[float]] = json.loads(made.stdout.splitlines()[-1])  # libraries greet
        return losses

    (expected,) = nemo("make", tmp_path)
    assert expected == pytest.approx(LOSSES, rel=1e-5)
    run, model, like = tmp_path / "run.ckpt", tmp_path / "model.nemo", tiny(tmp_path)
    back = [tmp_path / f"{number}.ckpt" for number in range(3)]
    onward.from_checkpoint(run, like=like, loss="cross_entropy").save(tmp_path / "run.onnx")
    onward.to_checkpoint(tmp_path / "run.onnx", back[0], format="lightning")
    onward.to_checkpoint(run, back[1], format="lightning")
    onward.to_checkpoint(run, tmp_path / "sharded", format="dcp")
    onward.to_checkpoint(tmp_path / "sharded", back[2], format="lightning")
    *same, elsewhere = nemo("resume", run, *back)
    assert same == [expected] * 3
    assert elsewhere[:5] == expected  # a second epoch follows: other formats do not say how far the first one was

    onward.to_checkpoint(model, tmp_path / "same.nemo", format="nemo")
    first, again = nemo("restore", model, tmp_path / "same.nemo")
    assert len(first) == 5 and again == first
