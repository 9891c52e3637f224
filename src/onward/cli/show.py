"""`onward describe`, `diff`, `report` and `plan`: what is in files and runs, and what a training would take."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli import options
from onward.cli.app import FAILED, LOOK, command
from onward.cli.console import out, print_fields, print_json, print_rows, remark, say, word
from onward.cli.files import target, working
from onward.cli.options import argument, option, options_from, select_given
from onward.errors import WriteError
from onward.options import PlanOptions

if TYPE_CHECKING:
    from onward.analysis.blocks import Part
    from onward.checkpoint import Checkpoint, Comparison
    from onward.checkpoint.comparing import Fact, Pair


@command(
    LOOK,
    "onward describe training.onnx",
    "onward describe training.onnx --params",
    "onward describe training.onnx --blocks",
    "onward describe training.onnx --graph training.svg",
    "onward describe training.onnx --json | jq .",
    "onward describe checkpoint-500/",
    "onward describe checkpoint-500/ --unsafe",
)
def describe(
    model: options.Model,
    params: Annotated[
        bool,
        option(
            "--params", None, "List all tensors: trained, frozen, constant; of a checkpoint, also what optimizers keep."
        ),
    ] = False,
    blocks: Annotated[
        bool, option("--blocks", None, "List the layers that the graph repeats; of one kind are those that are equal.")
    ] = False,
    graph: Annotated[Path | None, option("--graph", "FILE", "Draw the training graph into an .svg file.")] = None,
    unsafe: Annotated[
        bool, option("--unsafe", None, "List the code that a loader that trusts a checkpoint would execute.")
    ] = False,
    step: options.Step = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Show what is in a file.

    What goes in and out, how many parameters there are and which are trained, loss, optimizer, schedule, state, and how
    far it is trained. It may also be a checkpoint of PyTorch, Lightning or Hugging Face, a file or a folder: nothing in
    it is executed.
    """
    from onward.checkpoint import is_checkpoint
    from onward.inspect import describe as summarize
    from onward.inspect import draw, render, render_parameters
    from onward.model import load
    from onward.model.storage import write_file

    if unsafe:
        _show_code(model, as_json)
        return
    if is_checkpoint(model):
        _show_checkpoint(model, params, as_json)
        return

    if blocks:
        _show_blocks(model, as_json)
        return
    if graph is not None and graph.exists() and not force:
        raise WriteError(f"`{graph}` exists", hint="draw into another file, or overwrite it with `--force`")
    with working(f"reading {model}", model):
        source = load(model)
        summary = summarize(source)
    if graph is not None:
        with working("laying out the graph", model):
            picture = draw(source, step)
        write_file(graph, picture)
        remark(f"wrote {graph}")
    if as_json:
        print_json(summary.to_json())
    elif params:
        render_parameters(summary, out())
    elif graph is None:
        render(summary, out())


def _show_blocks(path: Path, as_json: bool) -> None:
    from onward.analysis.blocks import find_blocks
    from onward.inspect.formatting import quantity
    from onward.model import load

    with working(f"looking for blocks in {path}", path):
        found = find_blocks(load(path))
    if as_json:
        lists = ("parameters", "inputs", "outputs")
        print_json(
            [
                {"name": block.name, "kind": block.kind, "nodes": len(block.nodes)}
                | {key: [value.name for value in getattr(block, key)] for key in lists}
                for block in found
            ]
        )
    elif found:
        rows = [
            [block.name or f"block {i}", f"kind {block.kind}", quantity(len(block.nodes), "node"), _held(block)]
            for i, block in enumerate(found)
        ]
        print_rows(rows, styles=("bold",))
    else:
        say("it repeats no blocks")


def _held(block: Part) -> str:
    from onward.inspect.formatting import quantity

    numbers = sum(value.const_value.size for value in block.parameters if value.const_value is not None)
    return f"{quantity(len(block.parameters), 'parameter')}, {numbers:,} numbers"


def _show_code(path: Path, as_json: bool) -> None:
    from onward.checkpoint.formats import list_code

    code, wrong = list_code(path)
    if as_json:
        print_json([each._asdict() for each in code])
    for each in () if as_json else code:
        say(f"{each.file}  {each.name}{each.call}")
    if wrong is not None:
        raise wrong
    if not code and not as_json:
        say("it names no code")


def _show_checkpoint(path: Path, params: bool, as_json: bool) -> None:
    from onward.checkpoint import open_checkpoint
    from onward.checkpoint.summary import lines, tensor_lines, to_json

    checkpoint = open_checkpoint(path)
    if as_json:
        print_json(to_json(checkpoint))
    elif params:
        for line in tensor_lines(checkpoint):
            say(line)
    else:
        say(path.name or str(path), style="bold")
        print_fields([*lines(checkpoint), *_way_on(path, checkpoint)], indent="  ")


def _way_on(path: Path, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """How to go on from there, if there is an optimizer to go on with."""
    from onward.importing.capture import has_model

    if not checkpoint.optimizers:
        return []
    like = "" if has_model(checkpoint) else " --like model.onnx"
    return [("go on", f"onward convert {shlex.quote(str(path))}{like} -o run.onnx")]


@command(
    LOOK,
    "onward diff checkpoint-500/ checkpoint-600/",
    "onward diff checkpoint-500/ run.onnx --params",
    "onward diff before.pt after.pt --rtol 1e-5 --json",
)
def diff(
    a: Annotated[Path, argument("A", "A checkpoint, a file or a folder; or an .onnx file.")],
    b: Annotated[Path, argument("B", "What to compare it with.")],
    atol: Annotated[float, option("--atol", "X", "How far numbers may be apart.", min=0)] = 0.0,
    rtol: Annotated[float, option("--rtol", "X", "The same, in proportion to the number in B.", min=0)] = 0.0,
    params: Annotated[bool, option("--params", None, "List what is equal, too.")] = False,
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
        print_rows([["  ", pair.name, _describe(pair)] for pair in shown])


def _describe(pair: Pair) -> str:
    one, other = pair.shapes
    if pair.distance is None:
        return f"{list(one)} and {list(other)}"
    parts = [f"{list(one)}"]
    if pair.dtypes[0] != pair.dtypes[1]:
        parts.append(" and ".join(pair.dtypes))
    if pair.is_transposed:
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
                "turned": pair.is_transposed,
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


@command(LOOK, "onward report run/", "onward report run/ -o digits.html")
def report(
    run: Annotated[Path, argument("RUN", "The folder of a run.")],
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Where to write. `report.html` in the folder unless given.")
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


# ---- plan ------------------------------------------------------------------------------------------------------------


@command(
    LOOK,
    "onward plan model.onnx --devices 64 --memory 80GB",
    "onward plan llama.onnx --shape tokens=N,4096 --devices 8 --memory 80GB --recompute-blocks --bandwidth 450GB \\\n"
    "      --flops 989T",
    "onward plan training.onnx --devices 16 --strategy fsdp --json | jq .estimates[0].memory",
    "onward plan training.onnx --devices 8 --strategy fsdp -o sharded.onnx",
    **options_from(PlanOptions),
)
def plan(
    model: options.Model,
    *,
    step: options.Step = 0,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write the model with the plan in it: devices, and what is divided.")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Say what a training would take on many devices, without running it.

    Parameters, gradients, state of the optimizer and activations on each device, what they must send each other, and
    with --bandwidth and --flops how long a step takes: for each strategy, or for one. Weights of the model are not read
    and need not be there.
    """
    place = target(model, output, "sharded", force=force) if output is not None else None
    import onward
    from onward.inspect.formatting import quantity
    from onward.planning.plan import annotate

    with working(f"planning for {model}", model):
        found = onward.plan(str(model), step=step, **select_given(PlanOptions, given))
    if place is not None:
        sharding = found.sharding()
        annotate(model, sharding, place.path)
        remark(f"wrote {place.path}: {sharding.name} on {quantity(sharding.devices, 'device')}")
    if as_json:
        print_json(found.to_json())
    else:
        say(str(found))
