"""Makes the folder `ray`: a list of checkpoints as Ray Train writes it, around what a loop of PyTorch saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import _CheckpointManagerState

HERE = Path(__file__).parent / "ray"
NAME = "checkpoint_2026-11-16_09-00-00.000001"

if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / NAME).mkdir(parents=True)
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    parts = {"model": module, "optimizer": optimizer, "scheduler": schedule}
    torch.save({"step": 1, **{name: part.state_dict() for name, part in parts.items()}}, HERE / NAME / "state.pt")
    result = {"checkpoint_dir_name": NAME, "metrics": {"loss": 0.5}}
    state = _CheckpointManagerState(
        checkpoint_results=[result], checkpoint_report_indices=[1], latest_checkpoint_result=result,
        pending_training_results=[], pending_validation_specs=[], current_report_index=1,
        validated_checkpoint_dir_names=[], timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )  # fmt: skip
    (HERE / "checkpoint_manager_snapshot.json").write_text(state.json())
