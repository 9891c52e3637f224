"""A process of those that train together, `python parallel_steps.py job.json`: what they make, and what one holds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from parallel_models import batches
from processes import meet

import onward

STEPS = 20


def train(path: str, options: dict[str, Any]) -> dict[str, Any]:
    model = onward.load(path)
    data = batches(model, STEPS)
    with onward.engines.start(model, **options) as engine:
        losses = [float(engine.step(engine.group.part(batch))["loss"]) for batch in data]
        evaluated = float(engine.evaluate(engine.group.part(data[0]))["loss"])
        gradients = engine.gradients(engine.group.part(data[0]))
        held, blocks = (sum(x.nbytes for x in engine.held_tensors()), engine.blocks) if "engine" in options else (0, 0)
        held = max(engine.group.gather(held))
        norms = {name: float(np.linalg.norm(array)) for name, array in gradients.items()}
        return {"losses": losses, "evaluated": evaluated, "norms": norms, "bytes": held, "blocks": blocks}


def main(job: dict[str, Any]) -> None:
    meet(job)
    found = [train(path, options) for path, options in job["runs"]]
    if job["rank"] == 0:
        Path(job["to"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # threads of gloo may still be there, and then the interpreter does not end well
