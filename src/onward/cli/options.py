"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onward.cli.saving import Where

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]
OptionalModel = Annotated[Path | None, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)]

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Where to write. Beside the model unless given.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]
Data = Annotated[
    Where,
    typer.Option(
        "--data",
        metavar="WHERE",
        help="Where tensors go: `none` (into the file), `data` or `safetensors` (into a file beside it), or `auto` "
        "(where they were; copied where the result cannot point at them) or `overlay` (where they are, or not at all).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Names = Annotated[
    Path | None,
    typer.Option(
        "--names",
        metavar="FILE",
        help="Names that rules do not find: a JSON object from those of the checkpoint to those of the model; or the "
        "parameters of the optimizer in its order, one in each line.",
        rich_help_panel="What a checkpoint does not tell",
    ),
]
Step = Annotated[int, typer.Option("--step", metavar="N", help="Which training step, where a model has several.")]
Recompute = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute",
        metavar="N|PATTERN",
        help="Save memory: compute nodes a second time on the way back, those whose names match (may be repeated), "
        "or all, keeping the result of every N-th layer.",
    ),
]
