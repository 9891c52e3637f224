"""One case of a campaign, in a process of its own: what it may take, what it may touch, and how it may end."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paths import ROOT
from typer.testing import CliRunner

import onward
from onward.cli.app import BUG
from onward.cli.commands import app

CPU_SECONDS, SECONDS, BYTES = 30, 240, 4 << 30
SECRET = b"a secret that no file may be made to give away"

Use = tuple[str, ...] | Callable[[], object]
"""A command line, or a function; both work in the folder of the case."""

_PROJECT = ROOT
_READABLE = tuple(
    str(Path(root).resolve())
    for root in {
        sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *(path for path in sys.path if path), _PROJECT,
        "/proc", "/sys", "/dev/null", "/dev/urandom", "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/mime.types",
        "/etc/localtime", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/hosts", "/etc/resolv.conf", "/etc/ssl",
    }
)  # fmt: skip
"""What the interpreter and libraries read themselves."""

_CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2, "os.chmod": 1,
            "os.truncate": 1, "os.utime": 1, "shutil.rmtree": 1, "shutil.move": 2}  # fmt: skip
"""Events of the interpreter that change files, and how many of their arguments are paths."""

_EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "socket.bind", "pty.spawn")


class Watch:
    """Notes what a case does that it must not do."""

    def __init__(self, folder: Path):
        self.seen: list[str] = []
        self._folder = str(folder.resolve())
        self._readable = [root for root in _READABLE if not self._is_in(folder, (root,))]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._open(*arguments)
        elif event in _CHANGES:
            for path in arguments[: _CHANGES[event]]:
                self._inside(event, path)
        elif event in _EXECUTES or (event == "subprocess.Popen" and arguments[0] != sys.executable):
            self.seen.append(f"{event} {arguments!r:.200}")
            raise PermissionError(event)
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(self._folder):
            self.seen.append(f"executed {arguments[0].co_filename}")

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int):
            return
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            self._inside("written", path)
        elif not self._is_in(path, (self._folder, *self._readable)):
            self.seen.append(f"read {os.fsdecode(path)}")

    def _inside(self, event: str, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike) and not self._is_in(path, (self._folder, "/dev/null")):
            self.seen.append(f"{event} {os.fsdecode(path)}")

    @staticmethod
    def _is_in(path: Any, roots: Iterable[str]) -> bool:
        try:
            real = os.path.realpath(os.fsdecode(path))
        except ValueError:  # no path at all
            return True
        return any(real == root or real.startswith(f"{root}/") for root in roots)


class Outcome(NamedTuple):
    wrong: str | None
    """What is wrong about how a case ended."""
    modules: Sequence[str] = ()
    """What it has loaded."""


def attempt(use: Use, folder: Path, refusable: bool = True) -> Outcome:
    """Use the files of a folder in a process of its own.

    An error of ours is a good end unless the files are not `refusable`.
    Files in the folder's parent must stay as they are, and those that hold `SECRET` are not to be given away.
    """
    before = _others(folder)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        _become_a_case(use, folder, refusable, tell)
    os.close(tell)
    outcome = _listen(child, told)
    if outcome.wrong is None and _others(folder) != before:
        return Outcome(f"changed {sorted(set(_others(folder)) ^ set(before)) or 'files outside of its folder'}")
    if told_in := [path.name for path in _files(folder) if _tells(path)]:
        return Outcome(f"gave away a secret, in {told_in}")
    return outcome


def _others(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.parent.iterdir() if path.is_file()}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _tells(path: Path) -> bool:
    return path.stat().st_size < 64 << 20 and SECRET in path.read_bytes()


def _listen(child: int, told: int) -> Outcome:
    """What a case says of itself, or what became of it."""
    text, end = b"", time.monotonic() + SECONDS
    while select.select([told], [], [], max(0, end - time.monotonic()))[0]:
        piece = os.read(told, 1 << 16)
        if not piece:
            break
        text += piece
    else:
        os.killpg(child, signal.SIGKILL)
    os.close(told)
    _, status = os.waitpid(child, 0)
    if text:
        return Outcome(**json.loads(text))
    code = os.waitstatus_to_exitcode(status)
    return Outcome({-signal.SIGKILL: "hung", -signal.SIGXCPU: "took too long"}.get(code, f"ended by {code}"))


def _become_a_case(use: Use, folder: Path, refusable: bool, tell: int) -> None:
    """Does not return."""
    try:
        os.setsid()
        faulthandler.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        os.chdir(folder)
        _have_a_home(folder / ".home")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        watch = Watch(folder)
        sys.addaudithook(watch)
        wrong = _command(use, refusable) if isinstance(use, tuple) else _call(use, refusable)
        wrong = wrong or (f"did what it must not: {'; '.join(watch.seen[:3])}" if watch.seen else None)
    except BaseException:
        wrong = traceback.format_exc()
    with os.fdopen(tell, "w") as pipe:
        json.dump({"wrong": wrong, "modules": list(sys.modules)}, pipe)
    os._exit(0)


def _have_a_home(home: Path) -> None:
    """What a user has elsewhere, such as caches and temporary files, a case has in its own folder."""
    home.mkdir(exist_ok=True)
    os.environ |= dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"), str(home))
    tempfile.tempdir = str(home)


def _call(use: Callable[[], object], refusable: bool) -> str | None:
    try:
        use()
    except onward.Error as error:
        return None if refusable and str(error) and "\x1b" not in str(error) else f"says {str(error)!r}"
    except BaseException:
        return traceback.format_exc(limit=-6)
    return None


def _command(arguments: tuple[str, ...], refusable: bool) -> str | None:
    result = CliRunner().invoke(app, list(arguments))
    said = result.stdout + result.stderr
    good = (
        result.exit_code in ((0, 1) if refusable else (0,))
        and (result.exit_code == 0 or result.stdout or "error: " in result.stderr)
        and not any(word in said for word in ("Traceback", BUG, "\x1b", "\x07"))
    )
    return None if good else f"exit {result.exit_code}\n{result.stdout[-500:]}\n{result.stderr[-3000:]}"
