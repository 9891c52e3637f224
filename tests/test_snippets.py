"""What the README and the documentation show is executed: Python blocks, and `$ onward ...` lines of console blocks.

A block of YAML that begins with `# name.yaml` is written to that file.

The blocks of a file run in order, in one namespace, in a folder that holds a `digits.onnx` and a `digits.npz`, and a
`scans.onnx` for pictures with a `scans.npz` of bytes. A block
whose info string says `no-run` (```python no-run) is only shown. A command must succeed; what it prints may differ
from the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from commands import run as in_this_process
from conformity import cases_of
from markdown_it import MarkdownIt
from models import digits_mlp, small_cnn
from paths import ROOT

FILES = [file for file in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if file.exists()]
SHELL = re.compile(r"^(?:'[^']*'|[^'#])*?[|<>&;$*?]")
"""What only a shell understands, outside of quotes and comments."""


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of the first line of code, from 1


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks to execute."""
    for token in MarkdownIt().parse(text):
        language, *words = token.info.split() or [""]
        if token.type == "fence" and language in ("python", "console", "yaml") and "no-run" not in words:
            assert token.map is not None
            yield Block(language, token.content, token.map[0] + 2)


def commands(console: str) -> Iterator[str]:
    """The `$ onward ...` lines, with the lines that they continue on."""
    for match in re.finditer(r"^\$ (onward\b(?:.*\\\n)*.*)$", console, re.MULTILINE):
        yield match[1]


def run(block: Block, namespace: dict[str, Any], file: Path) -> None:
    if block.language == "python":
        # The empty lines make line numbers those of the file, so that a traceback shows the line that failed.
        exec(compile("\n" * (block.line - 1) + block.code, str(file), "exec"), namespace)
        return
    if block.language == "yaml":
        Path(block.code.splitlines()[0].removeprefix("# ")).write_text(block.code)
        return
    scripts = Path(sys.executable).parent
    for command in commands(block.code):
        if not SHELL.search(command):  # all that a process of its own would add is the time that it takes to start
            in_this_process(*shlex.split(command.replace("\\\n", " "), comments=True)[1:])
            continue
        environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=600)
        place = f"{file.name}, block at line {block.line}"
        assert done.returncode == 0, f"{place}: `{command}` exited {done.returncode}\n{done.stdout}{done.stderr}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(digits_mlp(), tmp_path / "digits.onnx")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "digits.npz", image=rng.random((200, 64), np.float32), labels=rng.integers(0, 10, 200))
    onnx.save(small_cnn(), tmp_path / "scans.onnx")
    scans = rng.integers(0, 256, (100, 20, 24), np.uint8)
    np.savez(tmp_path / "scans.npz", image=scans, labels=rng.integers(0, 10, 100))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnx.backend.test.runner.load_model_tests", cases_of)  # else they are computed, for long
    return tmp_path


@pytest.mark.slow(
    "docs/command-line.md",
    "docs/data.md",
    "docs/engines.md",
    "docs/frameworks/jax.md",
    "docs/frameworks/torch.md",
    "docs/how-to/export.md",
    "docs/how-to/images.md",
    "docs/how-to/tables.md",
    "docs/lowered-steps.md",
    "docs/transfer.md",
)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_snippets(file: Path, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(file.read_text(encoding="utf-8")):
        run(block, namespace, file)


def test_blocks_are_found() -> None:
    text = "# Title\n\n```python\nx = 1\n```\n"
    text += "- item\n\n  ```console\n  $ onward describe a.onnx \\\n      --json | head\n  output\n  ```\n"
    text += "\n```python no-run\nboom()\n```\n```sh\n$ onward x\n```\n"
    python, console = blocks(text)
    assert python == ("python", "x = 1\n", 4)
    assert list(commands(console.code)) == ["onward describe a.onnx \\\n    --json | head"]
    assert list(commands("$ make demo\n$ onward check a.onnx\nonward: fine\n$ onwards\n")) == ["onward check a.onnx"]


def test_a_block_sees_what_earlier_blocks_defined_and_fails_at_its_line(folder: Path) -> None:
    namespace: dict[str, Any] = {}
    run(Block("python", "import onnx\nmodel = onnx.load('digits.onnx')\n", 3), namespace, folder / "page.md")
    with pytest.raises(ZeroDivisionError) as caught:
        run(Block("python", "model.graph\n1 / 0\n", 10), namespace, folder / "page.md")
    assert caught.traceback[-1].lineno + 1 == 11
