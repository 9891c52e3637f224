"""One row adds an optimizer or an operator everywhere: to engines, converters, programs and checkpoints."""

import json
import os
import subprocess
import sys

import pytest
from arrival.targets import TARGETS
from marks import needs
from paths import TESTS

pytestmark = needs("torch")

EVERYWHERE = [target for target in TARGETS if not target.startswith("checkpoint")]
OF_PYTORCH = [f"checkpoint of {name}" for name in ("torch", "dcp", "hf", "accelerate", "lightning", "ray")]
EVERY_FRAMEWORK = [needs("jax", "optax", "keras"), pytest.mark.slow]


def outcomes(added: str, targets: list[str]) -> dict[str, str]:
    """Return what becomes of a toy on each target, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    command = [sys.executable, TESTS / "support" / "added.py", added, *targets]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize(
    ("added", "targets"),
    [
        pytest.param("optimizer", ["lowered", "torch objects", "checkpoint of torch"], id="optimizer"),
        pytest.param("operator", ["lowered", "numpy engine", "torch program"], id="operator"),
        pytest.param("optimizer", EVERYWHERE + OF_PYTORCH, marks=EVERY_FRAMEWORK, id="optimizer everywhere"),
        pytest.param("operator", EVERYWHERE, marks=EVERY_FRAMEWORK, id="operator everywhere"),
    ],
)
def test_a_row_arrives(added: str, targets: list[str]) -> None:
    assert outcomes(added, targets) == dict.fromkeys(targets, "arrived")


@pytest.mark.slow
def test_without_a_row_a_checkpoint_is_refused() -> None:
    for outcome in outcomes("optimizer", ["checkpoint of orbax", "checkpoint of ort"]).values():
        assert "has no optimizer" in outcome and "softmomentum" in outcome
