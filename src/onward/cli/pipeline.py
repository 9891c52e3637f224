"""`onward pipeline` and `onward page`: preprocessing models, and pages that train in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_json, remark
from onward.cli.options import argument, option, options_from, pairs, select_given, source_of
from onward.cli.output_files import OutputFile, refuse_to_overwrite, target, working
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
        str, argument("OPERATIONS|FILE", "Operations, as for `--preprocess`; or the .onnx file of a pipeline or model.")
    ],
    *,
    model: Annotated[
        Path | None, option("--for", "MODEL", "Model whose inputs set the names, types and shapes.")
    ] = None,
    before: Annotated[
        Path | None,
        option("--before", "MODEL", "Write this model, training included, with the pipeline before it."),
    ] = None,
    rest: Annotated[Path | None, option("--rest", "FILE", "Output file of the model without its pipeline.")] = None,
    data: Annotated[
        list[str] | None,
        option("--data", "DATA", "Data for `-o FILE.npz`, or to count words of a vocabulary. May be repeated."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        option("--column", "INPUT=COLUMN", "Data column for an input, such as `text=review`. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None,
        option("--output -o", "FILE", "Output file; an .npz file gets arrays (default: `pipeline.onnx`)."),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Make a pipeline: a model from raw data to the inputs of another model.

    A pipeline is ONNX, made of standard operators. Run it with `--data`, join it to a model with
    `--before` or with `--preprocess` of `train` and `prepare`, and detach it from a model with
    `--rest`. `onward prepare --list preprocessing` lists the operations.
    """
    _check_together(source, model, before, rest, data, output)
    import onward

    mapping = pairs(columns, "text=review") if columns else None
    is_file = source.endswith(".onnx")
    if output is not None and output.suffix == _ARRAYS:
        if not force:
            refuse_to_overwrite(output)
        result = onward.load(source) if is_file else _make(source, model, data, mapping)
        _run(result, data, mapping, output, as_json)
        return
    destination = target(Path("pipeline.onnx"), output or Path("pipeline.onnx"), "pipeline", force=force)
    rest_destination = target(Path(source), rest, "rest", force=force) if rest is not None else None
    other: Model | None = None
    with working(f"making {destination.path}", *([Path(source)] if is_file else [])):
        if before is not None:
            result = onward.pipelines.join(source if is_file else _make(source, before, data, mapping), str(before))
        elif is_file:
            result, other = onward.pipelines.detach(source)
        else:
            result = _make(source, model, data, mapping)
    _write(result, destination, as_json)
    if rest_destination is not None and other is not None:
        rest_destination.write(other, _ports(other))


def _check_together(
    source: str, model: Path | None, before: Path | None, rest: Path | None, data: Any, output: Path | None
) -> None:
    is_file, is_run = source.endswith(".onnx"), output is not None and output.suffix == _ARRAYS
    if is_run and not data:
        raise Misuse("an .npz output needs data", "onward pipeline SOURCE --data DATA -o FILE.npz")
    if is_file and data and not is_run:
        raise Misuse("`--data` has no effect on an existing pipeline", "write arrays: `-o FILE.npz`")
    if before is not None and (rest or model or output is None or is_run):
        raise Misuse("`--before` joins two models into one .onnx file", "use it with `-o whole.onnx` and nothing else")
    if rest is not None and (not is_file or is_run):
        raise Misuse("`--rest` needs a model with a pipeline", "onward pipeline MODEL.onnx --rest FILE")
    if model is not None and is_file:
        raise Misuse("`--for` has no effect on an existing pipeline", "leave it out")


def _make(source: str, model: Path | None, data: list[str] | None, mapping: dict[str, str] | None) -> Model:
    import onward

    return onward.pipelines.make(source, str(model) if model else None, data=data, columns=mapping)


def _run(pipeline: Model, data: list[str] | None, mapping: dict[str, str] | None, output: Path, as_json: bool) -> None:
    import numpy as np

    import onward

    arrays = onward.pipelines.run(pipeline, data, columns=mapping)
    np.savez(output, allow_pickle=False, **arrays)
    if as_json:
        shapes = {name: {"type": str(a.dtype), "shape": list(a.shape)} for name, a in arrays.items()}
        print_json({"output": str(output), "arrays": shapes})
    else:
        remark(f"wrote {output}: " + ", ".join(f"{name} {a.dtype} {list(a.shape)}" for name, a in arrays.items()))


def _write(model: Model, output: OutputFile, as_json: bool) -> None:
    if as_json:
        output.save(model)
        ports = {side: [value.name for value in getattr(model, side)] for side in ("inputs", "outputs")}
        print_json({"output": str(output.path), **ports})
    else:
        output.write(model, _ports(model))


def _ports(model: Model) -> str:
    import onward
    from onward.inspect.formatting import shape

    summary = onward.describe(model)
    sides = (summary.inputs, summary.outputs)
    inputs, outputs = (", ".join(f"{port.name} {port.type} {shape(port.shape)}" for port in side) for side in sides)
    return f"from {inputs} to {outputs}"


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
    output: Annotated[Path, option("--output -o", "FOLDER", "Output folder.")],
    force: Annotated[bool, option("--force", None, "Write into a folder that holds other files.")] = False,
    as_json: options.Json = False,
    **typed: Any,
) -> None:
    """Write a page that trains a model in the browser.

    The model is a training model, or any model and a loss. Serve the folder with any web server; it
    needs no backend. Visitors train on their own device, on the data of the page, on what they
    draw, drop or film, or on both. They can watch, stop, resume, try and download the model.
    """
    import onward
    from onward.inspect.formatting import size

    asked = select_given(PageOptions, typed)
    if "data" in asked:
        asked["data"] = source_of(typed["data"])
    with working(f"writing a page for {model}", model):
        written = onward.page(model, **asked, output=output, force=force)
    if as_json:
        print_json({"output": str(written.path), "sizes": written.sizes, "notes": list(written.notes)})
        return
    for note in written.notes:
        remark(note)
    runtime = size(written.sizes["runtime"])
    remark(f"wrote {written.path}: a browser loads {size(written.loaded)}, {runtime} of it ONNX Runtime")
    remark(f"to open it: python -m http.server -d {written.path}, then http://localhost:8000")
