"""`onward describe`, `diff`, `report` and `plan`: inspect files and runs, and plan a training."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli import options
from onward.cli.app import FAILED, LOOK, command
from onward.cli.console import out, print_fields, print_json, print_rows, remark, say, word
from onward.cli.options import argument, option, options_from, select_given
from onward.cli.output_files import target, working
from onward.errors import WriteError
from onward.options import PlanOptions

if TYPE_CHECKING:
    from onward.analysis.blocks import Part
    from onward.checkpoint.comparison import Comparison, Fact, Pair
    from onward.checkpoint.format import Checkpoint


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
        option("--params", None, "List all tensors: trained, frozen, constant; of a checkpoint, also optimizer state."),
    ] = False,
    blocks: Annotated[
        bool, option("--blocks", None, "List the blocks that the graph repeats; equal blocks are of one kind.")
    ] = False,
    graph: Annotated[Path | None, option("--graph", "FILE", "Draw the training graph to an .svg file.")] = None,
    unsafe: Annotated[
        bool, option("--unsafe", None, "List the code that loading the checkpoint with pickle would execute.")
    ] = False,
    step: options.Step = 0,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Describe a model, a training model or a checkpoint.

    Prints inputs and outputs, parameters (trained, frozen, constant), loss, optimizer, schedule,
    state, and training progress. The file may also be a checkpoint of PyTorch, Lightning or Hugging
    Face, as a file or folder. Nothing in it is executed.
    """
    from onward.inspect import describe as summarize
    from onward.inspect import draw, render, render_parameters
    from onward.model import load
    from onward.model.storage import write_file

    if unsafe:
        _show_code(model, as_json)
        return
    if model.suffix != ".onnx" or model.is_dir():
        from onward.checkpoint.formats import is_checkpoint  # takes longer than the rest of this command

        if is_checkpoint(model):
            _show_checkpoint(model, params, as_json)
            return
    if blocks:
        _show_blocks(model, as_json)
        return
    if graph is not None and graph.exists() and not force:
        raise WriteError(f"`{graph}` already exists", hint="write to another file, or overwrite it with `--force`")
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
        repeated = find_blocks(load(path))
    if as_json:
        lists = ("parameters", "inputs", "outputs")
        print_json(
            [
                {"name": block.name, "kind": block.pattern, "nodes": len(block.nodes)}
                | {key: [value.name for value in getattr(block, key)] for key in lists}
                for block in repeated
            ]
        )
    elif repeated:
        rows = [
            [
                block.name or f"block {i}",
                f"kind {block.pattern}",
                quantity(len(block.nodes), "node"),
                _parameters(block),
            ]
            for i, block in enumerate(repeated)
        ]
        print_rows(rows, styles=("bold",))
    else:
        say("no repeated blocks")


def _parameters(block: Part) -> str:
    from onward.inspect.formatting import quantity

    numbers = sum(value.const_value.size for value in block.parameters if value.const_value is not None)
    return f"{quantity(len(block.parameters), 'parameter')}, {numbers:,} numbers"


def _show_code(path: Path, as_json: bool) -> None:
    from onward.checkpoint.formats import list_code

    code, error = list_code(path)
    if as_json:
        print_json([reference._asdict() for reference in code])
    for reference in () if as_json else code:
        say(f"{reference.file}  {reference.name}{reference.call}")
    if error is not None:
        raise error
    if not code and not as_json:
        say("no code")


def _show_checkpoint(path: Path, params: bool, as_json: bool) -> None:
    from onward.checkpoint.formats import open_checkpoint
    from onward.checkpoint.summary import lines, tensor_lines, to_json

    checkpoint = open_checkpoint(path)
    if as_json:
        print_json(to_json(checkpoint))
    elif params:
        for line in tensor_lines(checkpoint):
            say(line)
    else:
        say(path.name or str(path), style="bold")
        print_fields([*lines(checkpoint), *_next_command(path, checkpoint)], indent="  ")


def _next_command(path: Path, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return the command that converts a checkpoint, if it has an optimizer."""
    from onward.importing.capture import has_model

    if not checkpoint.optimizers:
        return []
    like = "" if has_model(checkpoint) else " --like model.onnx"
    # Configurations of transformers and graphs of artifacts have the loss; Keras layers do not.
    needs_loss = "loss" in checkpoint.missing and (like or checkpoint.format == "keras")
    loss = " --loss cross_entropy" if needs_loss else ""
    return [("next", f"onward convert {shlex.quote(str(path))}{like}{loss} -o run.onnx")]


@command(
    LOOK,
    "onward diff checkpoint-500/ checkpoint-600/",
    "onward diff checkpoint-500/ run.onnx --params",
    "onward diff before.pt after.pt --rtol 1e-5 --json",
)
def diff(
    a: Annotated[Path, argument("A", "A checkpoint file or folder, or an .onnx file.")],
    b: Annotated[Path, argument("B", "The file or folder to compare with.")],
    atol: Annotated[float, option("--atol", "X", "Absolute tolerance.", min=0)] = 0.0,
    rtol: Annotated[float, option("--rtol", "X", "Tolerance relative to the number in B.", min=0)] = 0.0,
    params: Annotated[bool, option("--params", None, "Also list equal tensors and settings.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare two checkpoints of any formats, two models, or one of each.

    Compares names, shapes, types and values of tensors; class, hyper-parameters and state of the
    optimizer; schedule, step and random number state. NaN equals NaN. The exit code is 0 if
    everything is equal, else 1.
    """
    from onward.checkpoint.comparison import diff as compare

    with working(f"comparing {a} and {b}", *(path for path in (a, b) if path.suffix == ".onnx")):
        comparison = compare(a, b, atol=atol, rtol=rtol)
    if as_json:
        print_json(_as_json(comparison))
    else:
        _print(comparison, params)
    if not comparison.equal:
        raise typer.Exit(FAILED)


def _print(comparison: Comparison, params: bool) -> None:
    print_fields(
        [("a", f"{comparison.a.path}, {comparison.a.title}"), ("b", f"{comparison.b.path}, {comparison.b.title}")]
    )
    print_fields([("names", rule) for rule in comparison.rules])
    _print_section("tensors", comparison.tensors, params)
    _print_section("optimizer state", comparison.slots, params)
    for side, names in (("a", comparison.only_a), ("b", comparison.only_b)):
        if names:
            say(f"only in {side}: {len(names):,}", style="bold")
            print_rows([["  ", name] for name in names])
    shown = [fact for fact in comparison.facts if params or not fact.equal]
    if shown:
        say("training", style="bold")
        print_rows([["  ", fact.name, _values(fact)] for fact in shown])
    say("equal" if comparison.equal else "different", style="bold green" if comparison.equal else "bold red")


def _print_section(heading: str, pairs: Iterable[Pair], params: bool) -> None:
    pairs = list(pairs)
    if not pairs:
        return
    different = [pair for pair in pairs if not pair.equal]
    say(f"{heading}: {len(pairs):,} in both, {len(different):,} different", style="bold")
    if shown := pairs if params else different:
        print_rows([["  ", pair.name, _describe(pair)] for pair in shown])


def _describe(pair: Pair) -> str:
    shape, other_shape = pair.shapes
    if pair.distance is None:
        return f"{list(shape)} and {list(other_shape)}"
    parts = [f"{list(shape)}"]
    if pair.dtypes[0] != pair.dtypes[1]:
        parts.append(" and ".join(pair.dtypes))
    if pair.is_transposed:
        parts.append("transposed")
    differ, absolute, relative = pair.distance
    far = f"at most {absolute:.3g} apart, relative {relative:.3g}" if absolute else "equal values"
    parts.append(f"{differ:,} elements differ, {far}" if differ else far)
    return ", ".join(parts)


def _values(fact: Fact) -> str:
    value, other_value = _word(fact.a), _word(fact.b)
    return f"{value} in both" if fact.equal else f"{value} and {other_value}"


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_word(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.7g}"
    return "nothing" if value is None else word(value)


def _as_json(comparison: Comparison) -> dict[str, Any]:
    from onward.checkpoint.summary import plain

    def pairs(compared: Iterable[Pair]) -> list[dict[str, Any]]:
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
            for pair in compared
        ]

    return {
        "a": {"path": str(comparison.a.path), "format": comparison.a.format, "title": comparison.a.title},
        "b": {"path": str(comparison.b.path), "format": comparison.b.format, "title": comparison.b.title},
        "equal": comparison.equal,
        "rules": list(comparison.rules),
        "tensors": pairs(comparison.tensors),
        "slots": pairs(comparison.slots),
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "facts": [
            {"name": fact.name, "a": plain(fact.a), "b": plain(fact.b), "equal": fact.equal}
            for fact in comparison.facts
        ],
    }


@command(LOOK, "onward report run/", "onward report run/ -o digits.html")
def report(
    run: Annotated[Path, argument("RUN", "Run folder.")],
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Output file (default: `report.html` in the run folder).")
    ] = None,
    force: options.Force = False,
) -> None:
    """Write an HTML report of a run: curves, gradients, weights and the recipe.

    The report is one self-contained HTML file without network requests. The run may still be
    training; write the report again to update it.
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
        Path | None, option("--output -o", "FILE", "Write the model with the plan: devices and sharded tensors.")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    **typed: Any,
) -> None:
    """Estimate a training on many devices without running it.

    Prints parameters, gradients, optimizer state, activations and communication per device, for
    every strategy or for one. With --bandwidth and --flops it also prints the time per step. The
    weights of the model are not read and may be missing.
    """
    destination = target(model, output, "sharded", force=force) if output is not None else None
    import onward
    from onward.inspect.formatting import quantity
    from onward.planning.plan import annotate

    with working(f"planning for {model}", model):
        estimate = onward.plan(str(model), step=step, **select_given(PlanOptions, typed))
    if destination is not None:
        sharding = estimate.sharding()
        annotate(model, sharding, destination.path)
        remark(f"wrote {destination.path}: {sharding.name} on {quantity(sharding.devices, 'device')}")
    if as_json:
        print_json(estimate.to_json())
    else:
        say(str(estimate))
