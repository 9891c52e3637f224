"""Meshes of JAX: many devices and processes compute together what one computes alone."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mesh_steps
import numpy as np
import onnx
import pytest

import onward
from onward.engines.distributed.layout import MeshLayout
from onward.planning.plan import annotate

SCRIPT = Path(mesh_steps.__file__)


def start(name: str, mesh: str, devices: int, **environment: str) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"  # to compile quickly
    command = [sys.executable, str(SCRIPT), name, mesh]
    environment = {**os.environ, "XLA_FLAGS": flags, **environment}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def results(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return results(start(name, "", 1))


def assert_same(found: dict[str, Any], name: str) -> None:
    expected = alone(name)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    for kind in ("norms", "state"):
        for tensor, norm in expected[kind].items():
            np.testing.assert_allclose(found[kind][tensor], norm, rtol=1e-4, atol=1e-6, err_msg=tensor)


MESHES = [("net", "data=2"), ("net", "fsdp=2"), ("net", "data=2,fsdp")]
MESHES += [("gpt", "data=2"), ("gpt", "fsdp=2"), ("gpt", "data=2,model=2")]


@pytest.mark.slow("net-data=2,model=2")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("net", "data=2,model=2"), ("small gpt", "fsdp=2"), *(pytest.param(*c, marks=pytest.mark.slow) for c in MESHES)],
)
def test_mesh(name: str, mesh: str) -> None:
    process = start(name, mesh, 4)
    alone(name)  # meanwhile
    found = results(process)
    assert_same(found, name)
    np.testing.assert_allclose(found["logits"], alone(name)["logits"], rtol=1e-3, atol=1e-5)
    if mesh != "data=2":
        assert found["bytes"] <= 0.6 * alone(name)["bytes"]


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("model", marks=pytest.mark.slow)])
def test_processes(mesh: str) -> None:
    """Each has its part of every batch and of the state. With `model`, all need all samples."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [start("net", mesh, 1, **variables, JAX_PROCESS_ID=str(rank)) for rank in range(2)]
    logits = []
    for found in [results(process) for process in processes]:
        assert_same(found, "net")
        assert found["bytes"] <= 0.6 * alone("net")["bytes"]
        logits += found["logits"]
    np.testing.assert_allclose(logits, alone("net")["logits"], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_train(tmp_path: Path) -> None:
    """A run of two processes has the curve of one, and goes on in one, on another mesh."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 10, 101)
    image = (rng.normal(0, 1, (101, 1, 8, 8)) + labels[:, None, None, None]).astype(np.float32)
    np.savez(tmp_path / "digits.npz", image=image, labels=labels)
    onnx.save(mesh_steps.net(), tmp_path / "net.onnx")
    run = ["train", str(tmp_path / "net.onnx"), "--data", str(tmp_path / "digits.npz"), "--loss", "cross_entropy"]
    run += ["--validation", "0.2", "--metric", "f1", "--batch-size", "24", "--engine", "jax", "--quiet"]

    def train(name: str, *more: str) -> onward.Run:
        command = [sys.executable, "-m", "onward", *run, "--run", str(tmp_path / name), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return onward.Run(tmp_path / name)

    one = train("one", "--epochs", "4")
    two = train("two", "--epochs", "2", "--mesh", "fsdp", "--nproc", "2")
    assert two.config["mesh"] == "fsdp"
    onward.resume(two.path, epochs=4, mesh="data=1", quiet=True)
    curves = [[event[k] for event in of.log for k in ("loss", "f1", "samples") if k in event] for of in (one, two)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)


# ---- where tensors are -----------------------------------------------------------------------------------------------


def test_products_are_divided_in_pairs() -> None:
    layout = MeshLayout(mesh_steps.training("gpt"), 0, "fsdp=2,model=2", 4)
    columns, rows = (("fsdp",), ("model",)), (("model",), ("fsdp",))
    expected = {"q": columns, "o": rows, "fc1": columns, "fc2": rows, "fc1_bias": (("model",),), "scale": (("fsdp",),)}
    found = {name: layout.spec(f"h1_{name}", mesh_steps.SIZES[name]) for name in expected}
    assert found == expected
    assert layout.spec("h1_fc1/exp_avg", (16, 64)) == columns
    assert layout.spec("words", (40, 16)) == (("model",), ("fsdp",))  # also read as the last product, transposed


def test_rules_come_first() -> None:
    model = mesh_steps.training("gpt")
    layout = MeshLayout(model, 0, "fsdp=2,model=2", 4, {"h0_*": "-", "*_fc1": (None, "fsdp+model"), "*_q": "model"})
    assert layout.spec("h0_fc1", (16, 64)) == ((), ())
    assert layout.spec("h1_fc1/exp_avg", (16, 64)) == ((), ("fsdp", "model"))
    assert layout.spec("h1_q", (16, 16)) == (("model",), ())
    with pytest.raises(onward.Error, match="matches no tensor"):
        MeshLayout(model, 0, "fsdp=2", 4, {"h7_*": "fsdp"})
    with pytest.raises(onward.Error, match="cannot shard 40 elements equally"):
        MeshLayout(model, 0, "fsdp=3", 4, {"words": "fsdp"}).spec("words", (40, 16))


def test_the_mesh_in_a_file(tmp_path: Path) -> None:
    onnx.save(mesh_steps.gpt(2), tmp_path / "gpt.onnx")
    plan = onward.plan(tmp_path / "gpt.onnx", devices=4, loss="cross_entropy", batch_size=4, strategy="fsdp")
    annotate(tmp_path / "gpt.onnx", plan.sharding(), tmp_path / "planned.onnx")
    layout = MeshLayout(onward.prepare(tmp_path / "planned.onnx", loss="cross_entropy"), 0, "file", 4)
    assert layout.mesh == {"fsdp": 4}
    for name in ("h1_fc1", "h1_fc1/exp_avg"):
        assert ("fsdp",) in layout.spec(name, (16, 64))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"mesh": "data=64"}, "64 devices", "XLA_FLAGS"),
        ({"mesh": "dat=2"}, "no axis `dat`", "data"),
        ({"mesh": "data=two"}, "cannot read `data=two`", "data=4,model=2"),
        ({"mesh": "data=1", "sync_batch_norm": False}, "global statistics", "sync_batch_norm"),
        ({"mesh": "data=1", "compile": False}, "always compiled", "compile"),
        ({"mesh": "file"}, "has no device configuration", "onward plan"),
    ],
)
def test_refused(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(onward.Error, match=message) as error:
        onward.engines.start(mesh_steps.training("net"), engine="jax", **options)
    assert hint in str(error.value.hint)
