"""Several processes that have parts of a model each, on PyTorch, compute what ONNX Runtime computes in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import divided_operators
import numpy as np
import onnx
import onnx.parser
import parallel_models
import pytest
from parallel_runs import compare, curve, torch_options, train
from processes import together

import onward
from onward.lowering.contract import contract_of
from onward.lowering.data_parallel import DataParallel
from onward.lowering.micro_batches import divide_into_micro_batches
from onward.lowering.step import LoweringOptions, lower_for_engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    parallel_models.write_gpt(folder / "gpt.onnx")
    parallel_models.write_gpt(folder / "tied.onnx", is_tied=True)
    parallel_models.write_mlp(folder / "mlp.onnx")
    parallel_models.write_mlp(folder / "dropout.onnx", dropout=0.25)
    parallel_models.write_cnn(folder / "cnn.onnx")
    return {path.stem: str(path) for path in folder.glob("*.onnx")}


TENSOR, PIPELINE = torch_options("tensor"), torch_options("pipeline")


def test_tensor_and_pipeline(models: dict[str, str], tmp_path: Path) -> None:
    """With clipping, accumulation, labels that are ignored, and batches of any size."""
    compare([(models["gpt"], TENSOR), (models["gpt"], PIPELINE)], 2, tmp_path / "found.json")


@pytest.mark.slow
def test_other_losses_and_random_numbers(models: dict[str, str], tmp_path: Path) -> None:
    """Which are the same where a batch is computed at once."""
    runs = [
        (models["mlp"], PIPELINE),
        (models["dropout"], TENSOR),
        (models["dropout"], {**PIPELINE, "micro_batches": 1}),
    ]
    compare(runs, 2, tmp_path / "found.json")


@pytest.mark.slow
def test_more_processes(models: dict[str, str], tmp_path: Path) -> None:
    """Three or four: sizes that cannot be divided, weights that two processes read, blocks that are computed twice."""
    three = [(models[name], TENSOR) for name in ("gpt", "cnn")]
    three += [(models[name], {**PIPELINE, "recompute": 1, "micro_batches": 3}) for name in ("gpt", "tied", "mlp")]
    compare(three, 3, tmp_path / "three.json")
    four = [(models[name], {**TENSOR, "mesh": "data=2,model"}) for name in ("gpt", "cnn", "mlp")]
    four += [(models["tied"], {**TENSOR, "recompute": 1}), (models["mlp"], PIPELINE)]
    four += [
        (models["gpt"], {**TENSOR, "mesh": "model=2,data", "shard": {"*.narrow.weight": "-", "head.weight": "-,model"}})
    ]
    compare(four, 4, tmp_path / "four.json")


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """Of a GPT with eight layers, no process holds much more than its part of parameters and state."""
    parallel_models.write_gpt(tmp_path / "gpt.onnx", layers=8, width=32)
    path = str(tmp_path / "gpt.onnx")
    whole, tensor, pipeline = compare(
        [(path, torch_options("ddp")), (path, TENSOR), (path, PIPELINE)], 2, tmp_path / "found"
    )
    assert 0 < tensor["bytes"] <= 0.55 * whole["bytes"]
    assert 0 < pipeline["bytes"] <= 0.55 * whole["bytes"]
    assert pipeline["blocks"] == 4


@pytest.mark.slow
def test_a_sharding_in_the_file(models: dict[str, str], tmp_path: Path) -> None:
    """As plans write it."""
    model = onward.load(models["mlp"])
    pairs = {f"{i}.widen.weight": {0: ["tensor"]} for i in range(4)} | {
        f"{i}.narrow.weight": {1: ["tensor"]} for i in range(4)
    }
    onward.Sharding("tensor", {"tensor": 2}, pairs).write_to(model)
    model.save(tmp_path / "sharded.onnx")
    runs = [(models["mlp"], torch_options("ddp")), (str(tmp_path / "sharded.onnx"), {**TENSOR, "mesh": "file"})]
    whole, sharded = compare(runs, 2, tmp_path / "found.json")
    assert sharded["bytes"] < 0.6 * whole["bytes"]


@pytest.mark.slow
def test_operators_on_parts(tmp_path: Path) -> None:
    """Each operator that is computed on parts gives what it gives on whole tensors, and so does its derivative."""
    together(divided_operators.__file__, 2, {"to": str(tmp_path / "found")})
    assert (tmp_path / "found").read_text() == ""


@pytest.mark.slow
def test_train_and_resume(models: dict[str, str], tmp_path: Path) -> None:
    """A run goes on with another strategy, and then with one process on another engine, and has the curve of one."""
    x = np.random.default_rng(1).normal(0, 1, (50, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, labels=x[:, :3].argmax(1))
    net, data = tmp_path / "net.onnx", tmp_path / "data.npz"
    onward.transform.strip(onward.load(models["mlp"])).save(net)
    alone = train(net, data, tmp_path / "alone", "--epochs", "3")
    torch = ("--engine", "torch", "--no-compile", "--nproc", "2")
    run = train(net, data, tmp_path / "run", "--epochs", "1", *torch, "--strategy", "tensor")
    command = [sys.executable, "-m", "onward", "train", "--resume", str(run.path), "--epochs", "2", "--quiet"]
    subprocess.run([*command, "--strategy", "pipeline", "--nproc", "2"], check=True, timeout=300)
    onward.resume(run.path, epochs=3, engine="onnxruntime", quiet=True)
    np.testing.assert_allclose(curve(run), curve(alone), rtol=1e-5)


# ---- what is refused -------------------------------------------------------------------------------------------------


def divide(model: Any) -> None:
    forward = lower_for_engine(
        model, None, "forward", LoweringOptions(differentiate=False, data_parallel=DataParallel(0, 2, gradients=False))
    )
    contract = contract_of(forward)
    divide_into_micro_batches(forward, contract.state, contract.update.values())


def test_what_micro_batches_cannot_compute(models: dict[str, str]) -> None:
    with pytest.raises(onward.Error, match="statistics of BatchNormalization"):
        divide(onward.load(models["cnn"]))
    plain = onward.transform.strip(onward.load(models["mlp"]))
    with pytest.raises(onward.Error, match="not a sum over samples"):
        divide(onward.prepare(plain, loss=onnx.parser.parse_function(parallel_models.ROOT_OF_MEAN)))
