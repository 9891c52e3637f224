"""Processes of a cluster, started and watched over by Ray Train."""

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

from onward.distribute import way_on
from onward.engines.distributed import RESTARTED, join_group
from onward.errors import TrainingError, UnsupportedError, first_line
from onward.training.run import TRAINING


def launch(arguments: Sequence[str], workers: int, run: str | None, *, restarts: int = 0, device: str = "cpu") -> int:
    """Run the command line in so many workers, and all of them again after a failure; the exit status.

    Files and the folder of the run must be where all workers reach them under the same names.
    """
    for package in ("torch", "ray"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                f"Ray Train starts workers that PyTorch connects, and `{package}` is not installed",
                hint="pip install 'ray[train]' 'onward[torch]'",
            )
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.exceptions import TrainingFailedError

    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init()
    # Ray keeps a few notes about the workers, which nobody needs afterwards.
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
            f"Ray has given up: {first_line(error)}", hint=way_on(None if run is None else Path(run), began)
        ) from error
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        if is_ours:
            ray.shutdown()
    return 0


def _work(job: dict[str, Any]) -> None:
    """What a worker does: the command, in the folder in which it was given."""
    os.chdir(job["folder"])
    has_begun = job["run"] is not None and (Path(job["run"]) / TRAINING).exists()
    (has_begun, *_) = join_group().gather(has_begun)  # before any of them begins
    if has_begun and job["is_new"]:
        os.environ[RESTARTED] = "1"
    sys.argv = ["onward", *job["arguments"]]
    try:
        runpy.run_module("onward", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"the command failed with status {end.code}") from end
