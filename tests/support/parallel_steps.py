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
        held, blocks = (held_bytes(engine), len(engine._forward.blocks())) if "engine" in options else (0, 0)
        held = max(engine.group.gather(held))
        norms = {name: float(np.linalg.norm(array)) for name, array in gradients.items()}
        return {"losses": losses, "evaluated": evaluated, "norms": norms, "bytes": held, "blocks": blocks}


def held_bytes(engine: Any) -> int:
    """Bytes of the state on this process, and of the copies of parameters that only its forward pass reads."""
    tensors, forward = [engine._local(name) for name in engine._carried], engine._forward
    if hasattr(engine, "_owner"):  # a pipeline
        tensors += [engine._copy(name) for name in forward.places if engine._owner(name) != engine.group.rank]
    if hasattr(engine, "_fragments"):  # DeepSpeed
        copies = map(forward.parameter, engine._fragments)
        tensors += [x.ds_tensor if engine._stage == 3 else x.detach() for x in copies]
    return sum(x.nbytes for x in tensors)


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
