"""Checkpoints of PyTorch, into training models and back: runs go on there and here, with the same losses."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_runs import close, exported, net, same_tree, steps, steps_of_onward

import onward
from onward.checkpoint.pytorch.state_dicts import settings_of
from onward.recipe.optimizers import OPTIMIZERS
from onward.recipe.spec import Spec
from onward.vocabulary.optimizers import TORCH_ROWS
from onward.vocabulary.rows import row_for

torch = pytest.importorskip("torch")
from torch.optim import lr_scheduler as rates  # noqa: E402

Make = Callable[[Any], tuple[Any, Any]]


def _groups(module: Any) -> list[dict[str, Any]]:
    plain = [p for name, p in module.named_parameters() if name.endswith("bias")]
    others = [p for name, p in module.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 3e-3}]


def _with(optimizer: Any, scheduler: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    return optimizer, scheduler(optimizer) if scheduler else None


RUNS: dict[str, Make] = {
    "adamw, cosine": lambda m: _with(
        torch.optim.AdamW(m.named_parameters(), lr=1e-2), lambda o: rates.CosineAnnealingLR(o, 20)
    ),
    "momentum, steps": lambda m: _with(
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), lambda o: rates.StepLR(o, 4)
    ),
    "amsgrad, milestones": lambda m: _with(
        torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True), lambda o: rates.MultiStepLR(o, [3, 8, 8])
    ),
    "rmsprop, a sequence": lambda m: _with(
        torch.optim.RMSprop(m.parameters(), lr=1e-3, centered=True, momentum=0.5),
        lambda o: rates.SequentialLR(o, [rates.LinearLR(o, 0.1, 1.0, 3), rates.ExponentialLR(o, 0.9)], [3]),
    ),
    "nadam, one rate": lambda m: _with(torch.optim.NAdam(m.parameters(), lr=1e-2), None),
    "adagrad, restarts": lambda m: _with(
        torch.optim.Adagrad(m.parameters(), lr=1e-2), lambda o: rates.CosineAnnealingWarmRestarts(o, 3, 2)
    ),
    "adamax, one cycle": lambda m: _with(
        torch.optim.Adamax(m.parameters()),
        lambda o: rates.OneCycleLR(o, 1e-2, 20, cycle_momentum=False, div_factor=4, final_div_factor=50),
    ),
}


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> onward.Model:
    return exported(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", RUNS)
def test_a_run_goes_on_here_and_there(case: str, like: onward.Model, tmp_path: Path) -> None:
    module = net()
    optimizer, scheduler = RUNS[case](module)
    steps(module, optimizer, scheduler, range(5))
    saved = {
        "net": module.state_dict(),
        "opt": optimizer.state_dict(),
        **({"sched": scheduler.state_dict()} if scheduler else {}),
        "rng": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "mine": {"note": ("a", 1, None), 3: {1.5}, "bytes": b"x"},
        "step": 5,
    }
    torch.save(saved, tmp_path / "there.pt")
    expected = steps(module, optimizer, scheduler, range(5, 15))

    model = onward.from_checkpoint(tmp_path / "there.pt", like, loss="cross_entropy")
    model.save(tmp_path / "run.onnx")
    assert not [finding for finding in onward.check(tmp_path / "run.onnx") if finding.severity.name != "INFO"]
    onward.to_checkpoint(tmp_path / "run.onnx", tmp_path / "back.pt", format="torch")
    same_tree(
        torch.load(tmp_path / "back.pt", weights_only=False), torch.load(tmp_path / "there.pt", weights_only=False)
    )

    losses, later = steps_of_onward(onward.load(tmp_path / "run.onnx"), range(5, 10))
    close(losses, expected[:5])
    onward.to_checkpoint(later, tmp_path / "later.pt", format="torch")
    tree = torch.load(tmp_path / "later.pt", weights_only=False)
    module = net()
    optimizer, scheduler = RUNS[case](module)
    module.load_state_dict(tree["net"])
    optimizer.load_state_dict(tree["opt"])
    if scheduler:
        scheduler.load_state_dict(tree["sched"])
    close(steps(module, optimizer, scheduler, range(10, 15)), expected[5:])


def test_groups_of_parameters(like: onward.Model, tmp_path: Path) -> None:
    """Two groups, in another order than that of the module: names are given, or it is refused."""
    module = net()
    optimizer = torch.optim.AdamW(_groups(module), lr=1e-2)
    steps(module, optimizer, None, range(5))
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict()}, tmp_path / "there.pt")
    expected = steps(module, optimizer, None, range(5, 10))
    weights = ["0.weight", "1.weight", "3.weight"]
    biases = ["0.bias", "1.bias", "3.bias"]
    model = onward.from_checkpoint(tmp_path / "there.pt", like, loss="cross_entropy", names=[*weights, *biases])
    close(steps_of_onward(model, range(5, 10))[0], expected)
    optimizer = torch.optim.AdamW([*module.parameters()][::-1], lr=1e-2)
    steps(module, optimizer, None, range(1))
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict()}, tmp_path / "other.pt")
    with pytest.raises(onward.Error, match="names are not stored") as caught:
        onward.from_checkpoint(tmp_path / "other.pt", like, loss="cross_entropy")
    assert "names=" in str(caught.value.hint) and "shapes differ" in str(caught.value.hint)


def _weights_and_biases(module: Any) -> list[dict[str, Any]]:
    return [{"params": each["params"], "weight_decay": each["weight_decay"]} for each in _groups(module)]


def _matrices_and_vectors(module: Any) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in module.parameters() if (p.ndim > 1) is many] for many in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _layers_alike(module: Any) -> list[dict[str, Any]]:
    return [{"params": layer.parameters()} for layer in reversed(module) if [*layer.parameters()]]


@pytest.mark.parametrize(
    ("groups", "momentum", "is_known"),
    [
        (_weights_and_biases, 0.0, False),
        (_weights_and_biases, 0.9, True),
        (_matrices_and_vectors, 0.0, False),
        (_matrices_and_vectors, 0.9, True),
        (_layers_alike, 0.0, True),
        (_layers_alike, 0.9, False),
    ],
)
def test_groups_by_number(
    groups: Callable[[Any], Any], momentum: float, is_known: bool, like: onward.Model, tmp_path: Path
) -> None:
    """Groups in another order than the module: exact if shapes tell, or settings are the same, or names are given."""
    module = net()
    optimizer = torch.optim.SGD(groups(module), lr=0.1, momentum=momentum)
    steps(module, optimizer, None, range(5))
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict()}, tmp_path / "there.pt")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    expected = steps(module, optimizer, None, range(5, 10))
    said: dict[str, Any] = {"loss": "cross_entropy", "step": 5}
    if not is_known:
        with pytest.raises(onward.Error, match="names are not stored") as caught:
            onward.from_checkpoint(tmp_path / "there.pt", like, **said)
        assert "names=[...]" in str(caught.value.hint) and "like=" in str(caught.value.hint)
        said["names"] = order
    model = onward.from_checkpoint(tmp_path / "there.pt", like, **said)
    close(steps_of_onward(model, range(5, 10))[0], expected)


def test_groups_of_a_training_model(like: onward.Model, tmp_path: Path) -> None:
    """Groups of a training model are those of the same settings, whatever their order."""
    module = net()
    optimizer = torch.optim.SGD(_weights_and_biases(module), lr=0.1)
    steps(module, optimizer, None, range(5))
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict()}, tmp_path / "there.pt")
    expected = steps(module, optimizer, None, range(5, 10))
    for decays, is_known in (((0.1, 0.0), True), ((0.0, 0.2), False)):
        groups = [f"*bias:weight_decay={decays[1]}"]
        training = onward.prepare(
            like, loss="cross_entropy", optimizer=f"sgd:lr=0.1,weight_decay={decays[0]}", groups=groups
        )
        if is_known:
            model = onward.from_checkpoint(tmp_path / "there.pt", training, step=5)
            close(steps_of_onward(model, range(5, 10))[0], expected)
        else:
            with pytest.raises(onward.Error, match="names are not stored"):
                onward.from_checkpoint(tmp_path / "there.pt", training, step=5)


def test_assumptions_are_warnings(like: onward.Model, tmp_path: Path) -> None:
    """What could change numbers is a warning in Python, and what cannot is none."""
    module = net()
    module[0].requires_grad_(False)
    backbone, head = [*module[0].parameters(), *module[1].parameters()], [*module[3].parameters()]
    optimizer = torch.optim.AdamW([{"params": backbone[:3]}, {"params": backbone[3:] + head, "lr": 0.01}])
    steps(module, optimizer, None, range(5))
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict()}, tmp_path / "there.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        onward.from_checkpoint(tmp_path / "there.pt", like, loss="cross_entropy")
    rows, frozen, untold = [str(each.message) for each in caught]
    assert "groups are taken in a row" in rows and "`--names`" in rows
    assert frozen == "not trained, without optimizer state: `0.weight`, `0.bias`"
    assert "taken as none: gradient clipping, gradient accumulation" in untold
    assert {each.filename for each in caught} == {__file__}
    names = [name for name, _ in module.named_parameters()]
    said = {"freeze": ["0.*"], "names": names, "clip": float("inf"), "accumulate": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onward.from_checkpoint(tmp_path / "there.pt", like, loss="cross_entropy", **said)


def test_names_that_wrappers_change(like: onward.Model, tmp_path: Path) -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    steps(module, optimizer, None, range(2))
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in module.state_dict().items()}
    torch.save({"m": wrapped, "o": optimizer.state_dict()}, tmp_path / "there.pt")
    expected = steps(module, optimizer, None, range(2, 5))
    model = onward.from_checkpoint(tmp_path / "there.pt", like, loss="cross_entropy")
    close(steps_of_onward(model, range(2, 5))[0], expected)
    onward.to_checkpoint(model, tmp_path / "back.pt", format="torch")
    assert list(torch.load(tmp_path / "back.pt")["m"]) == list(wrapped)
    onward.to_checkpoint(model, tmp_path / "back.safetensors", format="safetensors")
    assert set(onward.open_checkpoint(tmp_path / "back.safetensors").tensors) >= {*wrapped} - {
        "module._orig_mod.1.num_batches_tracked"
    }


@pytest.mark.parametrize("changed", ["a shape", "a name", "a loss", "an optimizer", "a schedule"])
def test_what_does_not_fit_is_named(changed: str, like: onward.Model, tmp_path: Path) -> None:
    module = net()
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=1e-2)
    scheduler = rates.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    steps(module, optimizer, scheduler, range(2))
    state, kept, loss = dict(module.state_dict()), optimizer.state_dict(), "cross_entropy"
    words = {
        "a schedule": "shape of its schedule",
        "a loss": "names the loss",
        "an optimizer": "keeps `exp_avg`, `exp_avg_sq`, `mine`",
    }
    if changed == "a shape":
        state["3.weight"] = torch.zeros(4, 8)
        words["a shape"] = r"`3.weight` is \[4, 8\]"
    if changed == "a name":
        state["head.weight"] = state.pop("3.weight")
        state["head.weight"] = state["head.weight"] + 1
        words["a name"] = r"has no `3\.weight`.*no `head\.weight`"
    if changed == "a loss":
        loss = None
        kept["param_groups"][0]["lr"] = 1e-2
        scheduler = rates.ConstantLR(optimizer, 1.0)
    if changed == "an optimizer":
        kept["state"] = {n: {**slots, "mine": torch.zeros(2)} for n, slots in kept["state"].items()}
    torch.save({"m": state, "o": kept, "s": scheduler.state_dict()}, tmp_path / "there.pt")
    with pytest.raises(onward.Error, match=words[changed]) as caught:
        onward.from_checkpoint(tmp_path / "there.pt", like, loss=loss)
    assert caught.value.hint


def test_settings_are_those_of_the_class() -> None:
    """For every optimizer of a recipe, PyTorch's own class has these settings where it is the counterpart."""
    from onward.frameworks.torch.optimizer import class_of
    from onward.recipe.optimizers import optimizer

    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    for name, kind in OPTIMIZERS.items():
        for variant in kind.variants:
            spec = Spec(name, {"variant": variant})
            row = row_for(TORCH_ROWS, optimizer(name).configure(**spec.options))
            if row is None or not row.is_native:
                with pytest.raises(onward.Error, match="no optimizer of its own"):
                    settings_of(spec, 0.1)
                continue
            settings = settings_of(spec, 0.1)
            theirs = class_of(row)
            known = inspect.signature(theirs).parameters
            made = theirs([parameter], **{key: value for key, value in settings.items() if key in known})
            expected = {key: value for key, value in made.param_groups[0].items() if key != "params"}
            assert settings.keys() == expected.keys(), name
            assert {k: v for k, v in settings.items() if v is not None} == {
                k: v for k, v in expected.items() if v is not None
            }, name


@pytest.mark.parametrize("case", ["adamw, cosine", "momentum, steps"])
def test_distributed_checkpoints(case: str, like: onward.Model, tmp_path: Path) -> None:
    """DCP, which FSDP writes: into a training model and back, and from a run that PyTorch has never seen."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def load(path: Path, scheduled: str) -> tuple[Any, Any, Any]:
        module = net()
        optimizer, scheduler = RUNS[case](module)
        weights, kept = get_state_dict(module, optimizer)
        tree = {"model": weights, "optim": kept, scheduled: scheduler.state_dict()}
        dcp.load(tree, checkpoint_id=path, no_dist=True)
        set_state_dict(module, optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        scheduler.load_state_dict(tree[scheduled])
        return module, optimizer, scheduler

    module = net()
    optimizer, scheduler = RUNS[case](module)
    steps(module, optimizer, scheduler, range(5))
    weights, kept = get_state_dict(module, optimizer)
    there = {"model": weights, "optim": kept, "sched": scheduler.state_dict(), "step": 5}
    dcp.save(there, checkpoint_id=tmp_path / "there", no_dist=True)
    torch.save({"m": module.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}, tmp_path / "p.pt")
    expected = steps(module, optimizer, scheduler, range(5, 10))

    model = onward.from_checkpoint(tmp_path / "there", like, loss="cross_entropy")
    close(steps_of_onward(model, range(5, 10))[0], expected)
    onward.to_checkpoint(model, tmp_path / "back", format="dcp")
    assert steps(*load(tmp_path / "back", "sched"), range(5, 10)) == expected
    onward.to_checkpoint(tmp_path / "p.pt", tmp_path / "other", format="dcp")  # straight through
    assert steps(*load(tmp_path / "other", "scheduler"), range(5, 10)) == expected
    fresh = onward.from_checkpoint(tmp_path / "p.pt", like, loss="cross_entropy", updates_per_epoch=1)
    onward.to_checkpoint(steps_of_onward(fresh, range(5, 7))[1], tmp_path / "later", format="dcp")
    close(steps(*load(tmp_path / "later", "scheduler"), range(7, 10)), expected[2:])
