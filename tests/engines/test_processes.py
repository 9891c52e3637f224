"""Several processes compute together what one computes alone."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import parallel_models
import psutil
import pytest
from marks import needs
from parallel_runs import compare, curve, start_training, torch_options, train
from thread_group import run_together

import onward
from onward.engines.distributed import ProcessGroup
from onward.model.state import all_states

NET = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[n, 1, 8, 8] image) => (float[n, 10] logits)
    <float[4, 1, 3, 3] w1, float[4] scale, float[4] bias, float[4] mean, float[4] var, float[144, 10] w2>
    {
        conv = Conv(image, w1)
        normal = BatchNormalization(conv, scale, bias, mean, var)
        active = Relu(normal)
        flat = Flatten(active)
        logits = MatMul(flat, w2)
    }"""


@pytest.fixture(scope="module")
def net() -> onnx.ModelProto:
    model = onnx.parser.parse_model(NET)
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 1, 3, 3), "scale": (4,), "bias": (4,), "mean": (4,), "var": (4,), "w2": (144, 10)}
    ones = {"scale", "var"}
    for name, shape in shapes.items():
        array = np.ones(shape) if name in ones else rng.normal(0, 0.2, shape) * (name[0] == "w")
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 10, 101)
    image = (rng.normal(0, 1, (101, 1, 8, 8)) + labels[:, None, None, None]).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(path, image=image, labels=labels)
    return path


def batches(count: int, targets: Any) -> list[dict[str, np.ndarray]]:
    """Every third is so small that shares differ, and every fifth smaller than the number of processes."""
    rng = np.random.default_rng(2)
    sizes = [2 if i % 5 == 4 else 7 if i % 3 == 2 else 12 for i in range(count)]
    return [{"image": rng.normal(1, 2, (n, 1, 8, 8)).astype(np.float32), **targets(rng, n)} for n in sizes]


def labels(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"labels": rng.integers(0, 10, n)}


def some_ignored(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"labels": np.where(np.arange(n) % 3 == 0, -100, rng.integers(0, 10, n))}


def amounts(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"target": rng.normal(0, 1, (n, 10)).astype(np.float32)}


def twice(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {**amounts(rng, n), "logits_target": rng.normal(0, 1, (n, 10)).astype(np.float32)}


def steps(
    model: onward.Model, data: list[dict[str, np.ndarray]], group: ProcessGroup | None
) -> tuple[list[float], Any]:
    options = {} if group is None else {"strategy": "ddp"}
    with onward.engines.start(model, **options) as engine:
        parts = [engine.group.part(batch) for batch in data]
        losses = [float(engine.step(part)["loss"]) for part in parts]
        return losses, (float(engine.evaluate(parts[0])["loss"]), engine.gradients(parts[0]), engine.state())


RECIPES: dict[str, tuple[dict[str, Any], Any]] = {
    "clipped and accumulated": (
        {"loss": "cross_entropy", "optimizer": "adamw:lr=1e-2", "clip": "norm:0.5", "accumulate": 2},
        labels,
    ),
    "ignored and weighted": (
        {"loss": {"name": "cross_entropy", "weight": [1.0, 2.0, *[0.5] * 8], "ignore_index": -100}},
        some_ignored,
    ),
    "smoothed, sample variance": ({"loss": "cross_entropy:label_smoothing=0.1", "variance": "sample"}, labels),
    "a sum": ({"loss": "mse:reduction=sum", "optimizer": "sgd:lr=1e-4,momentum=0.9"}, amounts),
    "a function of a mean": ({"loss": onnx.parser.parse_function(parallel_models.ROOT_OF_MEAN)}, amounts),
    "two summands, averaged": ({"loss": ["mse", "l1:scale=0.5"], "ema": 0.9}, twice),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", RECIPES)
def test_a_share_each(net: onnx.ModelProto, case: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, targets = RECIPES[case]
    model, data = onward.prepare(net, **recipe), batches(12, targets)
    alone, (loss, gradients, state) = steps(model, data, None)
    together = run_together(size, monkeypatch, lambda group: steps(model, data, group))
    for losses, (same_loss, same_gradients, same_state) in together:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        np.testing.assert_allclose(same_loss, loss, rtol=1e-5)
        for name, array in gradients.items():
            np.testing.assert_allclose(same_gradients[name], array, rtol=1e-3, atol=1e-6, err_msg=name)
        for name in ("mean", "var"):
            np.testing.assert_allclose(same_state[name], state[name], rtol=1e-5, err_msg=name)
    assert all((together[0][1][2][name] == other[1][2][name]).all() for other in together for name in state)


def test_a_loss_of_pairs_is_refused(net: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    furthest = onnx.parser.parse_function("""
        <domain: "mine", opset_import: ["": 21]>
        Furthest (x, target) => (loss) { difference = Sub(x, target) loss = ReduceMax<keepdims=0>(difference) }""")
    model = onward.prepare(net, loss=furthest)
    with pytest.raises(onward.Error, match="ReduceMax"):
        run_together(2, monkeypatch, lambda group: steps(model, batches(1, amounts), group))


def test_each_process_draws_its_own_numbers(net: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a generator that goes on as that of one process does."""
    net = onnx.ModelProto.FromString(net.SerializeToString())
    dropped = onnx.helper.make_node("Dropout", ["flat", "ratio"], ["dropped"])
    net.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "ratio"))
    net.graph.node.insert(4, dropped)
    net.graph.node[2].op_type = "Identity"  # no zeros but those
    net.graph.node[5].input[0] = "dropped"
    model = onward.prepare(net, loss="mse", optimizer="sgd:lr=0")
    image = np.random.default_rng(0).normal(size=(1, 1, 8, 8)).astype(np.float32)
    same = {"image": image, "target": np.zeros((1, 10), np.float32)}

    def state_and_gradient(group: ProcessGroup) -> tuple[np.ndarray, np.ndarray]:
        with onward.engines.start(model, strategy="ddp", sync_batch_norm=False) as engine:
            engine.step(same)
            return engine.state()["rng"], engine.gradients(same)["w2"]

    with onward.engines.start(model) as engine:
        engine.step(same)
        expected = engine.state()["rng"]
    found = run_together(2, monkeypatch, state_and_gradient)
    for rng, gradient in found:
        assert (rng == expected).all()
        dropped_by_all = np.mean(~gradient.any(axis=1))
        assert 0.1 < dropped_by_all < 0.4  # half of them, if all had drawn the same


# ---- processes of PyTorch --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return parallel_models.write_both(tmp_path_factory.mktemp("models"))


def test_ddp_and_fsdp(models: dict[str, str], tmp_path: Path) -> None:
    """Two processes: clipping and accumulation, BatchNormalization, labels that are ignored, batches of any size."""
    runs = [(models["cnn"], torch_options("ddp")), (models["gpt"], torch_options("fsdp"))]
    compare(runs, 2, tmp_path / "found.json")


@pytest.mark.slow
def test_three_processes(models: dict[str, str], tmp_path: Path) -> None:
    options = [{"strategy": "ddp"}, torch_options("ddp"), torch_options("fsdp")]
    compare([(path, chosen) for path in models.values() for chosen in options], 3, tmp_path / "found.json")


@pytest.mark.slow
def test_hybrid(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes as two machines of two."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    compare([(path, torch_options("hybrid")) for path in models.values()], 4, tmp_path / "found.json")


@pytest.mark.slow
def test_memory_of_fsdp(tmp_path: Path) -> None:
    """Of a GPT with twelve layers, a process of two holds at most 60 % of parameters, gradients and state."""
    parallel_models.write_gpt(tmp_path / "gpt.onnx", layers=12, width=32)
    path = str(tmp_path / "gpt.onnx")
    runs = [(path, torch_options("ddp")), (path, {**torch_options("fsdp"), "recompute": 1})]
    whole, shard = compare(runs, 2, tmp_path / "found.json")
    assert shard["blocks"] == 12
    assert 0 < shard["bytes"] <= 0.6 * whole["bytes"]


# ---- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(net: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(net, path)
    return path


def test_train(file: Path, digits: Path, tmp_path: Path) -> None:
    """A run of two processes has the curve of one, in its log, in the metrics, and resumed by one alone."""
    alone = train(file, digits, tmp_path / "alone", "--epochs", "4")
    two = train(file, digits, tmp_path / "two", "--epochs", "2", "--nproc", "2", "-o", str(tmp_path / "out.onnx"))
    assert (tmp_path / "out.onnx").exists()
    assert len([event for event in two.log if event["event"] == "start"]) == 1
    onward.resume(two.path, epochs=4, quiet=True)
    np.testing.assert_allclose(curve(two), curve(alone), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_that_was_killed_is_named(rank: int, file: Path, digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_training(file, digits, run, "--epochs", "100000", "--save-every", "0.2", "--nproc", "2")
    while process.poll() is None and not (len(workers := workers_of(run)) == 2 and (run / "training.onnx").exists()):
        time.sleep(0.2)
    (killed,) = [one for one in workers if psutil.Process(one).environ()["RANK"] == str(rank)]
    os.kill(killed, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"process {rank} of 2 was killed (SIGKILL)" in err or "does not answer" in err, err
    assert f"onward train --resume {run}" in err
    before = onward.Run(run).progress["epoch"]
    assert onward.resume(run, epochs=before + 1, quiet=True).progress["epoch"] == before + 1


@pytest.mark.slow
def test_twenty_kills(file: Path, digits: Path, tmp_path: Path) -> None:
    """A worker that is killed is started again, with the others, and nothing is lost beyond the last save."""
    kill_and_compare(20, file, digits, tmp_path, "--epochs", "400", "--save-every", "0.3", "--nproc", "2")


@needs("torch")
@pytest.mark.slow
def test_kills_while_all_write(file: Path, digits: Path, tmp_path: Path) -> None:
    """The same where each process writes its shards, while steps go on: it saves nearly all the time."""
    options = ("--engine", "torch", "--strategy", "fsdp", "--no-compile", "--epochs", "100", "--save-every", "0.02")
    kill_and_compare(4, file, digits, tmp_path, *options, "--nproc", "2")


def kill_and_compare(number: int, file: Path, digits: Path, tmp_path: Path, *options: str) -> None:
    undisturbed = train(file, digits, tmp_path / "undisturbed", *options)
    run = tmp_path / "disturbed"
    process = start_training(file, digits, run, *options, "--restarts", str(2 * number))
    luck, kills, seen = random.Random(0), 0, -1
    while process.poll() is None and kills < number:
        time.sleep(luck.uniform(0.5, 2))
        workers = workers_of(run)
        step = onward.Run(run).progress["step"] if (run / "training.onnx").exists() else -1
        if len(workers) == 2 and step > seen:  # each has made some way
            os.kill(luck.choice(workers), signal.SIGKILL)
            kills, seen = kills + 1, step
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert kills == number
    expected = {state.name: state.array for state in all_states(undisturbed.model)}
    for state in all_states(onward.Run(run).model):
        assert (state.array == expected[state.name]).all(), state.name


@needs("ray", "torch")
@pytest.mark.slow
def test_ray(file: Path, digits: Path, tmp_path: Path) -> None:
    """Workers of Ray have the curve of one process; if one is killed, Ray starts all again, and nothing is lost."""
    alone = train(file, digits, tmp_path / "alone", "--epochs", "100")
    options = ("--epochs", "100", "--save-every", "0.1", "--launch", "ray", "--workers", "2", "--restarts", "2")
    run = tmp_path / "ray"
    process = start_training(file, digits, run, *options)
    while process.poll() is None and not ((run / "training.onnx").exists() and onward.Run(run).progress["step"]):
        time.sleep(0.1)
    workers = [
        child for child in psutil.Process(process.pid).children(recursive=True) if "RayTrainWorker" in child.name()
    ]
    assert len(workers) == 2 and process.poll() is None
    workers[1].kill()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    made = onward.Run(run)
    (resumed,) = [event["step"] for event in made.log if event["event"] == "resume"]
    far = 100  # steps, until rounding shows
    assert resumed < far and made.progress["step"] == alone.progress["step"]
    np.testing.assert_allclose(curve(made)[:far], curve(alone)[:far], rtol=1e-5)
    assert not list(tmp_path.glob(".ray*"))


def workers_of(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if entry.name.isdecimal() and str(run).encode() in command and b"LOCAL_RANK=" in environment:
            found.append(int(entry.name))
    return found
