"""Arguments and options of several commands, and parsing of their values."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from onward.arguments import from_text, types_of
from onward.cli.app import Misuse
from onward.cli.output_files import Where
from onward.errors import UnknownNameError, suggest_or_list
from onward.options import Option, TrainConfig, former_names, options_of

if TYPE_CHECKING:
    from onward import Model as AnyModel


def option(flags: str, metavar: str | None, help: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option: its flags, such as `--output -o`, its metavar and its help."""
    return typer.Option(*flags.split(), metavar=metavar, help=help, rich_help_panel=panel, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


Model = Annotated[Path, argument("MODEL", "An .onnx file.")]
OptionalModel = Annotated[Path | None, argument("MODEL", "An .onnx file.")]
Output = Annotated[Path | None, option("--output -o", "FILE", "Output file (default: beside the model).")]
Force = Annotated[bool, option("--force", None, "Overwrite existing files.")]
Data = Annotated[
    Where,
    option(
        "--data",
        "WHERE",
        "Storage of tensors: `none` (in the model file), `data` or `safetensors` (in a file beside it), `auto` "
        "(as in the source; copied if the result cannot refer to them), `overlay` (refer to the source, never copy).",
    ),
]
Json = Annotated[bool, option("--json", None, "Print JSON.")]
Step = Annotated[int, option("--step", "N", "Index of the training step, if the model has several.")]


# ---- options of `onward.options` -------------------------------------------------------------------------------------


def options_from(kind: type) -> dict[str, Any]:
    """Return the arguments of `command` that make the fields of a class options (default: None)."""
    return {"parameters": [parameter_for(row) for row in options_of(kind)], "formerly": former_names(kind)}


def parameter_for(declared: Option) -> inspect.Parameter:
    hint: Any = list[str] if declared.repeated else _parser_for(declared)
    annotation = Annotated[hint | None, _typer_option(declared)]
    return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parser_for(declared: Option) -> Any:
    """Return the type that the typed text is parsed to: str if several types are allowed."""
    types = [type_ for type_, _ in types_of(declared.hint) if type_ is not type(None)]
    return types[0] if len(types) == 1 and (types[0] in (bool, int, float) or get_origin(types[0])) else str


def _typer_option(declared: Option) -> Any:
    flags, metavar = " ".join(declared.flags), declared.metavar
    if _parser_for(declared) is bool:  # two flags, to override a file; help shows the one that changes the default
        metavar = flags if declared.default is False else None
        flags = f"{flags}/--no-{flags.removeprefix('--')}"
    return option(flags, metavar, declared.sentence, declared.panel)


def select_given(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a class that were typed, as arguments of a function."""
    return {
        declared.name: _value(declared, value)
        for declared in options_of(kind)
        if (value := values.get(declared.name)) not in (None, [], ())
    }


def _value(declared: Option, typed: Any) -> Any:
    if declared.metavar == "FILE":
        return names_in(Path(typed))
    if declared.repeated and declared.metavar and "=" in declared.metavar:
        example = re.search("`([^`]+=[^`]+)`", declared.text)
        right_sides = _KIND if declared.metavar.endswith("=KIND") else ".+"
        return pairs(typed, f"{declared.flags[0]} {example[1] if example else declared.metavar}", right_sides)
    typed = typed if declared.repeated else [typed]
    values = [from_text(item, declared.hint) if isinstance(item, str) else item for item in typed]
    is_list = any(get_origin(type_) is Sequence for type_, _ in types_of(declared.hint))
    return values if len(values) > 1 or (is_list and isinstance(values[0], str)) else values[0]


_RECOMPUTE = next(declared for declared in options_of(TrainConfig) if declared.name == "recompute")
Recompute = Annotated[list[str] | None, _typer_option(_RECOMPUTE)]


def recomputation(typed: list[str] | None) -> int | list[str] | None:
    """Return the typed `--recompute` as a number of layers or a list of patterns."""
    return _value(_RECOMPUTE, typed) if typed else None


def source_of(data: list[str]) -> str | list[str]:
    """Return the value of `--data`: one file or several; with a name for each, they are columns."""
    return data[0] if len(data) == 1 and "=" not in Path(data[0]).name else data


# ---- parsing ---------------------------------------------------------------------------------------------------------

NUMBERS = "[^=]+"
_KIND = r"[A-Za-z_]\w*(:.+)?"
"""Right side of `name=...`: a word with options, such as `uniform:low=-1`."""


def pairs(items: Sequence[str], example: str, right_sides: str = ".+") -> dict[str, str]:
    """Parse arguments of the form `left=right`.

    `example` may begin with the option that they follow. Names may hold an `=`: the pattern
    `right_sides` decides which one divides. An ambiguous argument is refused.
    """
    option = example.rpartition(" ")[0]
    parsed: dict[str, str] = {}
    for item in items:
        splits = [i for i, c in enumerate(item) if c == "=" and i > 0 and re.fullmatch(right_sides, item[i + 1 :])]
        if len(splits) > 1:
            readings = " or ".join(f"`{item[:i]}` and `{item[i + 1 :]}`" for i in splits[:2])
            raise Misuse(f"`{item}` is ambiguous: {readings}", "pass names that hold an `=` in Python, as a mapping")
        left, right = (item[: splits[0]], item[splits[0] + 1 :]) if splits else ("", "")
        if not splits:
            hint = "the model comes first" if item.endswith(".onnx") else f"write for example `{example}`"
            raise Misuse(f"`{f'{option} {item}'.strip()}` does not have the form `{example}`", hint)
        if left in parsed:
            raise Misuse(f"`{left}` is given twice: `{parsed[left]}` and `{right}`", "pass each name once")
        parsed[left] = right
    return parsed


def names_in(file: Path) -> dict[str, str] | list[str]:
    """Read names from a file: a JSON object of pairs, a JSON list, or a name per line."""
    from onward.model.storage.files import reason, regular

    try:
        regular(file)
        text = file.read_text("utf-8").strip()
        names = json.loads(text) if text[:1] in ("{", "[") else text.splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise Misuse(f"cannot read `{file}`: {reason(error)}", "write JSON, or one name per line") from error
    texts = [*names, *(names.values() if isinstance(names, dict) else ())]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise Misuse(f"`{file}` holds no names", "write a JSON object of names, or one name per line")
    return names


def example_in(file: Path) -> Any:
    """Read example inputs of a PyTorch module from a file."""
    try:
        from onward.frameworks.torch.arguments import read_example
    except ModuleNotFoundError as error:
        raise Misuse(
            f"`--inputs` needs `{error.name}`, which is not installed", "pip install 'onward[torch]'"
        ) from error
    return read_example(file)


def number(text: str) -> Any:
    """Parse a number, a boolean or a list; return any other text unchanged."""
    try:
        return float(text) if text.lower() in ("inf", "-inf", "nan") else json.loads(text)
    except (ValueError, RecursionError):
        return text


def floats_matching(model: AnyModel, patterns: Sequence[str]) -> list[str]:
    """Return the names of the floating-point values of a model that match patterns."""
    from onward.model.core import values
    from onward.recipe.trainable import matching

    candidates = [v.name for v in values(model.graph) if v.name and (v.dtype is None or v.dtype.is_floating_point())]
    names = matching(patterns, candidates)
    if not names:
        listed = ", ".join(f"`{pattern}`" for pattern in patterns)
        raise UnknownNameError(
            f"{listed} matches no floating-point value", hint=suggest_or_list(patterns[0].strip("*"), candidates)
        )
    return names
