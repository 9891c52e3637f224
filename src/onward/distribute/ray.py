"""Processes of a cluster, started and supervised by Ray Train."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward.distribute import resumption
from onward.engines.distributed import RESTARTED, join_group
from onward.errors import TrainingError, UnsupportedError, first_line
from onward.training.run import TRAINING


def launch(arguments: Sequence[str], workers: int, run: str | None, *, restarts: int = 0, device: str = "cpu") -> int:
    """Run the command line in Ray workers, restarted together after a failure. Return the exit status.

    Files and the run folder must have the same path on all workers.
    """
    for package in ("torch", "ray"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                f"`--launch ray` needs `{package}`, which is not installed",
                hint="pip install 'ray[train]' 'onward[torch]'",
            )
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init()
    # Ray stores facts about its workers there; they are of no use later.
    notes = Path(run or "runs/run").resolve().with_name(f".ray-{os.getpid()}")
    job = {
        "arguments": list(arguments),
        "folder": os.getcwd(),
        "run": run,
        "is_new": run is None or not (Path(run) / TRAINING).exists(),
    }
    began = time.time()
    try:
        TorchTrainer(
            _work,
            train_loop_config=job,
            torch_config=TorchConfig(backend="gloo" if device == "cpu" else "nccl"),
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=device.startswith("cuda")),
            run_config=RunConfig(
                name=notes.name, storage_path=str(notes.parent), failure_config=FailureConfig(max_failures=restarts)
            ),
        ).fit()
    except TrainingFailedError as error:
        raise TrainingError(
            f"Ray gave up: {first_line(error)}", hint=resumption(None if run is None else Path(run), began)
        ) from error
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        if is_ours:
            ray.shutdown()
    return 0


def _work(job: dict[str, Any]) -> None:
    """Run the command in a worker, in the folder of the original command."""
    os.chdir(job["folder"])
    has_begun = job["run"] is not None and (Path(job["run"]) / TRAINING).exists()
    (has_begun, *_) = join_group().gather(has_begun)  # before any process creates the folder
    if has_begun and job["is_new"]:
        os.environ[RESTARTED] = "1"
    sys.argv = ["onward", *job["arguments"]]
    try:
        runpy.run_module("onward", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the command failed with status {end.code}") from end
