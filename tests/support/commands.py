"""Commands of the command line, run in this process."""

from __future__ import annotations

import re

from typer.testing import CliRunner, Result

from onward.cli.app import BUG
from onward.cli.commands import app


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, f"{result.stdout}{result.stderr}"
    assert "Traceback" not in result.stderr and BUG not in result.stderr, result.stderr
    return result


def failed(*arguments: str, code: int = 1) -> tuple[str, str]:
    """The message and the hint of a command that must fail, and say so in just this form."""
    result = run(*arguments, code=code)
    assert not result.stdout
    match = re.fullmatch(r"error: (.+?)\n(?:hint:  (.+)\n)?", result.stderr, re.DOTALL)
    assert match, result.stderr
    return match[1], match[2] or ""
