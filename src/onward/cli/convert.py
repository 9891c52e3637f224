"""`onward convert`: runs and checkpoints of other frameworks to training models, and back."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_fields, print_json, remark
from onward.cli.options import argument, example_in, option, options_from, select_given
from onward.cli.output_files import Where, beside, refuse_to_overwrite, target, working, writing
from onward.errors import InvalidModelError, UnsupportedError, WriteError, suggest
from onward.options import MISSING, MissingOptions

if TYPE_CHECKING:
    from onward.frameworks.run_files import Framework


def _formats() -> str:

    from onward.checkpoint.formats import writable
    from onward.frameworks.run_files import FRAMEWORKS

    programs, checkpoints = ", ".join(FRAMEWORKS), ", ".join(writable())
    return (
        f"`--to` writes a program with its state ({programs}) or a checkpoint ({checkpoints}). If a format has both, "
        "a checkpoint and a training model made from one become a checkpoint, and other models a program."
    )


@command(
    BUILD,
    "onward convert training.onnx --to torch -o run.pt",
    "onward convert run.pt --like training.onnx -o trained.onnx",
    "onward convert checkpoint-500/ --like model.onnx --loss cross_entropy -o run.onnx",
    "onward convert checkpoint-500/ --like model.onnx --dry-run",
    "onward convert last.ckpt --module project.models:Classifier --inputs batch.npz -o run.onnx",
    "onward convert other.onnx --like model.onnx --match structure -o out.onnx",
    "onward convert run.onnx --to hf -o checkpoint-600/",
    "onward convert model.onnx --to torch -o model.py",
    "onward convert checkpoint-500/ --to dcp -o sharded/",
    "onward convert checkpoint-500/ --to hf-model --dtype bfloat16 -o deploy/",
    about=_formats,
    **options_from(MissingOptions),
)
def convert(
    source: Annotated[
        Path, argument("SOURCE", "An .onnx file, a checkpoint file or folder, or a file written with `--to`.")
    ],
    to: Annotated[str | None, option("--to", "FORMAT", "A framework or a checkpoint format: see above.")] = None,
    output: Annotated[
        Path | None, option("--output -o", "PATH", "Output file or folder (default: beside the source).")
    ] = None,
    program: Annotated[
        bool | None,
        option("--program/--only-state", None, "For `torch`, `keras`, `tensorflow`: a program, or only its state."),
    ] = None,
    like: Annotated[
        Path | None,
        option("--like", "MODEL", "Model of the checkpoint, or the training model that was converted with `--to`."),
    ] = None,
    match: Annotated[
        Literal["names", "structure"] | None,
        option(
            "--match",
            "HOW",
            "How tensors of SOURCE and `--like` are matched: by `names` (default), or by `structure`, which is what "
            "they compute in the two graphs. SOURCE may be an .onnx file. Outputs are compared.",
        ),
    ] = None,
    module: Annotated[
        str | None,
        option(
            "--module",
            "PACKAGE:CLASS|NAME",
            "Instead of `--like`: the nn.Module or LightningModule of the checkpoint. This executes your code. A name "
            "without a colon is one of several modules in the checkpoint: `generator`.",
            MISSING,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        option("--inputs", "FILE", "An .npz file of the module's inputs, by name or in order; or a batch.", MISSING),
    ] = None,
    no_probe: Annotated[
        bool,
        option("--no-probe", None, "Skip comparing a step of `--module` with its graph, to save memory.", MISSING),
    ] = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        option("--dtype", "TYPE", "With `--to hf-model` or `safetensors`: the type of the weights."),
    ] = None,
    dry_run: Annotated[
        bool, option("--dry-run", None, "Print how the checkpoint would be converted, and write nothing.")
    ] = False,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    **stated: Any,
) -> None:
    """Convert a checkpoint to a training model, or a model to a checkpoint or program.

    The run continues where it stopped: weights, optimizer, schedule, step. With `--like`, a
    checkpoint becomes a training model. With `--to`, a training model becomes a checkpoint, or a
    program of a framework with its state, and a checkpoint becomes one of another format. Other
    models become programs without optimizer. Nothing that is read is executed.

    A program of PyTorch or Keras is a .py file beside a .pt or .keras file. For JAX and TensorFlow
    it is a folder. To convert back, pass the training model with `--like`: the state is loaded into
    it.
    """
    if not source.exists():
        siblings = [entry.name for entry in source.parent.iterdir()] if source.parent.is_dir() else []
        hint = suggest(source.name, siblings) or "see `onward convert --help`"
        raise InvalidModelError(f"the file `{source}` does not exist", hint=hint)
    settings = {**select_given(MissingOptions, stated), "module": module}
    flags = [f"--{name.replace('_', '-')}" for name, v in {**settings, "inputs": inputs}.items() if v is not None]
    flags += ["--no-probe"] * no_probe + ["--dry-run"] * dry_run + ["--match"] * (match is not None)
    if to is not None:
        name = module if module is not None and ":" not in module and source.suffix != ".onnx" else None
        flags = [flag for flag in flags if flag != "--module" or name is None]
        if flags or (like is not None and source.suffix == ".onnx"):  # a program, too, takes none
            raise Misuse(f"`{'--like' if like else flags[0]}` has no effect with `--to`", "leave one of them out")
        written = _convert_to(source, to, output, force, program, like, dtype, name)
    elif dtype is not None:
        raise Misuse("`--dtype` needs `--to`", f"onward convert {source} --to hf-model --dtype {dtype}")
    elif program is not None:
        flag = "--program" if program else "--only-state"
        raise Misuse(f"`{flag}` needs `--to`", f"onward convert {source} --to torch {flag}")
    elif source.suffix == ".onnx" and match != "structure":
        if like is not None:
            hint = f"onward convert {source} --like {like} --match structure"
            raise Misuse(f"`{source}` is a model: tensors of models are matched by structure", hint)
        raise Misuse(f"missing option `--to` for `{source}`", f"onward convert {source} --to torch")
    elif match == "structure" or _is_foreign(source, bool(flags)):
        settings["match"] = match or "names"
        settings |= {"example_inputs": example_in(inputs) if inputs is not None else None, "probe": not no_probe}
        written = _import(source, output, like, settings, dry_run, as_json, data, force)
    else:
        written = [_refill(source, output, like, data, force)]
    if as_json and not dry_run:
        print_json([str(path) for path in written])


# ---- export----------------------------------------------------------------------------------------------------------


def _convert_to(
    source: Path,
    to: str,
    output: Path | None,
    force: bool,
    program: bool | None,
    like: Path | None,
    dtype: Any,
    module: str | None,
) -> list[Path]:
    from onward.checkpoint.formats import writable
    from onward.frameworks.run_files import FRAMEWORKS

    formats = dict.fromkeys([*FRAMEWORKS, *writable()])
    if to not in formats:
        hint = suggest(to, formats) or "see `onward convert --help`"
        raise Misuse(f"`{to}` is not one of {', '.join(f'`{name}`' for name in formats)}", hint)
    _refuse_other_files_of_a_run(source, to)
    framework = next((name for name in FRAMEWORKS if name == to), None)
    if program and framework is None:
        raise Misuse(f"cannot write a program for `{to}`", f"use one of {', '.join(FRAMEWORKS)}")
    if program and source.suffix != ".onnx":
        hint = f"make a training model first: `onward convert {source} --like model.onnx`"
        raise Misuse(f"cannot write a program: `{source}` is not a training model", hint)
    if program is None:
        program = framework is not None and source.suffix == ".onnx" and not _was_state(source, to)
    if program and framework is not None:
        if dtype is not None:
            raise Misuse("`--dtype` has no effect on a program", "write weights alone: `--to hf-model`")
        return _program(source, framework, output, force)
    if to not in writable():
        raise Misuse(f"`{to}` is not a checkpoint format", f"use one of {', '.join(writable())}")
    return [_checkpoint(source, to, output, force, like, dtype, module)]


def _refuse_other_files_of_a_run(source: Path, to: str) -> None:
    """Name the training model of a run, for its folder and for its inference models."""
    import onward
    from onward.training.run import CONFIG, TRAINING

    training = (source if source.is_dir() else source.parent) / TRAINING
    if not training.is_file() or not training.with_name(CONFIG).is_file() or training == source:
        return
    hint = f"onward convert {shlex.quote(str(training))} --to {to}"
    if source.is_dir():
        raise Misuse(f"`{source}` is the folder of a run", hint)
    if source.suffix == ".onnx" and not onward.load(str(source)).steps:
        raise UnsupportedError(f"`{source}` is an inference model, without optimizer state", hint=hint)


def _was_state(source: Path, to: str) -> bool:
    """True if a model was made from a checkpoint and can become one; `keras` needs Keras layers."""
    import onward
    from onward.checkpoint.embedded import embedded_checkpoint
    from onward.checkpoint.formats import writable

    with working(f"reading {source}", source):
        model = onward.load(str(source))
        origin = embedded_checkpoint(model) if model.steps and to in writable() else None
    if origin is None or (to == "keras" and origin[0].format != to):
        return False
    remark(f"`{source}` was made from a checkpoint and becomes one; for a program, use `--program`")
    return True


def _program(source: Path, framework: Framework, output: Path | None, force: bool) -> list[Path]:
    import onward
    from onward.frameworks.program.source_text import program_beside
    from onward.frameworks.run_files import ENDINGS, write, written_paths

    ending = ENDINGS[framework]
    path = output or beside(source, f"{source.name.removesuffix('.onnx')}{ending or f'-{framework}'}")
    if ending and path.suffix == ".py" and program_beside(path.with_suffix(ending)) == path:
        path = path.with_suffix(ending)  # named by its program
    if ending and path.suffix != ending:
        hint = f"write to `{path.with_suffix(ending)}`, for example"
        raise Misuse(f"a file of {framework} ends with {ending}, not `{path.name}`", hint)
    for file in written_paths(framework, path) if not force else []:
        refuse_to_overwrite(file, source)
    with working(f"converting {source}", source):
        written = write(onward.load(str(source)), framework, path)
    remark(f"wrote {' and '.join(map(str, written))}")
    return written


def _checkpoint(
    source: Path, to: str, output: Path | None, force: bool, like: Path | None, dtype: Any, module: str | None
) -> Path:
    from onward.checkpoint.exporting import to_checkpoint
    from onward.checkpoint.formats import open_checkpoint, writable
    from onward.checkpoint.pytorch.contents import of_module
    from onward.importing import with_parameter_names
    from onward.model.storage.files import listing

    stem = source.name if source.is_dir() else source.stem
    format = writable()[to]
    path = output or beside(source, f"{stem}{format.ending or f'-{to}'}")
    if format.ending and not path.suffix:
        example = path.with_suffix(format.ending)
        raise Misuse(f"a file of {to} needs a suffix, and `{path}` has none", f"write to `{example}`, for example")
    if format.is_folder and path.is_dir() and listing(path):
        raise WriteError(
            f"the folder `{path}` is not empty, and the checkpoint needs its own folder",
            hint="remove it first, or write elsewhere with `-o`",
        )
    if not force and not (format.is_folder and path.is_dir()):
        refuse_to_overwrite(path, source)
    is_named = source.suffix == ".onnx" or not format.needs_names
    if is_named and like is not None:
        raise Misuse("`--like` has no effect with `--to`", "leave one of them out")
    with writing(f"writing {path}", *([source] if source.suffix == ".onnx" else [])):
        content = source if module is None else of_module(open_checkpoint(source), module)
        to_checkpoint(content if is_named else with_parameter_names(content, like), path, format=to, dtype=dtype)
    remark(f"wrote {path}")
    return path


# ---- import----------------------------------------------------------------------------------------------------------


def _is_foreign(source: Path, has_options: bool) -> bool:
    """True if the source is a checkpoint. State written with `--to` is not, unless options ask for an import."""
    from onward.checkpoint.formats import is_checkpoint
    from onward.importing.programs import framework_of

    return is_checkpoint(source) and (has_options or framework_of(source) is None)


def _import(
    source: Path,
    output: Path | None,
    like: Path | None,
    settings: dict[str, Any],
    dry_run: bool,
    as_json: bool,
    data: Where,
    force: bool,
) -> list[Path]:
    from onward.importing import apply_plan, plan_import, plan_json, plan_lines

    ending = "training" if settings["match"] == "names" else "matched"
    destination = target(source, output, ending, data=data, force=force or dry_run)
    with working(f"reading {source}"):
        planned = plan_import(source, like, **settings)
        training = apply_plan(planned)
    if dry_run and as_json:
        print_json(plan_json(planned))
    elif dry_run:
        print_fields([*plan_lines(planned), ("would write", str(destination.path))])
    if dry_run:
        return []
    for note in planned.notes:
        remark(note)
    destination.write(training)
    return [destination.path]


def _refill(source: Path, output: Path | None, like: Path | None, data: Where, force: bool) -> Path:
    import onward
    from onward.frameworks.run_files import recognize, restore
    from onward.importing.programs import framework_of

    framework = framework_of(source) or recognize(source)
    if framework is None:
        raise Misuse(
            f"unknown format: `{source}`", "pass a checkpoint, a .pt or .keras file, a folder, or an .onnx file"
        )
    destination = target(source, output, "restored", data=data, force=force)
    with working(f"reading {source}"):
        training = restore(framework, source, onward.load(str(like)) if like is not None else None)
    destination.write(training)
    return destination.path
