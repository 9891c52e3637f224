"""`onward engines`: which engines are installed, and what they can do."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_json, print_rows
from onward.cli.work import working


@command(
    LOOK,
    "onward engines",
    "onward engines --devices",
    "onward engines --devices --json | jq '.[] | select(.name == \"jax\").cannot'",
)
def engines(
    devices: Annotated[
        bool, typer.Option("--devices", help="Load PyTorch, JAX and TensorFlow to see their devices and operators.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """List engines: versions, devices, and how many operators of the standard each has.

    What only a framework itself can tell takes a while to load: `--devices` asks for it.
    """
    from onward.engines import catalogue

    with working("loading the engines") if devices else nullcontext():
        found = catalogue.engines(load=devices)
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
            seen = [", ".join(info.devices), covered] if info.devices is not None else ["(--devices)", "(--devices)"]
            rows.append([info.name, info.version, *seen])
    print_rows(rows)
