"""Loads a program and its state, and writes what it computes: `python child.py PROGRAM STATE INPUTS RESULTS`.

A process of its own runs this, with nothing of Onward in it.
"""

from __future__ import annotations

import importlib.util
import sys

import torch


def main(program: str, state: str, inputs: str, results: str) -> None:
    spec = importlib.util.spec_from_file_location("written", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.load(state)[0]
    given = torch.load(inputs, weights_only=True)
    found: dict[str, torch.Tensor] = {}
    if given is not None:
        with torch.no_grad():
            made = model.eval()(*given)
        found = made if isinstance(made, dict) else {"": made}
    torch.save({"state": {name: list(x.shape) for name, x in model.state_dict().items()}, "outputs": found}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
