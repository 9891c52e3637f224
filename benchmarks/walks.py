"""Count the work of one call: source files, functions, conversions to protobuf, clones, walks for names.

    python benchmarks/walks.py              # all calls, with their targets
    python benchmarks/walks.py train        # one call

Each call runs twice on a model of two layers, and the second run is counted with `sys.setprofile`,
so that imports and caches do not count. A figure above its target is marked with `!`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import onward

TARGETS: dict[str, dict[str, int]] = {
    "prepare": {"files": 38},
    "start": {"files": 50},
    "train": {"files": 100, "functions": 600, "to_proto": 7, "clones": 12},
    "from_torch": {"files": 90},
    "to_torch": {"files": 95},
}
_PACKAGE = str(Path(onward.__file__).parent)
_COUNTED = {
    "to_proto": f"{_PACKAGE}/model/serde.py:to_proto",
    "clones": "Graph.clone GraphView.clone Function.clone",  # of onnx_ir
    "names": f"{_PACKAGE}/model/core.py:Model.names",
    "inferences": f"{_PACKAGE}/transform/types.py:_infer",
}


def count(call: Callable[[], object]) -> dict[str, int]:
    """Return the numbers of files and functions of Onward that a call visits, and of its expensive calls."""
    files, functions = set(), set()
    calls: Counter[str] = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(_PACKAGE):
            files.add(code.co_filename)
            functions.add(code)
            calls[f"{code.co_filename}:{code.co_qualname}"] += 1
        elif "onnx_ir" in code.co_filename:
            calls[code.co_qualname] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    expensive = {
        name: sum(calls[function] for function in functions_of_name.split())
        for name, functions_of_name in _COUNTED.items()
    }
    return {"files": len(files), "functions": len(functions), **expensive}


def calls_in(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the calls to count, with models and data in a folder."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    x, model, data = torch.randn(4, 8), folder / "model.onnx", folder / "data.npz"
    torch.onnx.export(
        net, (x,), model, dynamo=True, input_names=["x"], output_names=["y"], dynamic_shapes=[{0: "N"}], verbose=False
    )
    random = np.random.default_rng(0)
    np.savez(data, x=random.normal(size=(64, 8)).astype("f"), labels=random.integers(0, 4, 64))
    training = onward.prepare(model, loss="cross_entropy", optimizer="adamw:lr=1e-3")
    runs = iter(range(1_000))

    def train() -> object:
        run = folder / f"run{next(runs)}"
        return onward.train(model, data, loss="cross_entropy", epochs=1, batch_size=32, run=run, quiet=True)

    def from_torch() -> object:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        return onward.from_torch(net, x, loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer)

    return {
        "prepare": lambda: onward.prepare(model, loss="cross_entropy", optimizer="adamw:lr=1e-3"),
        "start": lambda: onward.engines.start(training, engine="onnxruntime"),
        "train": train,
        "from_torch": from_torch,
        "to_torch": lambda: onward.to_torch(training),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files and functions that a call visits.")
    parser.add_argument("calls", nargs="*", choices=[*TARGETS, []], help="which calls to count (default: all)")
    names = parser.parse_args().calls or list(TARGETS)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        calls = calls_in(Path(folder))
        for name in names:
            calls[name]()
            counts = count(calls[name])
            shown = [_shown(what, number, TARGETS[name].get(what)) for what, number in counts.items()]
            print(f"{name:11}", *shown, flush=True)


def _shown(what: str, number: int, target: int | None) -> str:
    limit = "" if target is None else f" (target {target}{'!' if number > target else ''})"
    return f"{f'{what} {number}{limit}':30}"


if __name__ == "__main__":
    main()
