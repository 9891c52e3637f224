"""Training models in loops that people write: programs of `examples/distributed` on two processes.

Their losses are those of ONNX Runtime in one process, which has the whole batch, clips and accumulates.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from paths import ROOT

import onward
from onward.model.state import all_states

EXAMPLES = ROOT / "examples" / "distributed"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[float], onward.Model]]:
    """Losses of the steps of one process, and what it has come to."""
    pytest.importorskip("sklearn")
    from digits import ACCUMULATE, BATCH, prepare_digits

    def train(kind: str) -> tuple[list[float], onward.Model]:
        model, inputs, targets = prepare_digits(kind, accumulate=ACCUMULATE)
        with onward.engines.start(model) as engine:
            names = list(engine.inputs)
            assert len(names) == 2
            starts = range(0, len(inputs), BATCH)
            batches = [dict(zip(names, (x[i : i + BATCH] for x in (inputs, targets)), strict=True)) for i in starts]
            return [float(engine.step(batch)["loss"]) for batch in batches], engine.updated()

    return {kind: train(kind) for kind in ("cnn", "gpt")}


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(program: str, *arguments: str, launcher: Sequence[str] = TORCHRUN) -> list[float]:
    """Losses that a program prints."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / program), *arguments],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]


def same_training(found: onward.Model, expected: onward.Model) -> None:
    """Parameters, their moments, statistics and the number of updates; what accumulates is part of one only."""
    of_one = {state.name: state.array for state in all_states(expected)}
    compared = {state.name: state.array for state in all_states(found)}
    assert compared.keys() <= of_one.keys()
    assert len(compared) > 20
    for name, array in compared.items():
        np.testing.assert_allclose(array, of_one[name], rtol=2e-3, atol=2e-5, err_msg=name)


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize(
    ("program", "package"),
    [("ddp_loop.py", "torch"), ("accelerate_loop.py", "accelerate"), ("fabric_loop.py", "lightning_fabric")],
)
def test_loops_of_pytorch(program: str, package: str, kind: str, alone: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    losses, model = alone[kind]
    np.testing.assert_allclose(run(program, kind, str(tmp_path / "trained.onnx")), losses, rtol=1e-5)
    same_training(onward.load(tmp_path / "trained.onnx"), model)


@needs("torch")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
@pytest.mark.parametrize(
    ("program", "package", "more"),
    [
        ("fsdp_loop.py", "torch", []),
        ("deepspeed_loop.py", "deepspeed", ["1"]),
        ("deepspeed_loop.py", "deepspeed", ["2"]),
        ("deepspeed_loop.py", "deepspeed", ["3"]),
    ],
)
def test_loops_that_divide_parameters(
    program: str, package: str, more: list[str], kind: str, alone: Any, tmp_path: Path
) -> None:
    """FSDP2, and ZeRO 1 to 3: what they save is read as a checkpoint."""
    from digits import UPDATES, prepare_digits

    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    losses, model = alone[kind]
    np.testing.assert_allclose(run(program, kind, str(tmp_path / "saved"), *more), losses, rtol=1e-5)
    schedule = f"cosine:steps={2 * UPDATES}"  # of which a checkpoint has no more than the position
    same_training(onward.from_checkpoint(tmp_path / "saved", prepare_digits(kind)[0], schedule=schedule), model)


@needs("tensorflow", "keras")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_keras_on_two_devices(alone: Any, kind: str, tmp_path: Path) -> None:
    losses, model = alone[kind]
    found = run("keras_mirrored.py", kind, str(tmp_path / "trained.onnx"), launcher=())
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    same_training(onward.load(tmp_path / "trained.onnx"), model)


@needs("torch")
def test_parts_of_parameters_are_not_clipped() -> None:
    """As DeepSpeed leaves them to the optimizer."""
    import torch
    from digits import prepare_digits

    _, optimizer, _, _ = onward.to_torch(prepare_digits("cnn")[0], probe=False)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(100))]
    with pytest.raises(onward.Error, match="slices of parameters without the global norm"):
        optimizer.step()


# ---- normalization ---------------------------------------------------------------------------------------------------


@needs("torch")
@pytest.mark.parametrize("variance", ["sample", "population"])
def test_statistics_of_two_equal_batches(variance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same batch: results, gradients and statistics are those of a batch that has it twice."""
    import torch
    import torch.distributed as dist
    from digits import prepare_digits

    model, images, labels = prepare_digits("cnn", variance=variance, clip=None)
    x, y = torch.from_numpy(images[:6]), torch.from_numpy(labels[:6])

    def step(sync: bool, *parts: int) -> Any:
        module, _, _, loss = onward.to_torch(model, sync_batch_norm=sync, probe=False)
        loss(module(x.repeat(*parts, 1, 1, 1)), y.repeat(*parts)).backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        return gradients | dict(module.named_buffers())

    expected = step(False, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    found = step(True, 1)
    assert found.keys() == expected.keys() and not torch.equal(step(False, 1)["conv1.weight"], found["conv1.weight"])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
