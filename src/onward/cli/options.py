"""Arguments and options that several commands share, and what is typed in a form of its own."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from onward.arguments import from_text, kinds_of
from onward.cli.app import Misuse
from onward.cli.files import Where
from onward.errors import UnknownNameError, suggest_or_list
from onward.options import Option, TrainConfig, former_names, options_of

if TYPE_CHECKING:
    from onward import Model as AnyModel


def option(flags: str, metavar: str | None, help: str, panel: str | None = None, **more: Any) -> Any:
    """An option by its flags, such as `--output -o`, what stands for its value, and what it says."""
    return typer.Option(*flags.split(), metavar=metavar, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


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
Step = Annotated[int, option("--step", "N", "Which training step, where a model has several.")]


# ---- options that are declared once, in `onward.options` -------------------------------------------------------------


def options_from(kind: type) -> dict[str, Any]:
    """Return what `command` is told for the fields of a class to be options, which are None unless given."""
    return {"parameters": [parameter_for(each) for each in options_of(kind)], "formerly": former_names(kind)}


def parameter_for(one: Option) -> inspect.Parameter:
    taken: Any = list[str] if one.repeated else _parser_for(one)
    annotation = Annotated[taken | None, _default_for(one)]
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parser_for(one: Option) -> Any:
    """What is made of what is typed: a number or one of a few words, where it can be nothing else."""
    kinds = [kind for kind, _ in kinds_of(one.hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and (kinds[0] in (bool, int, float) or get_origin(kinds[0])) else str


def _default_for(one: Option) -> Any:
    flags, metavar = " ".join(one.flags), one.metavar
    if _parser_for(one) is bool:  # a file may say either, and so can who differs; help shows what is not so anyway
        metavar = flags if one.default is False else None
        flags = f"{flags}/--no-{flags.removeprefix('--')}"
    return option(flags, metavar, one.sentence, one.panel)


def select_given(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function that stand on the command line for options of a class."""
    return {
        one.name: _value(one, value)
        for one in options_of(kind)
        if (value := values.get(one.name)) not in (None, [], ())
    }


def _value(one: Option, typed: Any) -> Any:
    if one.metavar == "FILE":
        return names_in(Path(typed))
    if one.repeated and one.metavar and "=" in one.metavar:
        example = re.search("`([^`]+=[^`]+)`", one.text)
        right_sides = _KIND if one.metavar.endswith("=KIND") else ".+"
        return pairs(typed, f"{one.flags[0]} {example[1] if example else one.metavar}", right_sides)
    typed = typed if one.repeated else [typed]
    values = [from_text(each, one.hint) if isinstance(each, str) else each for each in typed]
    is_list = any(get_origin(kind) is Sequence for kind, _ in kinds_of(one.hint))
    return values if len(values) > 1 or (is_list and isinstance(values[0], str)) else values[0]


_RECOMPUTE = next(one for one in options_of(TrainConfig) if one.name == "recompute")
Recompute = Annotated[list[str] | None, _default_for(_RECOMPUTE)]


def recomputation(typed: list[str] | None) -> int | list[str] | None:
    """What to compute again, as the library takes it: a number of layers, or patterns."""
    return _value(_RECOMPUTE, typed) if typed else None


def source_of(data: list[str]) -> str | list[str]:
    """What `--data` names: one file, or several; with a name for each, they are columns."""
    return data[0] if len(data) == 1 and "=" not in Path(data[0]).name else data


# ---- what is typed ---------------------------------------------------------------------------------------------------

NUMBERS = "[^=]+"
_KIND = r"[A-Za-z_]\w*(:.+)?"
"""What stands on the right of `name=...`: a word with options, such as `uniform:low=-1`."""


def pairs(items: Sequence[str], example: str, right_sides: str = ".+") -> dict[str, str]:
    """Arguments of the form `left=right`, such as `example`, which may begin with the option that they follow.

    Names may hold an `=`, too. What can stand on the right (a pattern) decides which one divides; if several can, the
    argument is refused.
    """
    option = example.rpartition(" ")[0]
    found: dict[str, str] = {}
    for item in items:
        at = [i for i, c in enumerate(item) if c == "=" and i > 0 and re.fullmatch(right_sides, item[i + 1 :])]
        if len(at) > 1:
            ways = " or ".join(f"`{item[:i]}` and `{item[i + 1 :]}`" for i in at[:2])
            raise Misuse(f"`{item}` can be {ways}", "names that hold an `=` are given in Python, as a mapping")
        left, right = (item[: at[0]], item[at[0] + 1 :]) if at else ("", "")
        if not at:
            hint = "the model comes first" if item.endswith(".onnx") else f"write for example `{example}`"
            raise Misuse(f"`{f'{option} {item}'.strip()}` has not the form of `{example}`", hint)
        if left in found:
            raise Misuse(f"`{left}` is given twice: as `{found[left]}` and as `{right}`", "give each name once")
        found[left] = right
    return found


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
        from onward.frameworks.torch.arguments import read_example
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


def floats_matching(model: AnyModel, patterns: Sequence[str]) -> list[str]:
    """The floating-point values of a model that match patterns: inputs, weights, and what is computed."""
    from onward.model.core import values
    from onward.recipe.trainable import matching

    known = [v.name for v in values(model.graph) if v.name and (v.dtype is None or v.dtype.is_floating_point())]
    names = matching(patterns, known)
    if not names:
        listed = ", ".join(f"`{pattern}`" for pattern in patterns)
        raise UnknownNameError(
            f"{listed} matches no floating-point value", hint=suggest_or_list(patterns[0].strip("*"), known)
        )
    return names
