"""Files of NVIDIA NeMo: a tar file with a model, and checkpoints of Lightning with configurations in them."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onward
from conftest import needs
from onward.checkpoint.configurations import plain, read_yaml
from onward.checkpoint.pytorch.objects import Name, Object

pytest.importorskip("yaml")
RECORDED = Path(__file__).parent / "checkpoints"
CONFIGURATION = b"""target: nemo.collections.asr.models.EncDecCTCModel
nemo_version: 2.4.0
optim:
  name: adamw
  lr: 0.001
  betas: [0.9, 0.98]
"""


def packed(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo("./" + name.replace("__", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def weights() -> tuple[Any, bytes]:
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return module, file.getvalue()


@needs("torch")
def test_a_file_of_nemo_both_ways(tmp_path: Path) -> None:
    """A tar file as NeMo writes it; what is written is unpacked as such, and PyTorch loads the weights."""
    import torch

    module, data = weights()
    path = packed(
        tmp_path / "x.nemo", model_config__yaml=CONFIGURATION, tokenizer__model=b"words" * 300, model_weights__ckpt=data
    )
    found = onward.open_checkpoint(path)
    assert (found.format, found.title) == ("nemo", "NeMo 2.4.0") and found.files == ("tokenizer.model",)
    assert found.configuration["target"].endswith("EncDecCTCModel")
    assert found.arguments == {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.98]}
    assert list(found.tensors) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert np.array_equal(found.tensors[name].array(), tensor.numpy())

    onward.to_checkpoint(found, tmp_path / "y.nemo", format="nemo")
    with tarfile.open(tmp_path / "y.nemo") as archive:
        archive.extractall(tmp_path / "y", filter="data")
    again = torch.load(tmp_path / "y" / "model_weights.ckpt", weights_only=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in module.state_dict().items())
    assert (tmp_path / "y" / "tokenizer.model").read_bytes() == b"words" * 300
    assert read_yaml((tmp_path / "y" / "model_config.yaml").read_bytes(), "y") == found.configuration


@needs("torch")
def test_files_of_nemo_that_are_refused(tmp_path: Path) -> None:
    _, data = weights()
    whole = packed(tmp_path / "x.nemo", model_config__yaml=CONFIGURATION, model_weights__ckpt=data).read_bytes()
    for number, (content, words) in enumerate([
        (gzip.compress(whole), "compressed"),
        (whole[:2000], "not a whole"),
        (packed(tmp_path / "a", model_config__yaml=CONFIGURATION).read_bytes(), "has no `model_weights.ckpt`"),
        (packed(tmp_path / "c", model_config__yaml=b"a: !!python/object:os.system {}",
                model_weights__ckpt=data).read_bytes(), "not a configuration"),
        (packed(tmp_path / "d", model_config__yaml=b"a: &a [1, 1]\nb: [*a, *a]",
                model_weights__ckpt=data).read_bytes(), "refers to parts of itself"),
        (packed(tmp_path / "e", model_config__yaml=b"[" * 5000, model_weights__ckpt=data).read_bytes(), "YAML"),
    ]):  # fmt: skip
        (tmp_path / f"{number}.nemo").write_bytes(content)
        with pytest.raises(onward.Error, match=words):
            onward.open_checkpoint(tmp_path / f"{number}.nemo")
    with pytest.raises(onward.Error, match="which class of NeMo"):
        onward.to_checkpoint(onward.open_checkpoint(RECORDED / "lightning.ckpt"), tmp_path / "z", format="nemo")


def test_a_recorded_model_of_nemo() -> None:
    found = onward.open_checkpoint(RECORDED / "nemo" / "model.nemo")
    assert found.configuration["optim"]["sched"] == {"name": "CosineAnnealing", "warmup_steps": 2}
    assert list(found.tensors) == ["weight", "bias"] and found.files == ("tokenizer.model",)


def test_configurations_in_checkpoints_are_data() -> None:
    found = onward.open_checkpoint(RECORDED / "nemo" / "run.ckpt")
    assert found.arguments["cfg"] == {
        "optim": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.98],
                  "sched": {"name": "CosineAnnealing", "warmup_steps": 2}},
        "hidden": 4, "same": "${hidden}", "nothing": None,
    }  # fmt: skip
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
