"""`onward report`: a run as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import remark
from onward.cli.work import working


@command(LOOK, "onward report run/", "onward report run/ -o digits.html")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write. `report.html` in the folder unless given."
        ),
    ] = None,
    force: options.Force = False,
) -> None:
    """Make a page of a run: curves, gradients, weights, and what was trained.

    One HTML file that needs nothing else and asks nothing of the network, so it can be sent to somebody. The run may
    still be going on; making the page again brings it up to date.
    """
    from onward.inspect.formatting import size
    from onward.training.report import report as write

    with working(f"reading {run}"):
        path = write(run, output, force=force)
    remark(f"wrote {path} ({size(path.stat().st_size)})")
