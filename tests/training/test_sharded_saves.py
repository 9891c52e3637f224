"""Saves of which each of several processes writes a part: what comes out is an ordinary training model, or nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from thread_group import run_together

import onward
from onward.engines.distributed import ProcessGroup
from onward.engines.engine import Engine, StateShard
from onward.errors import InvalidModelError
from onward.model.state import all_states
from onward.model.storage import verify_checksums
from onward.training import sharded_saves
from onward.training.folder import Folder
from onward.training.run import Position
from onward.training.sharded_saves import ShardedSaves


@pytest.fixture(scope="module")
def training() -> onward.Model:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[n, 41] x) => (float[n, 16] y) <float[41, 16] w, float[16] b> { m = MatMul(x, w) y = Add(m, b) }""")
    rng = np.random.default_rng(0)
    for name, shape in {"w": (41, 16), "b": (16,)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return onward.prepare(model, loss="mse")


def parts_of(state: dict[str, np.ndarray], group: ProcessGroup) -> dict[str, StateShard]:
    """Numbers in a row, not equally many for each; numbers alone are the first process's."""
    found = {}
    for name, array in state.items():
        flat, share = array.reshape(-1), group.share(array.size)
        if array.size >= group.size or group.is_first:
            found[name] = StateShard(share.start, flat[share].copy(), array.size)
    return found


def begin(group: ProcessGroup, model: onward.Model, run: Path, state: Callable[[Engine], dict[str, np.ndarray]]) -> Any:
    with onward.engines.start(model, strategy="ddp") as engine:
        saves = ShardedSaves(Folder(run), engine)
        saves.begin(parts_of(state(engine), group), Position(step=7)).finish()
        return state(engine)


@pytest.mark.parametrize("size", [2, 3])
def test_a_whole_model(training: onward.Model, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ONNX reads it; the save before the last stays until the next."""
    for number in range(3):

        def drawn(engine: Engine, number: int = number) -> dict[str, np.ndarray]:
            rng = np.random.default_rng(number)
            return {n: (rng.normal(size=x.shape) * 100).astype(x.dtype) for n, x in engine.state().items()}

        expected, *_ = run_together(size, monkeypatch, lambda group: begin(group, training, tmp_path, drawn))
    model = onward.load(tmp_path / "training.onnx")
    assert {state.name: state.role for state in all_states(model)} == {s.name: s.role for s in all_states(training)}
    for state in all_states(model):
        assert (state.array == expected[state.name]).all(), state.name
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load(tmp_path / "training.onnx").graph.initializer}
    assert (weights["w"] == expected["w"]).all()
    assert verify_checksums(tmp_path / "training.onnx")
    data = bytearray((tmp_path / "training.2.data").read_bytes())
    for at in (5, 41 * 16 * 4 - 5):  # of the first process, and of the last one
        damaged = data.copy()
        damaged[at] ^= 1
        (tmp_path / "training.2.data").write_bytes(damaged)
        with pytest.raises(InvalidModelError, match=r"training\.2\.data"):
            verify_checksums(tmp_path / "training.onnx")
    (tmp_path / "training.2.data").write_bytes(data)
    assert {file.name for file in tmp_path.iterdir()} == {"training.onnx", "training.1.data", "training.2.data"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(training: onward.Model, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one of them cannot write, the last save stays, nothing is left behind, and nobody waits for ever."""
    run_together(2, monkeypatch, lambda group: begin(group, training, tmp_path, lambda engine: engine.state()))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((sharded_saves, "write_parts") if rank else ("onward.model.storage.data.write_range",)), fail)
    with pytest.raises(onward.Error, match="No space left"):
        run_together(2, monkeypatch, lambda group: begin(group, training, tmp_path, lambda engine: engine.state()))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
