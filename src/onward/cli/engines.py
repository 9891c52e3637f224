"""`onward engines`: which engines are installed, and what they can do."""

from __future__ import annotations

from dataclasses import asdict

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_json, print_rows
from onward.cli.work import working


@command(LOOK, "onward engines", "onward engines --json | jq '.[] | select(.name == \"jax\").cannot'")
def engines(as_json: options.Json = False) -> None:
    """List engines: versions, devices, and how many operators of the standard each has."""
    from onward.run import catalogue

    with working("loading the engines"):
        found = catalogue.engines()
    if as_json:
        print_json([asdict(info) | {"install": info.install} for info in found])
        return
    total = len(catalogue.standard_operators())
    rows = [["engine", "version", "devices", "operators"]]
    for info in found:
        if info.version is None:
            rows.append([info.name, "not installed", "", info.install])
        else:
            covered = "its own" if info.operators is None else f"{info.operators} of {total}"
            rows.append([info.name, info.version, ", ".join(info.devices), covered])
    print_rows(rows)
