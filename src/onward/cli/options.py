"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]
OptionalModel = Annotated[Path | None, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Where to write; by default beside the model, under a name made from its.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]
Data = Annotated[
    Literal["auto", "none", "data", "safetensors"],
    typer.Option(
        "--data",
        help="Where tensors go: into the file (none), beside it (data, safetensors), or as they were (auto).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Step = Annotated[int, typer.Option("--step", metavar="N", help="Which training step, where a model has several.")]
