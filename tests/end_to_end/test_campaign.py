"""Hostile files of every kind: a case ends well or with one error, touches only its own folder, and executes nothing.

A failure names its case: `python -m campaign KIND NUMBER 1` in this folder runs it again. More: ONWARD_FUZZ=10.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign.kinds import kinds
from campaign.sandbox import SECRET, attempt
from paths import TESTS
from representatives import chosen

import onward

TIMES = int(os.environ.get("ONWARD_FUZZ", "1"))
FEW, MANY = 4, 500
KINDS = kinds()


def cases(kind: str, first: int, count: int) -> None:
    for module in KINDS[kind].needs:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"needs {module}, which is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "campaign", kind, str(first), str(count)],
        cwd=TESTS / "support", env=os.environ | QUIET, capture_output=True, text=True,
    )  # fmt: skip
    failures = [json.loads(line) for line in done.stdout.splitlines()]
    shown = "\n\n".join(f"{kind} {number}: {wrong}" for number, wrong in failures[:5])
    assert done.returncode == 0, f"{len(failures)} of {count} cases\n{shown}\n{done.stderr[-3000:]}"


QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


HAVE_KIN = {
    "checkpoints of Lightning", "checkpoints of Accelerate", "checkpoints of PyTorch", "distributed checkpoints",
    "universal checkpoints of DeepSpeed", "checkpoints of TensorFlow in pieces", "models in pieces",
    "checkpoints of Ray Train", "checkpoints of Megatron",
}  # fmt: skip
"""Kinds of files that are read as those of another kind are."""


@pytest.mark.slow(
    "arrays",
    "checkpoints of DeepSpeed",
    "checkpoints of Flax",
    "checkpoints of Keras",
    "checkpoints of Orbax",
    "checkpoints of TensorFlow",
    "checkpoints of a trainer",
    "checkpoints of onnxruntime-training",
    "checkpoints to go on with",
    "data beside models",
    "data of runs",
    "folders of JAX",
    "inputs",
    "models for JAX",
    "models of NeMo",
    "pictures",
    "runs",
    "saved data sets",
    "states of PyTorch",
    "tables",
    "training models",
    "training models of checkpoints",
)
@pytest.mark.parametrize(
    "kind",
    chosen(
        KINDS,
        [name for name, kind in KINDS.items() if not {"keras", "tensorflow"} & {*kind.needs} and name not in HAVE_KIN],
    ),
)
def test_a_few_cases(kind: str) -> None:
    cases(kind, 0, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_many_cases(kind: str, part: int) -> None:
    each = MANY * TIMES // 4
    cases(kind, FEW + part * each, each)


# ---- the sandbox itself ----------------------------------------------------------------------------------------------


def endless() -> None:
    from campaign import sandbox

    sandbox.resource.setrlimit(sandbox.resource.RLIMIT_CPU, (1, 2))
    while True:
        pass


def refused() -> None:
    raise onward.Error("no")


HARM: dict[str, tuple[Callable[[], object], str]] = {
    "an exception": (lambda: [][0], "IndexError"),
    "a command": (lambda: os.system("true"), "os.system"),
    "a process": (lambda: subprocess.run(["true"], check=False), "subprocess.Popen"),
    "memory": (lambda: bytearray(8 << 30), "MemoryError"),
    "time": (endless, "took too long"),
    "a crash": (lambda: os.abort(), "ended by -6"),
    "a look around": (lambda: Path("../secret").read_bytes(), "read "),
    "a look at the machine": (lambda: Path("/etc/passwd").read_bytes(), "read /etc/passwd"),
    "a file elsewhere": (lambda: Path("../new").write_text("x"), "written "),
    "a file removed": (lambda: os.remove("../secret"), "os.remove"),
    "a program of its own": (
        lambda: exec(compile("x = 1", str(Path("model.py").resolve()), "exec")),
        "executed",
    ),
    "a secret": (lambda: os.link("../secret", "copy"), "gave away"),
}


@pytest.mark.parametrize("harm", HARM)
def test_the_sandbox_sees(harm: str, tmp_path: Path) -> None:
    use, said = HARM[harm]
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "case").mkdir()
    wrong = attempt(use, tmp_path / "case").wrong
    assert wrong is not None and said in wrong


def test_the_sandbox_lets_errors_pass(tmp_path: Path) -> None:
    (tmp_path / "case").mkdir()
    assert attempt(refused, tmp_path / "case").wrong is None
    assert attempt(("show", "nothing.onnx"), tmp_path / "case").wrong is None
    assert attempt(lambda: Path("own").write_text("x"), tmp_path / "case").wrong is None
