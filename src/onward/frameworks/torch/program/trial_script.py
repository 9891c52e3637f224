"""Script that runs a written program and saves its results. It imports nothing of Onward.

python trial_script.py PROGRAM STATE INPUTS RESULTS [BATCH]
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import numpy as np
import torch


def make_steps(run: Any, batch: str) -> list[float]:
    """Train like the loop in the heading of a program, and return the losses."""
    module, optimizer, scheduler, loss = run
    with np.load(batch) as arrays:
        settings = json.loads(str(arrays["settings"]))
        tensors = {name: torch.from_numpy(arrays[str(i)]) for i, name in enumerate(settings["names"])}
    module.train()
    losses = []
    for i in range(settings["steps"]):
        outputs = module(*(tensors[name] for name in settings["inputs"]))
        terms = [
            (outputs[output] if isinstance(outputs, dict) else outputs, *(tensors[name] for name in targets))
            for output, targets in settings["terms"]
        ]
        if settings["takes_all"]:
            value = loss(outputs, *(tensors[name] for _, targets in settings["terms"] for name in targets))
        else:
            value = loss(*terms[0]) if len(terms) == 1 else loss(*terms)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if scheduler is not None and (settings["step"] + i + 1) % settings["every"] == 0:
            scheduler.step()
        losses.append(float(value))
    return losses


def main(program: str, state: str, inputs: str, results: str, batch: str = "") -> None:
    spec = importlib.util.spec_from_file_location("written", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.load(state)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    tensors = torch.load(inputs, weights_only=True)
    outputs: dict[str, torch.Tensor] = {}
    if tensors is not None:
        with torch.no_grad():
            result = model.eval()(*tensors)
        outputs = result if isinstance(result, dict) else {"": result}
    shapes = {name: list(x.shape) for name, x in model.state_dict().items()}
    losses = make_steps(module.load(state), batch) if batch else []
    torch.save({"state": shapes, "outputs": outputs, "losses": losses}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
