"""Paths of other systems, read through file systems of fsspec that need no network."""

import numpy as np
import pytest
from commands import run
from marks import needs
from models import digits_mlp

import onward
from onward.errors import InvalidModelError, UnsupportedError
from onward.model.storage import remote

pytestmark = needs("fsspec")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    import fsspec

    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")
    onward.load(digits_mlp()).save(tmp_path / "model.onnx", data="data")
    system.put(str(tmp_path), "/bucket", recursive=True)
    yield system
    system.rm("/bucket", recursive=True)
    remote._fetch.cache_clear()


def test_a_model_comes_with_its_data(memory, tmp_path):
    here, there = onward.load(tmp_path / "model.onnx"), onward.load("memory://bucket/model.onnx")
    assert memory.exists("/bucket/model.data")
    for name, value in here.graph.initializers.items():
        np.testing.assert_array_equal(there.initializer(name).const_value.numpy(), value.const_value.numpy())
    assert onward.check("memory://bucket/model.onnx") == onward.check(tmp_path / "model.onnx")


def test_a_checkpoint_may_be_a_folder(memory, tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "weights").mkdir()
    save_file({"w": np.arange(3.0)}, tmp_path / "weights" / "model.safetensors")
    memory.put(str(tmp_path / "weights"), "/bucket/weights", recursive=True)
    for url in ("memory://bucket/weights", "memory://bucket/weights/model.safetensors", f"file://{tmp_path}/weights"):
        assert onward.open_checkpoint(url).tensors["w"].array().tolist() == [0, 1, 2]


def test_commands_write_to_the_current_folder(memory, tmp_path):
    assert "inference model" in run("describe", "memory://bucket/model.onnx").stdout
    run("prepare", "memory://bucket/model.onnx", "--loss", "cross_entropy")
    assert (tmp_path / "model-training.onnx").exists()


@pytest.mark.parametrize(
    "url, error, words, hint",
    [
        ("memory://bucket/none.onnx", InvalidModelError, "cannot read", "check the path"),
        ("nosuch://bucket/model.onnx", UnsupportedError, "unknown file system", "pip install fsspec"),
        ("s3://bucket/model.onnx", UnsupportedError, "needs fsspec: Install s3fs", "pip install fsspec s3fs"),
    ],
)
def test_what_cannot_be_read_is_named(url, error, words, hint):
    if url.startswith("s3"):
        try:
            import s3fs  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("s3fs is installed")
    with pytest.raises(error, match=words) as raised:
        onward.load(url)
    assert hint in raised.value.hint
