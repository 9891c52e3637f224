"""Runs of other frameworks as files that anybody may have written: nothing in them is executed, or followed."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_conversions
import models
import numpy as np
import onnx
import pytest
from commands import failed
from full_disks import NAMESPACE, can_mount
from marks import needs

import onward
from onward.errors import InvalidModelError, UnsupportedError
from onward.frameworks.run_files import Framework, restore, with_state, write
from onward.model.state import STEP


def training() -> onward.Model:
    return onward.prepare(models.digits_mlp(hidden=4), loss="cross_entropy", optimizer="adam")


# ---- SavedModels -----------------------------------------------------------------------------------------------------


@needs("tensorflow")
def test_no_function_of_a_saved_model_is_called(tmp_path: Path) -> None:
    import tensorflow as tf

    from onward.frameworks.tensorflow import from_tensorflow, to_tensorflow

    module, marker = to_tensorflow(training()), tmp_path / "marker"
    along = module.training_model()

    @tf.function(input_signature=[])  # type: ignore[misc]
    def with_a_side_effect() -> Any:
        tf.io.write_file(str(marker), "called")
        return {key: tf.constant(value.numpy()) for key, value in along.items()}

    module.training_model = with_a_side_effect
    tf.saved_model.save(module, str(tmp_path / "saved"))
    marker.unlink(missing_ok=True)
    for module in (tmp_path / "saved", str(tmp_path / "saved"), tf.saved_model.load(str(tmp_path / "saved"))):
        try:
            made = from_tensorflow(module)
        except InvalidModelError:
            continue
        np.testing.assert_array_equal(made.array("fc1.weight"), training().array("fc1.weight"))
    assert not marker.exists()


# ---- files of Keras --------------------------------------------------------------------------------------------------

SECRET = b"0123456789abcdef" * 4


def external(h5: Any, group: Any, secret: Path) -> None:
    group.create_dataset("0", (16,), "f4", external=[(str(secret), 0, 64)])


def soft_link(h5: Any, group: Any, secret: Path) -> None:
    import h5py

    group["0"] = h5py.SoftLink("/other")


def external_link(h5: Any, group: Any, secret: Path) -> None:
    import h5py

    with h5py.File(secret.with_suffix(".h5"), "w") as other:
        other["x"] = np.ones(16, "f")
    group["0"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "x")


def virtual(h5: Any, group: Any, secret: Path) -> None:
    import h5py

    external_link(h5, group, secret)
    layout = h5py.VirtualLayout((16,), "f4")
    layout[:] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "x", (16,))
    del group["0"]
    group.create_virtual_dataset("0", layout)


def linked_group(h5: Any, group: Any, secret: Path) -> None:
    import h5py

    h5["elsewhere"] = group
    group["0"] = np.ones(16, "f")
    del h5["vars"]
    h5["vars"] = h5py.SoftLink("/elsewhere")


def huge_pieces(h5: Any, group: Any, secret: Path) -> None:
    group.create_dataset("0", (16,), "f4", chunks=(1 << 28,), maxshape=(None,), compression="gzip")


def text(h5: Any, group: Any, secret: Path) -> None:
    group.create_dataset("0", data=["x"] * 16)


def not_numbered(h5: Any, group: Any, secret: Path) -> None:
    group["\x1b[31m"] = np.ones(16, "f")


def group_in_place(h5: Any, group: Any, secret: Path) -> None:
    group.create_group("0")


@needs("keras")
@pytest.mark.parametrize(
    "damage",
    [external, soft_link, external_link, virtual, linked_group, huge_pieces, text, not_numbered, group_in_place],
)
def test_weights_that_are_elsewhere_are_not_read(damage: Callable[..., None], tmp_path: Path) -> None:
    import h5py

    from onward.frameworks.keras.program import read_weights

    (tmp_path / "secret").write_bytes(SECRET)
    data = io.BytesIO()
    with h5py.File(data, "w") as h5:
        h5["other"] = np.ones(16, "f")
        damage(h5, h5.create_group("vars"), tmp_path / "secret")
    with zipfile.ZipFile(tmp_path / "run.keras", "w") as archive:
        archive.writestr("model.weights.h5", data.getvalue())
    with pytest.raises(InvalidModelError, match=r"run.keras` is not a file of Keras") as raised:
        read_weights(tmp_path / "run.keras", {"vars": [(16,)]})
    assert "\x1b" not in str(raised.value)


@needs("keras")
def test_an_archive_that_unpacks_to_more_than_there_can_be(tmp_path: Path) -> None:
    from onward.frameworks.keras.program import read_weights

    with zipfile.ZipFile(tmp_path / "run.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(200 << 20))
    with pytest.raises(InvalidModelError, match="unpacks to 209715200 bytes"):
        read_weights(tmp_path / "run.keras", {"vars": [(16,)]})


# ---- files of PyTorch ------------------------------------------------------------------------------------------------


class Executes:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("marker", "w")


def change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Puts a value into a tree, at a place such as `optimizer/state/0/step`."""

    def apply(state: dict[str, Any]) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in key.split("/")]
        at: Any = state
        for part in way:
            at = at[part]
        at[last] = value

    return apply


@needs("torch")
def test_states_of_pytorch_are_what_the_training_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import copy

    import torch

    from onward.frameworks.torch import to_torch

    monkeypatch.chdir(tmp_path)
    like = onward.prepare(
        models.digits_mlp(hidden=4), loss="cross_entropy", optimizer="adam", schedule="exponential:gamma=0.9"
    )
    made = to_torch(like, probe=False)
    for parameter in made.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.optimizer.step()
    made.scheduler.step()
    good = {"module": made.module.state_dict(), "optimizer": made.optimizer.state_dict()}
    good["scheduler"] = made.scheduler.state_dict()
    torch.save(good, "good.pt")
    assert restore("torch", Path("good.pt"), like).array(STEP) == 1
    nan = torch.full((4,), torch.nan)
    bad: dict[str, tuple[Any, ...]] = {
        "module": (None, [], {"fc1.weight": 1}, torch.zeros(1)),
        "module/fc1.bias": (1.0, "x", None, torch.zeros(3), torch.zeros(4, dtype=torch.int64), nan, nan * torch.inf,
                            torch.zeros(4).to_sparse(), torch.zeros(4, dtype=torch.complex64)),
        "module/more": (torch.zeros(4),),
        "optimizer": (None, {}, {"state": {}}, {"state": [], "param_groups": []}),
        "optimizer/state/0": (None, [], {}, {"step": "x"}),
        "optimizer/state/0/step": (-5.0, "x", None, torch.zeros(2), torch.tensor(torch.nan), 10**400),
        "optimizer/state/0/exp_avg": (0, torch.zeros(2), torch.tensor(0.0)),
        "optimizer/state/9": ({"step": torch.tensor(1.0)},),
        "optimizer/param_groups/0": (None, {}),
        "optimizer/param_groups/0/lr": ("x", None, float("nan"), [1.0]),
        "optimizer/param_groups/0/betas": (0.9, (0.9,), ("x", "y"), (0.5, 0.999)),
        "optimizer/param_groups/0/params": ([], [0, 1, 2, 4], [1, 0, 2, 3], "0123"),
        "scheduler": (None, [], {}, {"step": 1}),
        "scheduler/last_epoch": ("x", None, 1e400, [0]),
        "scheduler/_last_lr": ([], ["x"], None),
    }  # fmt: skip
    for key, values in bad.items():
        for value in values:
            state = copy.deepcopy(good)
            change(key, value)(state)
            torch.save(state, "bad.pt")
            with pytest.raises(onward.Error) as raised:
                restore("torch", Path("bad.pt"), like)
            assert raised.value.hint, (key, value)
    for payload in (Executes(), {"module": Executes()}):
        Path("bad.pt").write_bytes(pickle.dumps(payload))
        with pytest.raises(InvalidModelError, match="without executing it"):
            restore("torch", Path("bad.pt"), like)
    assert not Path("marker").exists()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_what_is_no_number_does_not_come_back() -> None:
    like = training()
    bias = np.zeros(4, "f")
    assert with_state(like, {"fc1.bias": bias + 1}, "run").array("fc1.bias")[0] == 1
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(UnsupportedError, match=r"`fc1.bias` has infinite or NaN elements"):
            with_state(like, {"fc1.bias": bias + bad}, "run")
    with pytest.raises(UnsupportedError, match="made -1 updates"):
        with_state(like, {STEP: np.asarray(-1)}, "run")
    like.set("fc1.bias", bias - np.inf)  # which it had before
    assert np.isinf(with_state(like, {"fc1.bias": bias - np.inf}, "run").array("fc1.bias")).all()


# ---- what is there already -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "output", "there"),
    [("keras", "my-model.keras", "my_model.py"), ("torch", "my-model.pt", "my_model.py"), ("jax", "run", "run")],
)
def test_files_of_others_are_not_overwritten(
    target: Framework, output: str, there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training().save("training.onnx")
    Path(there).write_text("mine")
    said, hint = failed("convert", "training.onnx", "--to", target, "-o", output)
    assert said == f"`{there}` already exists" and "--force" in hint
    assert Path(there).read_text() == "mine"


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs namespaces of users, for disks that are small")
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in full_conversions.OUTPUTS])
def test_a_full_disk_keeps_what_was_there(target: Framework, tmp_path: Path) -> None:
    onnx.save(models.digits_mlp(hidden=4), tmp_path / "model.onnx")
    script = [*NAMESPACE, sys.executable, full_conversions.__file__, str(tmp_path), target]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("could not write") == len(full_conversions.ROOMS), done.stdout


def test_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another file was replaced by is that of the new run, also with others in its folder."""
    pytest.importorskip("jax")
    write(training(), "jax", tmp_path / "run")
    (tmp_path / "run" / "mine.py").write_text("mine")
    (tmp_path / "run" / "state.safetensors").write_bytes(b"old")
    write(training(), "jax", tmp_path / "run")
    restored = restore("jax", tmp_path / "run", training())
    np.testing.assert_array_equal(restored.array("fc1.weight"), training().array("fc1.weight"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["mine.py", "run.py", "state.safetensors"]
    shutil.rmtree(tmp_path / "run")
