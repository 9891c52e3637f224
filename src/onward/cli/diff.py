"""`onward diff`: what two checkpoints, or a checkpoint and a model, have in common, and what not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli import options
from onward.cli.app import LOOK, command
from onward.cli.console import print_fields, print_json, print_rows, say, word
from onward.cli.failure import FAILED
from onward.cli.work import working

if TYPE_CHECKING:
    from onward.checkpoint import Comparison
    from onward.checkpoint.comparing import Pair
    from onward.checkpoint.facts import Fact


@command(
    LOOK,
    "onward diff checkpoint-500/ checkpoint-600/",
    "onward diff checkpoint-500/ run.onnx --params",
    "onward diff before.pt after.pt --rtol 1e-5 --json",
)
def diff(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="A checkpoint, a file or a folder; or an .onnx file.", show_default=False),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)],
    atol: Annotated[float, typer.Option("--atol", metavar="X", help="How far numbers may be apart.", min=0)] = 0.0,
    rtol: Annotated[
        float, typer.Option("--rtol", metavar="X", help="The same, in proportion to the number in B.", min=0)
    ] = 0.0,
    params: Annotated[bool, typer.Option("--params", help="List what is equal, too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare two checkpoints of any formats, two models, or one of each.

    Names, shapes, types and values of tensors; class, hyper-parameters and state of the optimizer; schedule, step and
    random numbers. NaN is equal to NaN. The exit code is 0 if all is equal, and 1 if not.
    """
    from onward.checkpoint import diff as compared

    with working(f"comparing {a} and {b}", *(path for path in (a, b) if path.suffix == ".onnx")):
        found = compared(a, b, atol=atol, rtol=rtol)
    if as_json:
        print_json(_as_json(found))
    else:
        _print(found, params)
    if not found.equal:
        raise typer.Exit(FAILED)


def _print(found: Comparison, params: bool) -> None:
    print_fields([("a", f"{found.a.path}, {found.a.title}"), ("b", f"{found.b.path}, {found.b.title}")])
    print_fields([("names", rule) for rule in found.rules])
    _print_section("tensors", found.tensors, params)
    _print_section("state of the optimizer", found.slots, params)
    for side, names in (("a", found.only_a), ("b", found.only_b)):
        if names:
            say(f"only in {side}: {len(names):,}", style="bold")
            print_rows([["  ", name] for name in names])
    shown = [fact for fact in found.facts if params or not fact.equal]
    if shown:
        say("the training", style="bold")
        print_rows([["  ", fact.name, _values(fact)] for fact in shown])
    say("equal" if found.equal else "different", style="bold green" if found.equal else "bold red")


def _print_section(heading: str, pairs: Iterable[Pair], params: bool) -> None:
    pairs = list(pairs)
    if not pairs:
        return
    different = [pair for pair in pairs if not pair.equal]
    say(f"{heading}: {len(pairs):,} in both, {len(different):,} different", style="bold")
    if shown := pairs if params else different:
        print_rows([["  ", pair.name, _described(pair)] for pair in shown])


def _described(pair: Pair) -> str:
    one, other = pair.shapes
    if pair.distance is None:
        return f"{list(one)} and {list(other)}"
    parts = [f"{list(one)}"]
    if pair.dtypes[0] != pair.dtypes[1]:
        parts.append(" and ".join(pair.dtypes))
    if pair.is_turned:
        parts.append("turned")
    differ, absolute, relative = pair.distance
    far = f"at most {absolute:.3g} apart, relative {relative:.3g}" if absolute else "equal values"
    parts.append(f"{differ:,} elements differ, {far}" if differ else far)
    return ", ".join(parts)


def _values(fact: Fact) -> str:
    one, other = _word(fact.a), _word(fact.b)
    return f"{one} in both" if fact.equal else f"{one} and {other}"


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_word(part)}" for key, part in value.items())
    if isinstance(value, float):
        return f"{value:.7g}"
    return "nothing" if value is None else word(value)


def _as_json(found: Comparison) -> dict[str, Any]:
    from onward.checkpoint.summary import plain

    def pairs(given: Iterable[Pair]) -> list[dict[str, Any]]:
        return [
            {
                "name": pair.name,
                "other": pair.other,
                "shapes": [list(shape) for shape in pair.shapes],
                "dtypes": list(pair.dtypes),
                "turned": pair.is_turned,
                "equal": pair.equal,
                **plain(pair.distance._asdict() if pair.distance else {}),
            }
            for pair in given
        ]

    return {
        "a": {"path": str(found.a.path), "format": found.a.format, "title": found.a.title},
        "b": {"path": str(found.b.path), "format": found.b.format, "title": found.b.title},
        "equal": found.equal,
        "rules": list(found.rules),
        "tensors": pairs(found.tensors),
        "slots": pairs(found.slots),
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "facts": [
            {"name": each.name, "a": plain(each.a), "b": plain(each.b), "equal": each.equal} for each in found.facts
        ],
    }
