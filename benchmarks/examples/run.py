"""Convert the examples of a framework as they are, each in a process, and train them in other engines.

    python benchmarks/examples/run.py ~/keras-io/examples                 # a checkout of keras.io's examples
    python benchmarks/examples/run.py ~/keras-io/examples --only vision   # scripts whose path has this text
    python benchmarks/examples/run.py ~/pytorch-examples                  # a checkout of pytorch/examples

A script runs up to its first `fit`, or the first step of each of its optimizers, with random arrays for its data sets.
Its model goes through `from_keras` or `from_torch`, and makes three steps there, on ONNX Runtime and in PyTorch.
Scripts that download something, import a package that is missing, or do not train are skipped with the reason.
Outcomes are stored in outcomes.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
SECONDS = 600
"""Longest CPU time of one script."""
KERAS, TORCH = "keras_script.py", "torch_script.py"
PYTORCH = "pytorch/"
"""Of names of examples of PyTorch in the record."""
_STYLE = ("train", "--dataset", ".", "--save-model-dir", ".", "--style-image", "style.jpg", "--image-size", "64")
SCRIPTS: dict[str, Sequence[Sequence[str]]] = {
    "dcgan/main.py": [("--dataset", "fake", "--dry-run")],
    "fast_neural_style/neural_style/neural_style.py": [_STYLE],
    "gat/main.py": [("--dry-run", "--hidden-dim", "8", "--num-heads", "2")],
    "gcn/main.py": [("--dry-run",)],
    "imagenet/main.py": [("--dummy",)],
    "language_translation/main.py": [("--dry_run",)],
    "legacy/snli/train.py": [("--dry-run",)],
    "mnist/main.py": [("--dry-run",)],
    "mnist_forward_forward/main.py": [("--no_accel",)],
    "mnist_hogwild/main.py": [("--dry-run",)],
    "mnist_rnn/main.py": [("--dry-run",)],
    "regression/main.py": [()],
    "reinforcement_learning/actor_critic.py": [()],
    "reinforcement_learning/reinforce.py": [()],
    "siamese_network/main.py": [("--dry-run",)],
    "super_resolution/main.py": [("--upscale_factor", "3")],
    "time_sequence_prediction/train.py": [()],
    "vae/main.py": [()],
    "word_language_model/main.py": [
        ("--data", ".", "--dry-run", "--model", model)
        for model in ("RNN_TANH", "RNN_RELU", "LSTM", "GRU", "Transformer")
    ],
}
"""Examples of PyTorch that train in one process, and how each is started."""


def outcome_of(child: str, script: Path, *options: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / child), str(script), *options]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    process = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=limit)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"outcome": "slow", "reason": f"takes more than {SECONDS} s of CPU time"}
    try:
        return dict(json.loads(process.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        return {"outcome": "raw", "reason": f"ends with {process.returncode}: {process.stderr[-300:]}"}


def recorded() -> dict[str, Any]:
    return json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.exists() else {}


def record(outcomes: Mapping[str, Any]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(outcomes[name])}" for name in sorted(outcomes)]
    OUTCOMES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with scripts")
    parser.add_argument("--only", nargs="*", default=[], help="text in the path of a script")
    options = parser.parse_args()
    for name, child, script, arguments in runs(options.folder):
        if options.only and not any(text in name for text in options.only):
            continue
        result = outcome_of(child, script, *arguments)
        if child == KERAS and str(result["reason"]).startswith("fails before"):
            result = outcome_of(child, script, "--whole")
        record({**recorded(), name: result})
        print(f"{name}: {result['outcome']} {result.get('seconds', '')} {result.get('reason') or ''}", flush=True)
    for of_torch in (False, True):
        results = [result for name, result in recorded().items() if name.startswith(PYTORCH) is of_torch]
        counts = Counter(result["outcome"] for result in results)
        reached = sum(number for outcome, number in counts.items() if outcome != "skipped")
        framework = "PyTorch" if of_torch else "Keras"
        print(f"{framework}: {counts['exact']} of {reached} that reach training are exact; {dict(counts)}")


def runs(folder: Path) -> Iterator[tuple[str, str, Path, Sequence[str]]]:
    """Yield the name in the record, the child, the script and its arguments."""
    if (folder / "mnist_hogwild").exists():
        for name, starts in SCRIPTS.items():
            for arguments in starts:
                suffix = f" {arguments[-1]}" if len(starts) > 1 else ""
                yield f"{PYTORCH}{name}{suffix}", TORCH, folder / name, arguments
        return
    for script in sorted(folder.rglob("*.py")):
        yield script.relative_to(folder).as_posix(), KERAS, script, ()


if __name__ == "__main__":
    main()
