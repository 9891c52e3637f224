"""Trains on disks with too little room, makes room, and goes on: `python full_disks.py FOLDER KIB...`.

Runs in a mount namespace of its own. FOLDER holds `model.onnx` and `data.npz`; for each disk, what was said is printed,
and the run is copied to FOLDER.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from killed_runs import go

from onward.errors import WriteError

KIB = 1024
SIZE = 1024
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    mount = ["sh", "-c", 'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && umount "$d"; rmdir "$d"']
    return bool(shutil.which("unshare")) and not subprocess.run([*NAMESPACE, *mount], capture_output=True).returncode


@contextmanager
def disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}k", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
        path.rmdir()


def main(folder: Path, rooms: list[int]) -> None:
    for room in rooms:
        with disk(folder / "disk") as small:
            for name in ("model.onnx", "data.npz"):
                (small / name).symlink_to(folder / name)
            ballast = small / "ballast"
            ballast.write_bytes(bytes((SIZE - room) * KIB))
            try:
                go(small)
            except WriteError as error:
                print(room, error.message, error.hint, sep="|")
            ballast.unlink()
            go(small)
            shutil.copytree(small / "run", folder / f"run{room}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(room) for room in sys.argv[2:]])
