"""Checkpoints on the command line: shown, imported, exported, compared, and trained on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from commands import failed, run
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.agreement.tolerance import compare_elements

STEPS, MORE = 5, 4


def batches() -> tuple[np.ndarray, np.ndarray]:
    """As many samples as are trained, 8 in a batch."""
    rng = np.random.default_rng(0)
    count = 8 * (STEPS + MORE)
    return rng.standard_normal((count, 64)).astype("f"), rng.integers(0, 10, count)


class Digits:
    """The model of `digits.onnx` in PyTorch, with an optimizer that has two groups, and a schedule."""

    def __init__(self) -> None:
        import torch

        source = onward.load("digits.onnx")
        self.module = torch.nn.Sequential()
        for name, shape in (("fc1", (64, 32)), ("fc2", (32, 10))):
            layer = torch.nn.Linear(*shape)
            layer.load_state_dict({key: torch.tensor(source.array(f"{name}.{key}")) for key in ("weight", "bias")})
            self.module.add_module(name, layer)
        weights = [layer.weight for layer in self.module]
        groups: Any = [{"params": weights}, {"params": [layer.bias for layer in self.module], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)

    def train(self, first: int, last: int, clip: float | None = None) -> list[float]:
        import torch

        images, labels = (torch.from_numpy(each) for each in batches())
        losses = []
        for at in range(first, last):
            part = slice(8 * at, 8 * at + 8)
            hidden = torch.relu(self.module.fc1(images[part]))
            loss = torch.nn.functional.cross_entropy(self.module.fc2(hidden), labels[part])
            self.optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, path: str) -> None:
        import torch

        states = {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        more = {"global_step": STEPS, "rng": torch.get_rng_state()}
        torch.save({**{key: each.state_dict() for key, each in states.items()}, **more}, path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and a checkpoint of it, whose optimizer has numbers instead of names."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    onnx.save(models.digits_mlp(), "digits.onnx")
    digits = Digits()
    digits.train(0, STEPS)
    digits.save("run.pt")
    order = ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"]
    Path("names.txt").write_text("\n".join(order))
    return tmp_path


IMPORT = ("--like", "digits.onnx", "--loss", "cross_entropy", "--names", "names.txt")


def test_into_a_training_model_and_out_again(folder: Path) -> None:
    dry = run("convert", "run.pt", *IMPORT, "--dry-run", "-o", "run.onnx").stdout
    assert "4 of 4 tensors" in dry and "adamw:" in dry and "cosine" in dry and "would write  run.onnx" in dry
    assert not Path("run.onnx").exists()
    plan = json.loads(run("convert", "run.pt", *IMPORT, "--dry-run", "--json").stdout)
    assert plan["step"] == STEPS and plan["names"]["fc1.weight"] == "fc1.weight" and len(plan["slots"]) == 8
    assert [len(group["parameters"]) for group in plan["groups"]] == [2, 2]
    said = run("convert", "run.pt", *IMPORT, "-o", "run.onnx")
    assert "the list that was given" in said.stderr and "wrote run.onnx" in said.stderr
    run("convert", "run.onnx", "--to", "fsdp", "-o", "sharded")
    run("convert", "sharded", "--to", "torch", "-o", "again.pt")
    assert "equal" in run("diff", "run.pt", "run.onnx").stdout
    found = onward.diff("sharded", "again.pt")
    assert found.equal and len(found.slots) == 8
    for other in ("sharded", "again.pt"):  # which say the same as what they were made of
        assert all(pair.equal for pair in (*onward.diff("run.pt", other).tensors, *onward.diff("run.pt", other).slots))


def test_a_loop_that_saves_over_its_checkpoint(folder: Path) -> None:
    """A training model that reads tensors from a checkpoint is refused when another loop replaces the file."""
    said = run("convert", "run.pt", *IMPORT, "-o", "run.onnx").stderr
    assert "it reads tensors from run.pt: keep unchanged" in said
    run("convert", "run.pt", *IMPORT, "-o", "copied.onnx", "--data", "data")
    before = onward.load("copied.onnx").array("fc1.weight").copy()
    digits = Digits()
    digits.train(0, STEPS + MORE)
    digits.save("run.pt")
    message, hint = failed("describe", "run.onnx")
    assert "has changed in `run.pt` since the model was saved" in message and "`--data data`" in hint
    assert "OW134" in run("check", "run.onnx", code=1).stdout
    assert np.array_equal(onward.load("copied.onnx").array("fc1.weight"), before)


@pytest.mark.usefixtures("untried")
def test_the_state_alone(folder: Path) -> None:
    run("convert", "run.pt", *IMPORT, "-o", "run.onnx")
    assert "--program/--only-state" in run("convert", "--help").stdout
    for flags in ((), ("--only-state",)):  # of a checkpoint comes a checkpoint
        said = run("convert", "run.onnx", "--to", "torch", *flags, "-o", "state.pt", "--force").stderr
        assert ("`--program`" in said) == (not flags)
        assert not Path("state.py").exists()
        assert onward.diff("state.pt", "run.pt").equal
    run("convert", "run.onnx", "--to", "torch", "--program", "-o", "program.pt")
    assert Path("program.py").exists()
    run("prepare", "digits.onnx", "--loss", "cross_entropy", "-o", "own.onnx")
    run("convert", "own.onnx", "--to", "torch")  # and of what was never one comes a program
    assert Path("own.py").exists()
    said, hint = failed("convert", "run.onnx", "--to", "jax", "--only-state", code=2)
    assert "`jax` is not a checkpoint format" in said and "torch" in hint
    run("convert", "run.pt", "--to", "safetensors")
    assert list(onward.open_checkpoint("run.safetensors").tensors) == list(onward.open_checkpoint("run.pt").tensors)


def test_who_looks_on_sees_every_byte(folder: Path) -> None:
    from onward.model.storage.files import report_writes_to

    class Seen:
        total = done = 0

        def begin(self, size: int) -> None:
            self.total += size

        def advance(self, size: int) -> None:
            self.done += size

    for format, path in (("dcp", "sharded"), ("orbax", "orbax"), ("safetensors", "only.safetensors")):
        seen = Seen()
        with report_writes_to(seen):
            onward.to_checkpoint("run.pt", path, format=format)
        assert seen.total > 9000 and abs(seen.done - seen.total) < 32, format  # counters are more or fewer


def test_training_goes_on(folder: Path) -> None:
    """With the losses that PyTorch would have had, step and schedule continued."""
    digits = Digits()
    expected = digits.train(0, STEPS + MORE)[STEPS:]
    images, labels = batches()
    np.savez("rest.npz", image=images[8 * STEPS :], labels=labels[8 * STEPS :])
    options = ("--data", "rest.npz", "--batch-size", "8", "--no-shuffle", "--run", "runs/x")
    arguments = ("digits.onnx", "--from", "run.pt", "--loss", "cross_entropy", "--names", "names.txt", *options)
    ended = json.loads(run("train", *arguments, "-o", "out.onnx", "--json").stdout)
    training = onward.load("runs/x/training.onnx")
    assert training.array("step") == STEPS + MORE and ended["output"] == "out.onnx"
    log = [json.loads(line) for line in Path("runs/x/log.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in log if event["event"] == "step"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not onward.diff("out.onnx", "digits.onnx").only_a and not Path("out.data").exists()
    run("train", "--config", "runs/x/config.yaml", "--run", "runs/again")
    again = [event["loss"] for event in onward.Run("runs/again").log if event["event"] == "step"]
    assert again == losses
    Path("run.pt").unlink()  # all that the run needs is in its folder
    run("train", "--resume", "runs/x", "--epochs", "2")
    assert onward.load("runs/x/training.onnx").array("step") == STEPS + 2 * MORE
    digits.save("expected.pt")
    near = onward.diff(training, "expected.pt", rtol=1e-3, atol=1e-5)
    assert len(near.slots) == 8 and all(pair.equal for pair in (*near.tensors, *near.slots))
    found = {fact.name: fact for fact in onward.diff(training, "expected.pt").facts}
    assert found["schedule"].equal and found["optimizer"].equal
    assert all(fact.equal for name, fact in found.items() if name.startswith(("lr", "learning rate now")))
    run("convert", "runs/x/training.onnx", "--to", "torch", "-o", "after.pt")
    assert any(
        fact.name == "random numbers, torch, CPU" and fact.equal for fact in onward.diff("after.pt", training).facts
    )
    said, _ = failed("train", *arguments, "--lr", "1")
    assert said == "`lr` has no effect with a checkpoint"


def test_what_no_checkpoint_holds_is_said(folder: Path) -> None:
    assert "gradient clipping; gradient accumulation" in run("show", "run.pt").stdout
    said = ("--clip", "0.1", "--accumulate", "2", "--ema", "0.9", "--freeze", "fc1.bias", "--step", str(STEPS))
    plan = json.loads(run("convert", "run.pt", *IMPORT, *said, "--dry-run", "--json").stdout)
    assert plan["clip"] == {"norm": 0.1} and plan["recipe"] == {"accumulate": 2, "ema": 0.9}
    assert [group["parameters"] for group in plan["groups"]] == [["fc1.weight", "fc2.weight"], ["fc2.bias"]]
    assert "taken as none: gradient clipping" in run("convert", "run.pt", *IMPORT, "--dry-run").stdout
    message, hint = failed("convert", "run.pt", *IMPORT, "--updates-per-epoch", "2", "-o", "x.onnx")
    assert (
        message == "its scheduler made 5 steps in 5 updates, which is not one in 2" and "--updates-per-epoch 1" in hint
    )
    message, hint = failed("train", "digits.onnx", "--data", "x.npz", "--loss", "ce", "--updates-per-epoch", "2")
    assert message == "`updates_per_epoch` has no effect without a checkpoint" and "--checkpoint" in hint

    digits = Digits()
    digits.train(0, STEPS)
    expected = digits.train(STEPS, STEPS + MORE, clip=0.1)
    images, labels = batches()
    np.savez("rest.npz", image=images[8 * STEPS :], labels=labels[8 * STEPS :])
    arguments = ("digits.onnx", "--from", "run.pt", "--loss", "cross_entropy", "--names", "names.txt", "--clip", "0.1")
    run("train", *arguments, "--data", "rest.npz", "--batch-size", "8", "--no-shuffle", "--run", "clipped")
    losses = [event["loss"] for event in onward.Run("clipped").log if event["event"] == "step"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@needs("torch")
def test_differences(folder: Path) -> None:
    import torch

    tree = torch.load("run.pt", weights_only=True)
    tree["model"]["fc1.bias"][:3] += 0.5
    tree["model"]["fc2.bias"][0] = torch.nan
    tree["model"]["extra"] = torch.ones(2)
    tree["optimizer"]["state"][0]["exp_avg"][0, 0] = 7
    tree["optimizer"]["param_groups"][1]["eps"] = 1e-7
    tree["global_step"] = 9
    wrapped = {f"module.{name}": tensor for name, tensor in tree["model"].items()}
    torch.save({**tree, "model": wrapped}, "other.pt")
    done = json.loads(run("diff", "run.pt", "other.pt", "--json", code=1).stdout)
    different = {pair["name"]: pair for pair in done["tensors"] + done["slots"] if not pair["equal"]}
    assert {name: pair["differ"] for name, pair in different.items()} == {
        "fc1.bias": 3,
        "fc2.bias": 1,
        **{name: 1 for name in different if name.endswith("/exp_avg")},
    }
    assert len(different) == 3 and different["fc1.bias"]["absolute"] == pytest.approx(0.5)
    assert done["only_b"] == ["module.extra"]
    facts = {fact["name"]: (fact["a"], fact["b"]) for fact in done["facts"] if not fact["equal"]}
    assert facts["step"] == (STEPS, 9) and [values for name, values in facts.items() if "eps" in name] == [(1e-8, 1e-7)]
    near = onward.diff("run.pt", "other.pt", atol=1)
    assert [pair.name for pair in near.tensors if not pair.equal] == ["fc2.bias"]
    said = run("diff", "run.pt", "other.pt", code=1).stdout
    assert "3 elements differ, at most 0.5 apart" in said and "module.extra" in said and "fc1.weight  " not in said
    assert "fc1.weight  " in run("diff", "run.pt", "run.pt", "--params").stdout


@pytest.mark.parametrize("name", ["accelerate", "trainer", "lightning.ckpt", "deepspeed/zero3", "ort/entropy"])
def test_all_of_a_checkpoint_is_equal_to_itself(name: str) -> None:
    found = onward.diff(CHECKPOINTS / name, CHECKPOINTS / name)
    assert found.equal and found.tensors and found.slots and len(found.facts) > 8


def test_a_module_in_place_of_a_model(folder: Path) -> None:
    Path("project.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        for name, part in ('fc1', nn.Linear(64, 32)), ('relu', nn.ReLU()), ('fc2', nn.Linear(32, 10)):\n"
        "            self.add_module(name, part)\n"
    )
    np.savez("inputs.npz", batches()[0][:8])
    how = ("--module", "project:Net", "--inputs", "inputs.npz", "--loss", "cross_entropy", "--names", "names.txt")
    run("convert", "run.pt", *how, "-o", "run.onnx")
    assert onward.diff("run.pt", "run.onnx").equal
    said, hint = failed("convert", "run.pt", *how[:3], "names.txt", *how[4:], "-o", "other.onnx")
    assert "`names.txt` is not an .npz file" in said and "savez" in hint


def test_a_model_that_has_its_graph(tmp_path: Path) -> None:
    """Of ONNX Runtime, without a model beside it."""
    done = run("convert", str(CHECKPOINTS / "ort" / "entropy"), "-o", str(tmp_path / "run.onnx"))
    assert "learning rate is the initial one" in done.stderr
    assert onward.diff(CHECKPOINTS / "ort" / "entropy", tmp_path / "run.onnx").equal


def test_distances() -> None:
    nan, inf = np.nan, np.inf
    assert compare_elements(np.array([nan, inf, 1]), np.array([nan, inf, 1])).differ == 0
    assert compare_elements(np.array([nan, inf, 1.0]), np.array([0, -inf, 1.5])) == (3, inf, inf)
    assert compare_elements(np.array([1.0, 100]), np.array([1.1, 101]), rtol=0.02).differ == 1
    large = np.array([2**53, 2**53 + 1])
    assert compare_elements(large, large[::-1]).differ == 2
    assert compare_elements(np.zeros((2, 2, 0)), np.zeros((2, 2, 0))) == (0, 0, 0)
    many = np.zeros(3_000_000, np.float16)
    other = many.copy()
    other[[5, 2_500_000]] = 1, 2
    assert compare_elements(many, other) == (2, 2, 1)


@needs("torch")
def test_pickled_module(tmp_path: Path) -> None:
    """The weights of a pickled module are read as data, and its class is named."""
    import torch

    path = str(tmp_path / "module.pt")
    for content in (torch.nn.Linear(2, 3), {"model": torch.nn.Linear(2, 3), "epoch": 1}):
        torch.save(content, path)
        assert "`torch.nn.modules.linear.Linear`, and none of it ran" in run("describe", path).stdout
        run("convert", path, "--to", "safetensors", "-o", str(tmp_path / "out.safetensors"), "--force")
        assert onward.open_checkpoint(tmp_path / "out.safetensors").tensors["weight"].shape == (3, 2)


@needs("torch")
def test_one_of_several_modules(tmp_path: Path) -> None:
    import torch

    modules = {"discriminator": torch.nn.Linear(2, 1), "generator": torch.nn.Linear(3, 2)}
    optimizers = {f"optimizer of {n}": torch.optim.Adam(m.parameters()).state_dict() for n, m in modules.items()}
    torch.save({name: module.state_dict() for name, module in modules.items()} | optimizers, tmp_path / "gan.pt")
    path, output = str(tmp_path / "gan.pt"), str(tmp_path / "weights.safetensors")
    assert "modules     `discriminator`, `generator`" in run("describe", path).stdout
    run("convert", path, "--to", "safetensors", "--module", "generator", "-o", output)
    weight = onward.open_checkpoint(output).tensors["weight"].array()
    np.testing.assert_array_equal(weight, modules["generator"].weight.detach().numpy())
    said, hint = failed("convert", path, "--to", "lightning", "--module", "generator", "-o", str(tmp_path / "out.ckpt"))
    assert "holds 2 modules and 2 optimizers" in said and "--like model.onnx --module generator" in hint
    said, hint = failed("convert", path, "--to", "safetensors", "--module", "critic", "-o", f"{output}.safetensors")
    assert "has no module `critic`" in said and "`discriminator`, `generator`" in hint


def test_trees_in_files_of_numpy(tmp_path: Path) -> None:
    kernel, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(3, np.float32)
    np.savez(tmp_path / "a.npz", **{"params/dense/kernel": kernel, "params/dense/bias": bias, "step": np.int32(7)})
    np.savez(tmp_path / "b.npz", **{"['params']['dense']['kernel']": kernel, "['params']['dense']['bias']": bias})
    for name in ("a", "b"):
        checkpoint = onward.open_checkpoint(tmp_path / f"{name}.npz")
        assert {*checkpoint.tensors} == {"dense/kernel", "dense/bias"}
        np.testing.assert_array_equal(checkpoint.tensors["dense/kernel"].array(), kernel)
        assert checkpoint.step == (7 if name == "a" else None)
    np.savez(tmp_path / "data.npz", image=kernel, labels=bias)
    with pytest.raises(onward.Error, match="has no known checkpoint format"):
        onward.open_checkpoint(tmp_path / "data.npz")


@needs("torch")
def test_count_of_the_optimizer_is_the_progress(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ck.pt")
    assert "progress    step 1\n" in run("describe", str(tmp_path / "ck.pt")).stdout


def test_looking_at_one() -> None:
    like = " --like model.onnx --loss cross_entropy"
    for name, options in (("trainer", ""), ("accelerate", like), ("ort/entropy", "")):
        assert (
            f"onward convert {CHECKPOINTS / name}{options} -o run.onnx\n" in run("show", str(CHECKPOINTS / name)).stdout
        )
    said = run("show", str(CHECKPOINTS / "accelerate"), "--params").stdout
    assert "weight  " in said and "momentum_buffer" in said
    assert "--to" in run("convert", "--help").stdout and "safetensors" in run("convert", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ("convert run.pt --like digits.onnx --to hf", "`--like` has no effect with `--to`", "leave one of them out"),
        ("convert run.pt --to hf --loss mse", "`--loss` has no effect with `--to`", "leave one of them out"),
        ("convert run.pt --only-state", "`--only-state` needs `--to`", "--to torch"),
        ("convert run.pt --program", "`--program` needs `--to`", "--to torch"),
        ("convert run.pt --to torch --program", "`run.pt` is not a training model", "--like model.onnx"),
        ("convert run.pt --to dcp --program", "cannot write a program for `dcp`", "torch, keras"),
        ("convert run.pt --to safetensor -o x", "`safetensor` is not one of `torch`", "safetensors"),
        ("convert run.pt --to lightning -o x", "a file of lightning needs a suffix", "x.ckpt"),
        ("convert run.pt --like digits.onnx --names digits.onnx", "cannot read `digits.onnx`", "name per line"),
        (
            "train digits.onnx --data x.npz --checkpoint run.pt --find-lr",
            "`--checkpoint` has no effect",
            "stores its learning rate",
        ),
    ],
)
def test_misuse(folder: Path, arguments: str, message: str, hint: str) -> None:
    said, way_out = failed(*arguments.split(), code=2)
    assert message in said and hint in way_out


def test_refusals(folder: Path) -> None:
    said, hint = failed("convert", "run.pt", "-o", "run.onnx")
    assert "holds the state of a run" in said and "--like" in hint
    said, hint = failed("convert", "run.pt", "--like", "digits.onnx", "--names", "names.txt")
    assert "names the loss" in said and "--loss" in hint
    assert failed("convert", "run.pt", "--to", "hf", "-o", "names.txt")[0] == "`names.txt` already exists"
    assert failed("convert", "run.pt", "--to", "lightning", "-o", "run.pt")[0] == "`run.pt` is the input model"
    Path("new").mkdir()
    run("convert", "run.pt", "--to", "hf", "-o", "new")
    assert "is not empty" in failed("convert", "run.pt", "--to", "dcp", "-o", "new", "--force")[0]
    said, hint = failed("train", "digits.onnx", "--data", "x.npz", "--loss", "mse", "--names", "names.txt")
    assert "`names` has no effect" in said and "--checkpoint" in hint
    assert "`nothing` does not exist" in failed("diff", "run.pt", "nothing")[0]
