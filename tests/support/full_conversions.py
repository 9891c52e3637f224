"""Converts a run on a disk that has too little room, over an older one: `python full_conversions.py FOLDER TARGET`.

Runs in a mount namespace of its own. FOLDER holds `model.onnx`. What was said is printed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from full_disks import KIB, SIZE, disk

import onward
from onward.errors import WriteError
from onward.frameworks.run_files import Framework, write

OUTPUTS: dict[Framework, str] = {"torch": "run.pt", "keras": "run.keras", "jax": "run", "tensorflow": "run"}
ROOMS = (0, 4)
"""KiB that are left."""


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "ballast")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(folder: Path, target: Framework) -> None:
    old, new = (onward.prepare(folder / "model.onnx", loss="ce", optimizer=name) for name in ("sgd:lr=0.1", "adam"))
    with disk(folder / "disk") as small:
        write(old, target, small / OUTPUTS[target])
        before = content(small)
        for room in ROOMS:
            ballast = small / "ballast"
            ballast.write_bytes(b"")
            left = os.statvfs(small).f_bavail * os.statvfs(small).f_bsize // KIB
            ballast.write_bytes(bytes((left - room) * KIB))
            try:
                write(new, target, small / OUTPUTS[target])
            except WriteError as error:
                print(room, error, error.hint, sep="|")
            ballast.unlink()
            assert content(small) == before, (room, content(small).keys(), before.keys())
        write(new, target, small / OUTPUTS[target])
        assert content(small) != before


if __name__ == "__main__":
    assert SIZE * KIB
    main(Path(sys.argv[1]), sys.argv[2])  # type: ignore[arg-type]
