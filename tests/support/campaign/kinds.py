"""The kinds of files, and a case of one of them."""

from __future__ import annotations

import fnmatch
import importlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from campaign.mutations import Damage
from campaign.sandbox import SECRET, Outcome, Use, attempt

FAMILIES = ("models", "data", "checkpoints", "pickles", "runs", "conversions")
"""The modules of this package that have a table `KINDS`."""


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and what is done with them."""

    make: Callable[[Path], object]
    """Writes good files into a folder."""
    damages: Mapping[str, tuple[Damage, ...]]
    """What is done to files, by patterns of their names within the folder."""
    uses: tuple[Use, ...]
    """What is done with them: every case does one of these."""
    spoil: Callable[[random.Random, Path], object] | None = None
    """Damages to the folder as a whole, such as files that are pipes or links; a fifth of the cases."""
    needs: tuple[str, ...] = ()
    """Modules without which this cannot be done."""


def kinds() -> dict[str, Kind]:
    tables = [importlib.import_module(f"campaign.{family}").KINDS for family in FAMILIES]
    return {name: kind for table in tables for name, kind in table.items()}


@contextmanager
def made(kind: Kind) -> Iterator[Path]:
    """A folder with good files, a secret beside it, and room for cases."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        good = Path(name).resolve() / "good"
        good.mkdir()
        (good.parent / "secret").write_bytes(SECRET)
        _in_a_child(lambda: kind.make(good))
        for module in kind.needs:  # which look around while they are loaded
            importlib.import_module(module)
        yield good


def _in_a_child(work: Callable[[], object]) -> None:
    """Threads that a framework starts once it has something to do would not be there in the processes of cases."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the good files cannot be made")


def good_case(good: Path, use: Use) -> str | None:
    """Use files as they are, which must work; what is wrong about it.

    What it had to load is loaded here, too, so that the cases that follow have it.
    """
    outcome = _case(good, use, lambda folder: None, refusable=False)
    for module in outcome.modules:
        with suppress(Exception):
            importlib.import_module(module)
    return outcome.wrong


def damaged_case(kind: Kind, good: Path, number: int) -> str | None:
    """Damage files, and use them; what is wrong about it."""
    rng = random.Random(number)
    use = rng.choice(kind.uses)
    return _case(good, use, lambda folder: _damage(kind, rng, folder)).wrong


def _case(good: Path, use: Use, damage: Callable[[Path], object], refusable: bool = True) -> Outcome:
    folder = good.parent / "case"
    shutil.copytree(good, folder, symlinks=True)
    try:
        damage(folder)
        return attempt(use, folder, refusable)
    finally:
        shutil.rmtree(folder)


def _damage(kind: Kind, rng: random.Random, folder: Path) -> None:
    if kind.spoil is not None and rng.random() < 0.2:
        kind.spoil(rng, folder)
        return
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    matches = [(path, damages) for path in files for name, damages in kind.damages.items() if _is(path, folder, name)]
    path, damages = rng.choice(matches)
    path.write_bytes(rng.choice(damages)(rng, path.read_bytes()))


def _is(path: Path, folder: Path, pattern: str) -> bool:
    return fnmatch.fnmatch(str(path.relative_to(folder)), pattern)
