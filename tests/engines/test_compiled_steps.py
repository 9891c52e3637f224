"""What is compiled, and what is not: odd batches, what is on disk, updates that are alike. Numbers
are those of ONNX Runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from framework_training import assert_trains_alike, equal_layers, trained
from marks import needs

from onward.engines import start
from onward.engines.framework_engine import OddBatches


def batch(rows, width=4):
    return {"x": np.zeros((rows, width), "f"), "labels": np.zeros(rows, int)}


def test_a_batch_is_odd_that_is_like_another_but_for_fewer_rows():
    is_odd = OddBatches(lambda: None)
    given = [batch(16), batch(5), batch(16), batch(5), batch(5), batch(16, 3), batch(32), batch(16), batch(31)]
    assert [is_odd(one) for one in given] == [False, True, False, True, True, False, False, False, True]
    assert [is_odd(batch(7)) for _ in range(4)] == [True, True, False, False]  # they are what comes now


def test_where_whole_batches_are_known_only_the_size_counts():
    is_odd = OddBatches(lambda: 16)
    assert [is_odd(batch(rows)) for rows in (5, 5, 5, 16, 5, 17)] == [True, True, True, False, True, False]
    assert not is_odd({"x": np.float32(1)})


@needs("torch")
@pytest.mark.usefixtures("one_torch_thread")
def test_updates_that_are_alike_are_compiled_once(monkeypatch):
    from onward.engines.torch import compilation, repeated_updates

    found = []

    def split(graph):
        found.append(repeated_updates.split_off_updates(graph))
        return found[-1]

    monkeypatch.setattr(repeated_updates, "FEWEST", 8)
    monkeypatch.setattr(compilation, "split_off_updates", split)
    model, batches = equal_layers(4, optimizer="adamw:lr=0.01,weight_decay=0.1", clip="norm:0.5")
    not_finite = batches[0] | {"x": np.full((6, 4), np.nan, "f")}
    with start(model, engine="torch") as engine:
        engine.step(batches[0])
        before = engine.state()
        engine.step(not_finite)
        for name, array in engine.state().items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert sorted(len(group.calls) for group in found[0].groups) == [4, 4]  # those of matrices, and of biases
    assert_trains_alike(model, batches, engine="torch")


_SECOND = """
import json, torch
from torch._dynamo.utils import counters
from framework_training import equal_layers, trained
torch.set_num_threads(1)
losses = [trained(*equal_layers(1, scale), "torch")[0] for scale in (2.0, 4.0)]
print(json.dumps({"losses": losses, **counters["aot_autograd"]}))
"""


@pytest.mark.slow
@needs("torch")
def test_what_was_compiled_is_on_disk(tmp_path):
    """Another process finds it, and does not take it for what only looks the same: a model with
    another constant.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SECOND]
    expected = [trained(*equal_layers(1, scale), threads=1)[0] for scale in (2.0, 4.0)]
    assert abs(expected[0][0] - expected[1][0]) > 1e-3
    for missed in (True, False):
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        said = json.loads(output.splitlines()[-1])
        np.testing.assert_allclose(said["losses"], expected, rtol=1e-5)
        assert "autograd_cache_bypass" not in said
        assert ("autograd_cache_miss" in said) is missed
        assert "autograd_cache_hit" in said


def test_an_odd_batch_that_does_not_fit_as_it_is_runs_compiled(monkeypatch):
    model, batches = equal_layers(1)
    odd = {name: array[:5] for name, array in batches[0].items()}
    with start(model, engine="numpy") as engine, start(model, threads=1) as other:
        engine.rows = 6
        tried = []

        def fail(*given):
            tried.append(given)
            raise MemoryError

        monkeypatch.setattr(engine._program("step"), "_plain", fail)
        for given in (odd, batches[0]):
            np.testing.assert_allclose(engine.step(given)["loss"], other.step(given)["loss"], rtol=1e-5)
    assert len(tried) == 1
