"""Programs that were written are tried in a process of their own: what is in them does not run in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from onward.errors import UnsupportedError

_SECONDS = 600.0


def can_try() -> bool:
    """True if there is an interpreter to run programs with: an embedded one, or an application of its own, is not."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def try_out(script: str, *files: Path, environment: Mapping[str, str] | None = None) -> bool:
    """Run a file of ours with the names of others; whether there was a way to. It needs the framework only."""
    if not can_try():
        return False
    # -P: the folder of the script must not become a source of modules. -B: nothing is written beside the program.
    command = [sys.executable, "-P", "-B", script, *map(str, files)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(f"it did not end within {_SECONDS:.0f} s") from error
    if done.returncode:
        raise _refusal((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return True


def _refusal(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program that was made of the model does not run: {what}",
        hint="please report the model; its live form needs no program: `onward.to_torch`, `onward.to_keras`",
    )
