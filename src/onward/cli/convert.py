"""`onward convert`: runs and checkpoints of other frameworks as training models, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_fields, print_json, remark
from onward.cli.files import Where, refuse_to_overwrite, target, working, writing
from onward.cli.options import argument, example_in, option, options_from, select_given
from onward.errors import InvalidModelError, WriteError, suggest
from onward.options import MISSING, MissingOptions

if TYPE_CHECKING:
    from onward.frameworks.files import Framework


def _formats() -> str:
    """What can be written, for the help."""
    from onward.checkpoint.formats import writable
    from onward.frameworks.files import FRAMEWORKS

    programs, checkpoints = ", ".join(FRAMEWORKS), ", ".join(writable())
    return (
        f"`--to` writes a program with its state for {programs}; or a checkpoint: {checkpoints}. Where there are both, "
        "a checkpoint becomes one, as does a training model that was made of one, and any other becomes a program."
    )


@command(
    BUILD,
    "onward convert training.onnx --to torch -o run.pt",
    "onward convert run.pt --like training.onnx -o trained.onnx",
    "onward convert checkpoint-500/ --like model.onnx --loss cross_entropy -o run.onnx",
    "onward convert checkpoint-500/ --like model.onnx --dry-run",
    "onward convert last.ckpt --module project.models:Classifier --inputs batch.npz -o run.onnx",
    "onward convert run.onnx --to hf -o checkpoint-600/",
    "onward convert checkpoint-500/ --to dcp -o sharded/",
    about=_formats,
    **options_from(MissingOptions),
)
def convert(
    source: Annotated[
        Path, argument("SOURCE", "An .onnx file; a checkpoint, a file or a folder; or what was written with `--to`.")
    ],
    to: Annotated[str | None, option("--to", "FORMAT", "A framework, or a format of checkpoints: see above.")] = None,
    output: Annotated[
        Path | None, option("--output -o", "PATH", "The file or folder to write. Beside the source unless given.")
    ] = None,
    program: Annotated[
        bool | None,
        option("--program/--only-state", None, "Which of the two it is for `torch`, `keras` or `tensorflow`."),
    ] = None,
    like: Annotated[
        Path | None,
        option("--like", "MODEL", "The model that a checkpoint is of; or the training model that a run was made of."),
    ] = None,
    module: Annotated[
        str | None,
        option(
            "--module",
            "PACKAGE:CLASS",
            "In place of `--like`, the nn.Module or LightningModule that was trained: your code, which is executed.",
            MISSING,
        ),
    ] = None,
    inputs: Annotated[
        Path | None,
        option(
            "--inputs", "FILE", "An .npz file with what the module takes, by name or in its order; or a batch.", MISSING
        ),
    ] = None,
    no_probe: Annotated[
        bool,
        option("--no-probe", None, "Do not compare a step of `--module` with one of its graph: saves memory.", MISSING),
    ] = False,
    dry_run: Annotated[
        bool, option("--dry-run", None, "Say what would become of a checkpoint, and write nothing.")
    ] = False,
    data: options.Data = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    **stated: Any,
) -> None:
    """Turn a checkpoint of another framework into a training model, or a training model into what others go on with.

    A run goes on where it was: weights, optimizer, schedule, step. With `--like`, a checkpoint becomes a training
    model. With `--to`, a training model becomes a checkpoint, or a program of a framework with its state; and a
    checkpoint becomes one of another format. What is read is never executed.

    A program of PyTorch or Keras is a .py file beside a .pt or .keras file; for JAX and TensorFlow it is a folder. On
    the way back the state in them refills the training model `--like`.
    """
    if not source.exists():
        raise _missing(source)
    given = {**select_given(MissingOptions, stated), "module": module}
    told = [f"--{name.replace('_', '-')}" for name, value in {**given, "inputs": inputs}.items() if value is not None]
    told += ["--no-probe"] * no_probe + ["--dry-run"] * dry_run
    if to is not None:
        if like is not None or told:
            raise Misuse(f"`{'--like' if like else told[0]}` is for the way back, and `--to` is not", "leave one out")
        written = _convert_to(source, to, output, force, program)
    elif program is not None:
        what = "program" if program else "state"
        example = "--program" if program else "--only-state"
        raise Misuse(f"it is not said what to write the {what} for", f"say for example `--to torch {example}`")
    elif source.suffix == ".onnx":
        raise Misuse(f"it is not said what to make of `{source}`", "say for example `--to torch`")
    elif _is_foreign(source, bool(told)):
        given |= {"example_inputs": example_in(inputs) if inputs is not None else None, "probe": not no_probe}
        written = _import(source, output, like, given, dry_run, as_json, data, force)
    else:
        written = [_refill(source, output, like, data, force)]
    if as_json and not dry_run:
        print_json([str(path) for path in written])


def _missing(source: Path) -> InvalidModelError:
    siblings = [entry.name for entry in source.parent.iterdir()] if source.parent.is_dir() else []
    return InvalidModelError(
        f"there is no file `{source}`", hint=suggest(source.name, siblings) or "see `onward convert --help`"
    )


# ---- out -------------------------------------------------------------------------------------------------------------


def _convert_to(source: Path, to: str, output: Path | None, force: bool, program: bool | None) -> list[Path]:
    from onward.checkpoint.formats import writable
    from onward.frameworks.files import FRAMEWORKS

    known = dict.fromkeys([*FRAMEWORKS, *writable()])
    if to not in known:
        hint = suggest(to, known) or "see `onward convert --help`"
        raise Misuse(f"`{to}` is not one of {', '.join(f'`{name}`' for name in known)}", hint)
    framework = next((name for name in FRAMEWORKS if name == to), None)
    if program and framework is None:
        raise Misuse(f"there are no programs for `{to}`", f"there are some for {', '.join(FRAMEWORKS)}")
    if program and source.suffix != ".onnx":
        hint = f"make a training model of it first: `onward convert {source} --like model.onnx`"
        raise Misuse(f"a program is written of a training model, and `{source}` is none", hint)
    if program is None:
        program = framework is not None and source.suffix == ".onnx" and not _was_state(source, to)
    if program and framework is not None:
        return _program(source, framework, output, force)
    if to not in writable():
        raise Misuse(f"`{to}` is no format of checkpoints", f"there are {', '.join(writable())}")
    return [_checkpoint(source, to, output, force)]


def _was_state(source: Path, to: str) -> bool:
    """Whether a model was made of a checkpoint, and can be one again. Only Keras's have layers, as its files need."""
    import onward
    from onward.checkpoint.formats import writable
    from onward.checkpoint.source_checkpoint import source_of

    with working(f"reading {source}", source):
        model = onward.load(str(source))
        origin = source_of(model) if model.steps and to in writable() else None
    if origin is None or (to == "keras" and origin.checkpoint.format != to):
        return False
    remark(f"`{source}` was made of a checkpoint, and becomes one; for a program, say `--program`")
    return True


def _program(source: Path, framework: Framework, output: Path | None, force: bool) -> list[Path]:
    import onward
    from onward.frameworks.files import ENDINGS, write, written_paths

    ending = ENDINGS[framework]
    path = output or source.with_name(f"{source.name.removesuffix('.onnx')}{ending or f'-{framework}'}")
    if ending and path.suffix != ending:
        raise Misuse(f"`{path}` is no name for {framework}", f"write to `{path.with_suffix(ending)}`, for example")
    for place in written_paths(framework, path) if not force else []:
        refuse_to_overwrite(place, source)
    with working(f"converting {source}", source):
        written = write(onward.load(str(source)), framework, path)
    remark(f"wrote {' and '.join(map(str, written))}")
    return written


def _checkpoint(source: Path, to: str, output: Path | None, force: bool) -> Path:
    from onward.checkpoint import to_checkpoint
    from onward.checkpoint.formats import writable
    from onward.model.storage.files import listing

    stem = source.name if source.is_dir() else source.stem
    format = writable()[to]
    path = output or source.with_name(f"{stem}{format.ending or f'-{to}'}")
    if format.ending and not path.suffix:
        example = path.with_suffix(format.ending)
        raise Misuse(f"`{path}` is no name for a file of {to}", f"write to `{example}`, for example")
    if format.is_folder and path.is_dir() and listing(path):
        raise WriteError(
            f"`{path}` is a folder with other files, and those of a checkpoint would be mixed with them",
            hint="remove it first, or write elsewhere with `-o`",
        )
    if not force and not (format.is_folder and path.is_dir()):
        refuse_to_overwrite(path, source)
    with writing(f"writing {path}", *([source] if source.suffix == ".onnx" else [])):
        to_checkpoint(source, path, format=to)
    remark(f"wrote {path}")
    return path


# ---- in --------------------------------------------------------------------------------------------------------------


def _is_foreign(source: Path, told: bool) -> bool:
    """Whether it is a checkpoint. The state of a program of ours is none, unless more is `told` than it needs."""
    from onward.checkpoint import is_checkpoint
    from onward.importing.programs import framework_of

    return is_checkpoint(source) and (told or framework_of(source) is None)


def _import(
    source: Path,
    output: Path | None,
    like: Path | None,
    given: dict[str, Any],
    dry_run: bool,
    as_json: bool,
    data: Where,
    force: bool,
) -> list[Path]:
    from onward.importing import apply_plan, plan_import, plan_json, plan_lines

    place = target(source, output, "training", data=data, force=force or dry_run)
    with working(f"reading {source}"):
        planned = plan_import(source, like, **given)
        made = apply_plan(planned)
    if dry_run and as_json:
        print_json(plan_json(planned))
    elif dry_run:
        print_fields([*plan_lines(planned), ("would write", str(place.path))])
    if dry_run:
        return []
    for note in planned.notes:
        remark(note)
    place.write(made)
    return [place.path]


def _refill(source: Path, output: Path | None, like: Path | None, data: Where, force: bool) -> Path:
    import onward
    from onward.frameworks.files import recognize, restore
    from onward.importing.programs import framework_of

    framework = framework_of(source) or recognize(source)
    if framework is None:
        raise Misuse(
            f"`{source}` is of no framework", "give a checkpoint, a .pt file, a .keras file, a folder; or an .onnx file"
        )
    place = target(source, output, "restored", data=data, force=force)
    with working(f"reading {source}"):
        made = restore(framework, source, onward.load(str(like)) if like is not None else None)
    place.write(made)
    return place.path
