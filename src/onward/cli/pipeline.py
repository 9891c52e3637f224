"""`onward pipeline` and `onward page`: what happens to data before a model, and a page that trains one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, remark
from onward.cli.files import Target, refuse_to_overwrite, target, working
from onward.cli.options import argument, option, options_from, pairs, select_given, source_of
from onward.options import PageOptions

if TYPE_CHECKING:
    from onward import Model


_ARRAYS = ".npz"


@command(
    BUILD,
    "onward pipeline 'decode | resize:256 | center_crop:224 | scale | normalize:imagenet | channels_first'",
    "onward pipeline 'tokenize:wordpiece,vocabulary=vocab.txt,lowercase=true,punctuation=true' --for bert.onnx",
    "onward pipeline tokenize:words,vocabulary=10000,length=64 --data texts.csv -o pipeline.onnx",
    "onward pipeline pipeline.onnx --data texts.csv -o inputs.npz",
    "onward pipeline pipeline.onnx --before model.onnx -o whole.onnx",
    "onward pipeline whole.onnx -o pipeline.onnx --rest model.onnx",
    formerly={"--map": "--column"},
)
def pipeline(
    source: Annotated[
        str, argument("OPERATIONS|FILE", "What is done, as for `--preprocess`; or an .onnx file that does it.")
    ],
    *,
    model: Annotated[
        Path | None, option("--for", "MODEL", "The model that it is for, which says names, types and shapes.")
    ] = None,
    before: Annotated[
        Path | None,
        option("--before", "MODEL", "Write this model, its training included, with the pipeline before it."),
    ] = None,
    rest: Annotated[
        Path | None, option("--rest", "FILE", "Where to write a model whose pipeline is taken out, without it.")
    ] = None,
    data: Annotated[
        list[str] | None,
        option("--data", "DATA", "Data for `-o FILE.npz`, or those whose words are counted. May be repeated."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        option("--column", "INPUT=COLUMN", "Which column an input takes, such as `text=review`. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        option("--output -o", "FILE", "Where to write; arrays if it is an .npz file. `pipeline.onnx` unless given."),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make a pipeline: a model from data as they are to what another model takes.

    It is ONNX, made of operators of the standard. It can be run (`--data`), put before a model (`--before`, or
    `--preprocess` of `train` and `prepare`), and taken out of one that has it. `onward prepare --list preprocessing`
    lists operations.
    """
    _check_together(source, model, before, rest, data, output)
    import onward

    mapping = pairs(columns, "text=review") if columns else None
    is_file = source.endswith(".onnx")
    if output is not None and output.suffix == _ARRAYS:
        if not force:
            refuse_to_overwrite(output)
        made = onward.load(source) if is_file else _made(source, model, data, mapping)
        _run(made, data, mapping, output, as_json)
        return
    place = target(Path("pipeline.onnx"), output or Path("pipeline.onnx"), "pipeline", force=force)
    beside = target(Path(source), rest, "rest", force=force) if rest is not None else None
    other: Model | None = None
    with working(f"making {place.path}", *([Path(source)] if is_file else [])):
        if before is not None:
            made = onward.pipelines.join(source if is_file else _made(source, before, data, mapping), str(before))
        elif is_file:
            made, other = onward.pipelines.detach(source)
        else:
            made = _made(source, model, data, mapping)
    _write(made, place, as_json)
    if beside is not None and other is not None:
        beside.write(other, _ports(other))


def _check_together(
    source: str, model: Path | None, before: Path | None, rest: Path | None, data: Any, output: Path | None
) -> None:
    is_file, is_run = source.endswith(".onnx"), output is not None and output.suffix == _ARRAYS
    if is_run and not data:
        raise Misuse("arrays are made of data, and there are none", "give some: `--data DATA`")
    if is_file and data and not is_run:
        raise Misuse("`--data` has no effect on a pipeline that is there", "write arrays: `-o FILE.npz`")
    if before is not None and (rest or model or output is None or is_run):
        raise Misuse("`--before` joins two models into one", "say where that goes: `-o whole.onnx`, and no more")
    if rest is not None and (not is_file or is_run):
        raise Misuse("`--rest` is what is left of a model", "name the model: `onward pipeline MODEL --rest FILE`")
    if model is not None and is_file:
        raise Misuse("`--for` has no effect on a pipeline that is there", "leave it out")


def _made(source: str, model: Path | None, data: list[str] | None, mapping: dict[str, str] | None) -> Model:
    import onward

    return onward.pipelines.make(source, str(model) if model else None, data=_one_or_all(data), columns=mapping)


def _one_or_all(data: list[str] | None) -> str | list[str] | None:
    return data[0] if data and len(data) == 1 else data


def _run(made: Model, data: list[str] | None, mapping: dict[str, str] | None, output: Path, as_json: bool) -> None:
    import numpy as np

    import onward

    arrays = onward.pipelines.run(made, _one_or_all(data), columns=mapping)
    np.savez(output, allow_pickle=False, **arrays)
    if as_json:
        shapes = {name: {"type": str(a.dtype), "shape": list(a.shape)} for name, a in arrays.items()}
        print_json({"output": str(output), "arrays": shapes})
    else:
        remark(f"wrote {output}: " + ", ".join(f"{name} {a.dtype} {list(a.shape)}" for name, a in arrays.items()))


def _write(made: Model, place: Target, as_json: bool) -> None:
    if as_json:
        place.save(made)
        ports = {side: [value.name for value in getattr(made, side)] for side in ("inputs", "outputs")}
        print_json({"output": str(place.path), **ports})
    else:
        place.write(made, _ports(made))


def _ports(model: Model) -> str:
    import onward
    from onward.inspect.formatting import shape

    summary = onward.describe(model)
    sides = (summary.inputs, summary.outputs)
    taken, given = (", ".join(f"{one.name} {one.type} {shape(one.shape)}" for one in side) for side in sides)
    return f"from {taken} to {given}"


# ---- page ------------------------------------------------------------------------------------------------------------


@command(
    BUILD,
    "onward page digits.onnx --data digits.npz --loss cross_entropy --validation 0.1 -o site/",
    "onward page training.onnx --data digits.npz --title 'Handwritten digits' -o site/",
    "onward page net.onnx --loss cross_entropy --new-head 3 --class cat --class dog --class bird -o site/",
    "onward page net.onnx --data table.csv --loss mse --picture none --runtime node_modules/onnxruntime-web -o site/",
    usage="MODEL [--data DATA] -o FOLDER [OPTIONS]",
    **options_from(PageOptions),
)
def page(
    model: options.Model,
    *,
    output: Annotated[Path, option("--output -o", "FOLDER", "Where the page goes.")],
    force: Annotated[bool, option("--force", None, "Write into a folder that holds something else.")] = False,
    as_json: options.Json = False,
    **given: Any,
) -> None:
    """Write a page that trains a model in the browser: train, watch, stop, go on, try it, download it.

    The model is a training model, or any model and a loss. The folder is for any web server, and asks no other: whoever
    opens it trains on their own device, on the data that are given here, on what they draw, drop and film, or on both.
    """
    import onward
    from onward.inspect.formatting import size

    asked = select_given(PageOptions, given)
    if "data" in asked:
        asked["data"] = source_of(given["data"])
    with working(f"writing a page for {model}", model):
        made = onward.page(model, **asked, output=output, force=force)
    if as_json:
        print_json({"output": str(made.path), "sizes": made.sizes, "notes": list(made.notes)})
        return
    for note in made.notes:
        remark(note)
    remark(f"wrote {made.path}: a browser loads {size(made.loaded)}, {size(made.sizes['runtime'])} of it ONNX Runtime")
    remark(f"to look at it: python -m http.server -d {made.path}, and open http://localhost:8000")
