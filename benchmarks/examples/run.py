"""Convert the examples of a framework as they are, each in a process, and train them in other engines.

    python benchmarks/examples/run.py ~/keras-io/examples                 # a checkout of keras.io's examples
    python benchmarks/examples/run.py ~/keras-io/examples --only vision   # scripts whose path has this text

A script runs up to its first `fit`, with random arrays for the built-in data sets. Its model goes through
`from_keras`, and makes three steps in Keras, on ONNX Runtime and in PyTorch. Scripts that download something, import a
package that is missing, or call no `fit` are skipped with the reason. Outcomes are stored in outcomes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
SECONDS = 600
"""Longest time of one script."""
CHILD = "keras_script.py"


def outcome_of(script: Path, *options: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / CHILD), str(script), *options]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"outcome": "slow", "reason": f"takes more than {SECONDS} s"}
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
    for script in sorted(options.folder.rglob("*.py")):
        name = script.relative_to(options.folder).as_posix()
        if options.only and not any(text in name for text in options.only):
            continue
        result = outcome_of(script)
        if str(result["reason"]).startswith("fails before"):
            result = outcome_of(script, "--whole")
        record({**recorded(), name: result})
        print(f"{name}: {result['outcome']} {result.get('seconds', '')} {result.get('reason') or ''}", flush=True)
    counts = Counter(result["outcome"] for result in recorded().values())
    reached = sum(number for outcome, number in counts.items() if outcome != "skipped")
    print(f"{counts['exact']} of {reached} that reach `fit` are exact; {dict(counts)}")


if __name__ == "__main__":
    main()
