"""Specs such as `adamw:lr=1e-3,weight_decay=0.01`, and the ranges of the numbers in them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir

from onward.arguments import Range
from onward.errors import RecipeError, UnknownNameError, alternatives, suggest
from onward.model import Model
from onward.model.state import GROUP_KEY, ROLE_KEY

_Entry = TypeVar("_Entry")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A name and its options."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{key}={_text(value)}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    def without(self, *names: str) -> Spec:
        return Spec(self.name, {key: value for key, value in self.options.items() if key not in names})


def parse(text: str | Mapping[str, Any] | Spec, functions: Mapping[str, Callable[..., Any]] | None = None) -> Spec:
    """Parse `name:key=value,...` or a mapping with a `name`.

    With `functions`, the first option may go without its name: `resize:256`.
    """
    if isinstance(text, Spec):
        return text
    if isinstance(text, Mapping):
        if not isinstance(text.get("name"), str):
            raise RecipeError(f"{dict(text)} has no name", hint='add one, as in `{"name": "adamw", "lr": 1e-3}`')
        # Numbers and arrays of numpy become Python's: options are compared, and written as JSON.
        plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in text.items()}
        return Spec(plain.pop("name"), plain)
    if not isinstance(text, str):
        raise RecipeError(f"{text!r} is not a string or a mapping", hint="write `adamw:lr=1e-3`")
    name, _, rest = text.partition(":")
    if call := re.fullmatch(r"(\w+)[( ]\s*(\w+\s*=.*?)\)?", text.strip()):
        raise RecipeError(f"`{text}` is not of the form `name:option=value`", hint=f"write `{call[1]}:{call[2]}`")
    if not name.strip():
        raise RecipeError(f"`{text}` has no name before its options", hint="write `adamw:lr=1e-3`")
    if functions is not None and rest.strip() and "=" not in _split(rest)[0]:
        function = functions.get(name.strip())  # if there is none, the lookup of the name raises
        first = next(iter(options_of(function)[0]), name) if function is not None else name
        rest = f"{first}={rest}"
    return Spec(name.strip(), parse_options(rest, text))


def is_graph(value: Any) -> bool:
    """True for a model, a function or a file, in place of a spec."""
    if isinstance(value, str):
        return value.endswith(".onnx")
    return isinstance(value, Model | ir.Function | os.PathLike | bytes) or hasattr(value, "SerializeToString")


def split_address(text: str, known: Container[str]) -> tuple[str | None, str]:
    """Split `NAME=SPEC`; the name is None for a spec without address.

    `known` are the first words of specs. Other names hold no colon. TensorFlow's names do, and
    equals signs, too: `Identity:0=cross_entropy`.
    """
    head, colon, options = text.partition(":")
    if head in known:
        return None, text
    for sign in re.finditer("=", text):
        if text[sign.end() :].partition(":")[0] in known:
            return text[: sign.start()], text[sign.end() :]
    name, equals, word = head.rpartition("=")
    return (name, word + colon + options) if equals else (None, text)


def parse_options(rest: str, whole: str) -> dict[str, Any]:
    """Parse `key=value,key=value`; a comma inside brackets belongs to the value."""
    options: dict[str, Any] = {}
    for item in _split(rest):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not key:
            raise RecipeError(f"`{item}` in `{whole}` is not `option=value`", hint="write `adamw:lr=1e-3,eps=1e-8`")
        if key in options:
            raise RecipeError(f"`{whole}` has `{key}` twice", hint="write it once")
        options[key] = _value(value)
    return options


def by_name(pairs: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return pairs as a mapping; raise if a name occurs twice."""
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in values:
            raise RecipeError(f"`{name}` is given twice: as `{values[name]}` and `{value}`", hint="pass it once")
        values[name] = value
    return values


def arguments(function: Callable[..., Any], options: str | Mapping[str, Any] | int, name: str = "") -> dict[str, Any]:
    """Parse and check the options of a function: `rank=8,targets=[*query*,*value*]` or a mapping.

    The first option may go without its name: `8,targets=*query*`. `name` is for messages.
    """
    name = name or function.__name__
    defaults, required = options_of(function)
    if not isinstance(options, Mapping):
        text = str(options)
        options = parse_options(text if "=" in text.partition(",")[0] else f"{next(iter(defaults))}={text}", text)
    check_options(f"`{name}`", options, defaults)
    if missing := [option for option in required if option not in options]:
        raise RecipeError(f"`{name}` needs `{missing[0]}`", hint=f"write `{missing[0]}=...`")
    return dict(options)


def options_of(function: Callable[..., Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a function's parameters after the first with defaults, and the required ones."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = tuple(p.name for p in parameters if p.default is p.empty)
    return {p.name: None if p.name in required else p.default for p in parameters}, required


def lookup(what: str, name: str, table: Mapping[str, _Entry]) -> _Entry:
    """Return the entry named `name`, or raise with a suggestion."""
    if not isinstance(name, str) or name not in table:
        hint = suggest(str(name), table) or f"there are {', '.join(table)}"
        raise UnknownNameError(f"unknown {what} `{name}`", hint=hint)
    return table[name]


def check_options(what: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise if `options` has names that are not in `known`."""
    if unknown := [key for key in options if key not in known]:
        names = ", ".join(f"`{key}`" for key in unknown)
        hint = suggest(unknown[0], known) or (f"it has: {', '.join(known)}" if known else "it has no options")
        raise RecipeError(f"{what} has no option {names}", hint=hint)


def checked_number(what: str, value: Any, within: Range | None = None) -> float:
    """Convert an option, possibly a string, to a number in a range. `what` names it."""
    try:
        number = float("not a number" if isinstance(value, bool) else value)  # float(True) is 1.0
    except (TypeError, ValueError):
        raise RecipeError(f"{what} is `{value}`, which is not a number") from None
    if within is not None:
        within.check(what, number)
    return number


def one_of(what: str, value: Any, *allowed: Any) -> Any:
    """Return an option; raise if it is not among the allowed values. `what` names it."""
    if value not in allowed:
        hint = suggest(str(value), map(str, allowed)) or f"write `{allowed[0]}`"
        expected = alternatives([f"`{choice}`" for choice in allowed])
        raise RecipeError(f"{what} is `{value}`, but must be {expected}", hint=hint)
    return value


def words(text: str) -> list[str]:
    """Split specs at spaces; a space inside brackets belongs to the value."""
    return _split(" ".join(text.split()), " ")


def _split(text: str, separator: str = ",") -> list[str]:
    items, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            items.append(current)
            current = ""
        else:
            current += character
    return [item for item in (*items, current) if item.strip()]


_WORDS = {"true": True, "false": False, "none": None}


def _value(text: str) -> Any:
    """Parse a number, true, false, none, or a list of such or of words; else a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        words = text.startswith("[") and text.endswith("]") and "," in text
        return [_value(item.strip()) for item in _split(text[1:-1])] if words else text
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value).replace(" ", "")


# ---- ranges of numbers -----------------------------------------------------------------------------------------------


NOT_NEGATIVE, POSITIVE, ANY = Range(least=0), Range(above=0), Range()
DECAY_RATE = Range(least=0, below=1)

OF_OPTIMIZERS: Mapping[str, Range] = {
    **dict.fromkeys(("beta1", "beta2", "alpha", "rho"), DECAY_RATE),
    **dict.fromkeys(("ns_a", "ns_b", "ns_c"), ANY),
    "beta2_decay": Range(most=0),
    "d": Range(least=1),
}
"""Ranges of optimizer options (default: not negative)."""

OF_SCHEDULES: Mapping[str, Range] = {
    **dict.fromkeys(("steps", "size", "period", "timescale", "div_factor", "final_div_factor", "until"), POSITIVE),
    **dict.fromkeys(("warmup", "milestones"), NOT_NEGATIVE),
    **dict.fromkeys(("mult", "every"), Range(least=1)),
    "pct_start": Range(above=0, below=1),
}
"""Ranges of schedule options (default: any number)."""

OF_UPDATES: Mapping[str, Range] = {
    "accumulate": Range(least=1),
    "clip/limit": Range(above=0, finite=False),  # infinity measures the norm, and leaves the gradients alone
    "ema/decay": DECAY_RATE,
    "loss_scale": POSITIVE,
    "scaler/scale": POSITIVE,
    "scaler/growth_factor": Range(least=1),
    "scaler/backoff_factor": Range(above=0, most=1),
    "scaler/growth_interval": Range(least=1),
    "scaler/cooldown": NOT_NEGATIVE,
    "scaler/hysteresis": Range(least=1),
    "scaler/min_scale": NOT_NEGATIVE,
}
"""Ranges of the numbers around optimizers, by their names in a training step."""


# ---- numbers that are changed in a file ------------------------------------------------------------------------------


def check_setting(model: Model, name: str, value: Any, step: int = 0) -> None:
    """Raise if a hyper-parameter, counter or scale is out of range; weights must be finite."""
    tensor = model.initializer(name, step).const_value
    within = _range(name, tensor.metadata_props if tensor is not None else {})
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float):
            within.check(f"`{name}`", number)


def _range(name: str, tags: Mapping[str, str]) -> Range:
    key = re.sub(r"_\d+$", "", name.rpartition("/")[2])  # without the number that made it unique
    if name in OF_UPDATES:
        return OF_UPDATES[name]
    if tags.get(ROLE_KEY) == "counter":
        return NOT_NEGATIVE
    if tags.get(ROLE_KEY) != "hyper":
        return ANY
    if GROUP_KEY in tags:
        return OF_OPTIMIZERS.get(key, NOT_NEGATIVE)
    return OF_SCHEDULES.get(key, ANY) if name.startswith("schedule/") else ANY
