"""Arguments and options that several commands share, and what is typed in a form of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.app import Misuse
from onward.cli.files import Where
from onward.errors import UnknownNameError, near_or_first

if TYPE_CHECKING:
    from onward import Model as AnyModel


def option(flags: str, metavar: str | None, help: str, panel: str | None = None, **more: Any) -> Any:
    """An option by its flags, such as `--output -o`, what stands for its value, and what it says."""
    return typer.Option(*flags.split(), metavar=metavar, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


UNTOLD = "What a checkpoint does not tell"
"""The panel of options that say so."""

Model = Annotated[Path, argument("MODEL", "An .onnx file.")]
OptionalModel = Annotated[Path | None, argument("MODEL", "An .onnx file.")]
Output = Annotated[Path | None, option("--output -o", "FILE", "Where to write. Beside the model unless given.")]
Force = Annotated[bool, option("--force", None, "Overwrite a file that is there.")]
Data = Annotated[
    Where,
    option(
        "--data",
        "WHERE",
        "Where tensors go: `none` (into the file), `data` or `safetensors` (into a file beside it), or `auto` "
        "(where they were; copied where the result cannot point at them) or `overlay` (where they are, or not at all).",
    ),
]
Json = Annotated[bool, option("--json", None, "Print JSON, for programs.")]
Names = Annotated[
    Path | None,
    option(
        "--names",
        "FILE",
        "Names that rules do not find: a JSON object from those of the checkpoint to those of the model; or the "
        "parameters of the optimizer in its order, one in each line.",
        UNTOLD,
    ),
]
Step = Annotated[int, option("--step", "N", "Which training step, where a model has several.")]
Recompute = Annotated[
    list[str] | None,
    option(
        "--recompute",
        "N|PATTERN",
        "Save memory: compute nodes a second time on the way back, those whose names match (may be repeated), "
        "or all, keeping the result of every N-th layer.",
    ),
]

# ---- what is typed ---------------------------------------------------------------------------------------------------


def pairs(items: Sequence[str], example: str) -> dict[str, str]:
    """Arguments of the form `left=right`, such as `example`, which may begin with the option that they follow."""
    option = example.rpartition(" ")[0]
    found: dict[str, str] = {}
    for item in items:
        left, equals, right = item.partition("=")
        if not (left and equals and right):
            hint = "the model comes first" if item.endswith(".onnx") else f"write for example `{example}`"
            raise Misuse(f"`{f'{option} {item}'.strip()}` has not the form of `{example}`", hint)
        if left in found:
            raise Misuse(f"`{left}` is given twice: as `{found[left]}` and as `{right}`", "give each name once")
        found[left] = right
    return found


def specs_by_pattern(items: Sequence[str]) -> str | dict[str, str] | None:
    """`SPEC` for all, or `PATTERN=SPEC` for some; an equals sign after the colon belongs to the options of a spec."""
    from onward.recipe.initialize import INITIALIZERS
    from onward.recipe.spec import split_address

    found: dict[str, str] = {}
    for item in items:
        named, spec = split_address(item, INITIALIZERS)
        pattern = "*" if named is None else named
        if pattern in found:
            raise Misuse(f"`{pattern}` is given twice", "the first pattern that matches counts; give each once")
        found[pattern] = spec
    everything = found.pop("*", None)  # what is for all comes last, wherever it stood
    if not found:
        return everything
    return {**found, **({"*": everything} if everything else {})}


def names_in(file: Path) -> dict[str, str] | list[str]:
    """Names in a file: pairs as a JSON object; or one in each line."""
    from onward.model.storage.files import reason, regular

    try:
        regular(file)
        text = file.read_text("utf-8").strip()
        found = json.loads(text) if text[:1] in ("{", "[") else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise Misuse(f"`{file}` cannot be read: {reason(error)}", "give JSON, or a name in each line") from error
    texts = [*found, *(found.values() if isinstance(found, dict) else ())]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise Misuse(f"`{file}` holds no names", "give a JSON object of names, or a name in each line")
    return found


def example_in(file: Path) -> Any:
    """What a module of PyTorch takes, from a file."""
    try:
        from onward.convert.torch.examples import read_example
    except ModuleNotFoundError as error:
        raise Misuse(
            f"`--inputs` needs `{error.name}`, which is not installed", "pip install 'onward[torch]'"
        ) from error
    return read_example(file)


def number(text: str) -> Any:
    """A number, `true`, `false` or a list of numbers, or the text itself if it is none of these."""
    try:
        return float(text) if text.lower() in ("inf", "-inf", "nan") else json.loads(text)
    except (ValueError, RecursionError):
        return text


def recomputation(given: list[str] | None) -> int | list[str] | None:
    """What to compute again, as the library takes it: a number of layers, or patterns."""
    if given and len(given) == 1 and given[0].removeprefix("-").isdecimal():
        return int(given[0])
    return given or None


def floats_matching(model: AnyModel, patterns: Sequence[str]) -> list[str]:
    """The floating-point values of a model that match patterns: inputs, weights, and what is computed."""
    from onward.model.core import values
    from onward.recipe.trainable import matching

    known = [v.name for v in values(model.graph) if v.name and (v.dtype is None or v.dtype.is_floating_point())]
    names = matching(patterns, known)
    if not names:
        listed = ", ".join(f"`{pattern}`" for pattern in patterns)
        raise UnknownNameError(
            f"{listed} matches no floating-point value", hint=near_or_first(patterns[0].strip("*"), known)
        )
    return names
