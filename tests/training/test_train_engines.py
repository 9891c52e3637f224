"""Runs on every engine: the same losses, and a run that changes from one to another goes on."""

from __future__ import annotations

import models
import numpy as np
import pytest
from marks import needs

import onward
from onward.errors import UnknownNameError, UnsupportedError

FRAMEWORKS = [
    pytest.param("numpy", {}),
    pytest.param("torch", {"compile": False}, marks=needs("torch")),
    pytest.param("jax", {}, marks=needs("jax")),
    pytest.param("tensorflow", {"compile": False}, marks=needs("tensorflow")),
]
RECIPE = {"loss": "cross_entropy", "optimizer": "adam:lr=1e-3,eps=1e-3", "schedule": "cosine:steps=20"}


def data():
    rng = np.random.default_rng(0)
    name = onward.load(models.digits_mlp()).inputs[0].name
    return {name: rng.standard_normal((160, 64)).astype("f"), "labels": rng.integers(0, 10, 160)}


def losses(run):
    return [row["loss"] for row in run.read_log() if row["event"] == "step"]


def trained(folder, epochs=2, **options):
    return onward.train(
        models.digits_mlp(), data(), epochs=epochs, batch_size=16, run=folder, quiet=True, **RECIPE, **options
    )


@pytest.mark.slow("jax-options2")
@pytest.mark.parametrize(("engine", "options"), FRAMEWORKS)
def test_a_run_gives_the_same_losses_everywhere(engine, options, tmp_path):
    expected, found = trained(tmp_path / "a"), trained(tmp_path / "b", engine=engine, **options)
    assert len(losses(found)) == 20
    np.testing.assert_allclose(losses(found), losses(expected), rtol=1e-5)
    best = [run.load_best().graph.initializers["fc1.weight"].const_value.numpy() for run in (expected, found)]
    np.testing.assert_allclose(best[1], best[0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow("False-jax-options2", "False-tensorflow-options3", "False-torch-options1", "True-torch-options1")
@pytest.mark.parametrize(("engine", "options"), FRAMEWORKS)
@pytest.mark.parametrize("back", [False, True])
def test_a_run_goes_on_with_another_engine(engine, options, back, tmp_path):
    """Moments, step count, schedule and the order of data move with it."""
    whole = trained(tmp_path / "whole")
    first, second = (engine, "onnxruntime") if back else ("onnxruntime", engine)
    run = trained(tmp_path / "moving", 1, engine=first, **(options if back else {}))
    run = onward.resume(run, data(), epochs=2, engine=second, quiet=True)
    assert run.read_config()["engine"] == second
    np.testing.assert_allclose(losses(run), losses(whole), rtol=1e-5)


def test_options_that_an_engine_lacks(tmp_path):
    with pytest.raises(UnsupportedError, match="`onnxruntime` has no option `precision`"):
        trained(tmp_path / "a", precision="bfloat16")
    with pytest.raises(UnknownNameError, match="numpy has no device `cuda`"):
        trained(tmp_path / "b", engine="numpy", device="cuda")
    with pytest.raises(UnknownNameError, match="unknown engine `tourch`") as caught:
        trained(tmp_path / "c", engine="tourch")
    assert "torch" in caught.value.hint
    assert not list(tmp_path.iterdir())


@needs("jax")
def test_a_run_says_when_it_compiles(tmp_path, capsys):
    trained(tmp_path / "run", 1, engine="jax")
    assert capsys.readouterr().err == ""  # it was asked to be quiet
    onward.resume(tmp_path / "run", data(), epochs=2)
    assert "jax compiles the step for" in capsys.readouterr().err


class Stop(onward.Callback):
    def __init__(self, step):
        self._step = step

    def step(self, status):
        if status.step == self._step:
            status.stop("stopped")


@needs("tensorflow")
def test_the_last_batch_of_an_epoch_is_not_compiled_for(tmp_path, capsys):
    """Nor is that of the validation data. A run that goes on with such a batch computes the same bits."""
    rows = {name: array[:40] for name, array in data().items()}  # batches of 16, 16 and 8
    held_out = {name: array[56:80] for name, array in data().items()}  # of 16 and 8
    options = {**RECIPE, "engine": "tensorflow", "batch_size": 16, "validation": held_out}
    whole = onward.train(models.digits_mlp(), rows, epochs=2, run=tmp_path / "whole", **options)
    said = [line for line in capsys.readouterr().err.splitlines() if "compiles" in line]
    assert len(said) == 2 and all("[16, 64]" in line for line in said)
    onward.train(models.digits_mlp(), rows, epochs=2, run=tmp_path / "moving", callbacks=[Stop(2)], **options)
    capsys.readouterr()
    moved = onward.resume(tmp_path / "moving", rows, validation=held_out, epochs=2)
    assert "[8, 64]" not in capsys.readouterr().err
    assert losses(moved) == losses(whole)
    for name, value in onward.load(whole.load_last()).graph.initializers.items():
        np.testing.assert_array_equal(onward.load(moved.last).graph.initializers[name].const_value, value.const_value)
