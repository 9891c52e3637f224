"""Commands that change a model and keep its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import CHANGE, Misuse, command, parameters_of
from onward.cli.console import print_json, print_rows, remark, word
from onward.cli.options import NUMBERS, argument, number, option, pairs
from onward.cli.output_files import OutputFile, Where, target, working
from onward.errors import InvalidModelError, UnknownNameError, list_names

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward import Model

_MOST = 64
"""Largest number of elements of a setting; a larger tensor is a weight."""


@command(
    CHANGE,
    "onward set training.onnx --list",
    "onward set training.onnx group0/lr=3e-4 schedule/steps=5000",
    "onward set training.onnx step=0 -o restarted.onnx",
    "onward set model.onnx --shape image=N,3,224,224",
    name="set",
    usage="MODEL NAME=VALUE... [OPTIONS]",
)
def set_(
    model: options.OptionalModel = None,
    settings: Annotated[
        list[str] | None, argument("NAME=VALUE...", "Hyper-parameters, counters, other small tensors.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        option(
            "--shape",
            "INPUT=SIZES",
            "Shape of an input that the file does not declare, such as image=N,3,224,224. May be repeated.",
        ),
    ] = None,
    listed: Annotated[bool, option("--list", None, "List the settings and exit.")] = False,
    step: options.Step = 0,
    output: Annotated[Path | None, option("--output -o", "FILE", "Output file (default: change in place).")] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Change learning rates, counters and other settings of a file, or declare input shapes.

    Hyper-parameters and counters are small tensors of the training step, so no node changes. If one
    setting fails, none is written.
    """
    if model is None or not (settings or listed or shape):
        missing = "argument `MODEL`" if model is None else "a setting"
        raise Misuse(f"missing {missing}", "for example `onward set training.onnx group0/lr=3e-4`, or use `--list`")
    texts = pairs(settings or [], "group0/lr=3e-4", NUMBERS)
    shapes: dict[str, list[int | str]] = {
        name: [int(size) if size.isdecimal() else size.strip() for size in text.split(",")]
        for name, text in pairs(shape or [], "--shape image=N,3,224,224", NUMBERS).items()
    }
    if listed and (texts or shapes):
        raise Misuse("`--list` sets nothing", "leave it out, or the settings")
    destination = OutputFile(model, model) if output is None else target(model, output, "changed", force=force)
    from onward.model import load
    from onward.transform import declare

    with working(f"reading {model}", model):
        source = load(model)
        rows = _settings(source, step) if listed else []
        changes = [_change(source, name, text, step) for name, text in texts.items()]
        if shapes:
            source = declare(source, shapes)
            changes += [{"name": name, "old": None, "new": ",".join(map(str, s))} for name, s in shapes.items()]
    if listed and as_json:
        print_json(rows)
    elif listed:
        print_rows([[row["name"], word(row["value"]), row["role"]] for row in rows], styles=("", "bold", "dim"))
    if listed:
        return
    destination.save(source)
    if as_json:
        print_json({"output": str(destination.path), "changes": changes})
        return
    print_rows([[c["name"], f"{word(c['old'])} -> {word(c['new'])}"] for c in changes])
    remark(f"wrote {destination.describe()}")


def _change(source: Model, name: str, text: str, step: int) -> dict[str, Any]:
    """Set a tensor in memory. Return its old and new value."""
    from onward.recipe.spec import check_setting

    tensor = _initializer(source, name, step)
    if tensor.size > _MOST:
        raise InvalidModelError(
            f"`{name}` is a weight with {tensor.size:,} elements, not a setting",
            hint=f"set weights in Python: `model.set({name!r}, array)`",
        )
    array = _array(name, text, tensor.dtype)
    check_setting(source, name, array.tolist(), step)
    source.set(name, array, step)
    return {"name": name, "old": _plain(tensor), "new": _plain(_initializer(source, name, step))}


def _initializer(source: Model, name: str, step: int) -> ir.TensorProtocol:
    """Return the tensor of that name. For `lr`, the error suggests `group0/lr`."""
    from onward.model.state import hyperparameters

    try:
        tensor = source.initializer(name, step).const_value
    except UnknownNameError as error:
        matches = [f"`{setting}`" for setting in hyperparameters(source, step) if setting.endswith(f"/{name}")]
        hint = f"did you mean {' or '.join(matches)}?" if matches else error.hint or "`--list` shows all settings"
        raise UnknownNameError(error.message, hint=hint) from error
    assert tensor is not None
    return tensor


def _array(name: str, text: str, dtype: ir.DataType) -> Any:
    """Parse a typed value as an array of the tensor's type."""
    import numpy as np

    type_name = dtype.name.lower()
    try:
        typed = np.asarray(number(text))
        if typed.dtype.kind not in "biuf" or (typed.dtype.kind == "b") != (type_name == "bool"):
            raise ValueError
        with np.errstate(all="ignore"):
            array = typed.astype(dtype.numpy())
    except (ValueError, TypeError, OverflowError):
        raise InvalidModelError(f"`{name}` is {type_name}, and `{text}` is not", hint=_example(type_name)) from None
    exact = not dtype.is_integer() or (array == typed).all()
    if not exact or np.isfinite(array.astype(np.float64)).sum() != np.isfinite(typed.astype(np.float64)).sum():
        raise InvalidModelError(f"`{name}` is {type_name}, which cannot hold `{text}`", hint=_example(type_name))
    return array


def _example(type_name: str) -> str:
    if type_name == "bool":
        return "write `true` or `false`"
    return "write an integer" if "int" in type_name else "write a number such as 1e-3, or a list such as [30,60]"


def _settings(source: Model, step: int) -> list[dict[str, Any]]:
    """Return the hyper-parameters and counters of a step."""
    from onward.model.state import hyperparameters, states

    rows = [{"name": n, "role": "hyper", "value": value} for n, value in hyperparameters(source, step).items()]
    for state in states(source, step):
        tensor = state.value.const_value
        if tensor is not None and tensor.size == 1 and state.role not in ("parameter", "optimizer_state"):
            rows.append({"name": state.name, "role": state.role, "value": _plain(tensor)})
    return rows


def _plain(tensor: ir.TensorProtocol) -> Any:
    from onward.run_state.reading import plain

    return plain(tensor.numpy().tolist())


_Texts = list[str] | None
_Changed = tuple[Any, str]
"""A model, and a note to print."""


def _output_parameters(
    output: options.Output = None, data: options.Data = "auto", force: options.Force = False
) -> None:
    """Declare the parameters that all these commands share."""


def changing(ending: str, *examples: str) -> Callable[[Callable[..., _Changed]], Callable[..., None]]:
    """Register a function as a command that writes its model, to `model-ending.onnx` by default."""

    def decorate(function: Callable[..., _Changed]) -> Callable[..., None]:
        def run(*, output: Path | None, data: Where, force: bool, **typed: Any) -> None:
            files = [file for file in typed.values() if isinstance(file, Path)]
            destination = target(files[0], output, ending.format(**typed), data=data, force=force)
            with working(f"changing {files[0]}", *files):
                changed, note = function(**typed)
            destination.write(changed, note)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return command(CHANGE, *examples, parameters=[*parameters_of(function), *parameters_of(_output_parameters)])(
            run
        )

    return decorate


@changing(
    "renamed",
    "onward rename training.onnx fc1.weight=encoder.weight fc1.bias=encoder.bias",
    "onward rename training.onnx logits=scores -o renamed.onnx",
)
def rename(model: options.Model, names: Annotated[list[str], argument("OLD=NEW...", "Values to rename.")]) -> _Changed:
    """Rename inputs, outputs, weights and other values.

    A value is renamed in all graphs, gradients, bindings and recorded settings. The optimizer state
    of a parameter is renamed with it.
    """
    import onward
    from onward.inspect.formatting import quantity

    mapping = pairs(names, "fc1.weight=encoder.weight")
    return onward.transform.rename(str(model), mapping), f"renamed {quantity(len(mapping), 'value')}"


@changing("prefixed", "onward prefix encoder.onnx encoder/", "onward prefix encoder.onnx encoder. -o named.onnx")
def prefix(model: options.Model, text: Annotated[str, argument("PREFIX", "Prefix of all names.")]) -> _Changed:
    """Add a prefix to the names of all values and nodes."""
    import onward

    if not text:
        raise Misuse("the prefix is empty", "for example `onward prefix encoder.onnx encoder/`")
    return onward.transform.add_prefix(str(model), text), ""


@changing(
    "{second.stem}",
    "onward merge encoder.onnx head.onnx -o whole.onnx",
    "onward merge encoder.onnx head.onnx --connect features=input --prefix head/",
)
def merge(
    first: Annotated[Path, argument("FIRST", "Model that runs first.")],
    second: Annotated[Path, argument("SECOND", "Model that runs second.")],
    connect: Annotated[
        _Texts,
        option(
            "--connect",
            "OUTPUT=INPUT",
            "Output of the first model and input of the second that it feeds (default: in order). May be repeated.",
        ),
    ] = None,
    prefix: Annotated[str, option("--prefix", "TEXT", "Prefix of all names of the second model.")] = "",
) -> _Changed:
    """Join two models into one that runs and trains both."""
    import onward
    from onward.inspect.formatting import quantity

    joins = pairs(connect, "features=input") if connect else None
    merged = onward.transform.merge(str(first), str(second), joins, prefix=prefix)
    return merged, quantity(len(merged.steps), "training step")


@changing(
    "part",
    "onward extract training.onnx --to hidden -o encoder.onnx",
    "onward extract training.onnx --from hidden --to logits -o head.onnx",
)
def extract(
    model: options.Model,
    inputs: Annotated[
        _Texts, option("--from", "NAME", "Input of the part (default: the model's inputs). May be repeated.")
    ] = None,
    outputs: Annotated[
        _Texts, option("--to", "NAME", "Output of the part (default: the model's outputs). May be repeated.")
    ] = None,
) -> _Changed:
    """Extract a part of a model.

    The part keeps as much of the training as possible. Nodes behind the new outputs that the loss
    needs move into the training step. The state of parameters before the new inputs is dropped.
    """
    import onward
    from onward.inspect.formatting import quantity

    whole = onward.load(str(model))
    inputs = inputs or [value.name or "" for value in whole.inputs]
    outputs = outputs or [value.name or "" for value in whole.outputs]
    extracted = onward.transform.extract(whole, inputs, outputs)
    return extracted, f"{len(extracted.graph)} of {quantity(len(whole.graph), 'node')}"


@changing("inlined", "onward inline training.onnx", "onward inline training.onnx --function 'onward.*' -o plain.onnx")
def inline(
    model: options.Model,
    functions: Annotated[
        _Texts, option("--function", "PATTERN", "Functions to inline, as domain.Name (default: all). May be repeated.")
    ] = None,
) -> _Changed:
    """Replace function calls by the nodes of the function."""
    import onward
    from onward.inspect.formatting import quantity

    before = onward.load(str(model))
    after = onward.transform.inline(before, functions or ["*"])
    count = len(before.functions) - len(after.functions)
    return after, f"inlined {count} of {quantity(len(before.functions), 'function')}"


@changing("opset{version}", "onward opset model.onnx 21", "onward opset training.onnx 18 -o older.onnx")
def opset(
    model: options.Model, version: Annotated[int, argument("VERSION", "Version of the standard operator set.", min=1)]
) -> _Changed:
    """Convert a model and its training to another operator set."""
    import onward

    before = onward.load(str(model))
    after = onward.transform.convert_opset(before, version)
    return after, f"operator set {before.opset} to {after.opset}"


@command(
    CHANGE, "onward data training.onnx --to safetensors", "onward data training.onnx --to none -o single-file.onnx"
)
def data(
    model: options.Model,
    to: Annotated[
        Literal["none", "data", "safetensors"],
        option("--to", "WHERE", "`none` (in the model file), or `data` or `safetensors` (in a file beside it)."),
    ],
    output: options.Output = None,
    force: options.Force = False,
) -> None:
    """Move tensors in and out of the file.

    ONNX Runtime reads .safetensors files, as does every other reader of the format.
    """
    destination = target(model, output, "single" if to == "none" else "external", data=to, force=force)
    import onward

    with working(f"reading {model}", model):
        source = onward.load(str(model))
    destination.write(source)


@changing("reset", "onward reset training.onnx", "onward reset trained.onnx --seed 7 -o fresh.onnx")
def reset(
    model: options.Model,
    seed: Annotated[
        int | None, option("--seed", "N", "Random seed of new initial values (default: the seed in the file).")
    ] = None,
) -> _Changed:
    """Reset weights, optimizer state and counters to the initialization in the file.

    `onward prepare` writes as initialization the weights of the model, unless `--init` sets others,
    and zeros for the optimizer state. State without an initialization stays as stored, and is
    listed.
    """
    import onward
    from onward.engines.initialization import state_left_as_stored

    fresh = onward.reset(str(model), seed=seed)
    stored = state_left_as_stored(fresh)
    return fresh, f"kept as stored: {list_names(stored, 10)}" if stored else "all state is initialized"


@changing("inference", "onward strip training.onnx", "onward strip training.onnx -o trained.onnx")
def strip(model: options.Model) -> _Changed:
    """Remove the training and keep the weights."""
    import onward
    from onward.inspect.formatting import quantity

    before = onward.load(str(model))
    return onward.transform.strip(before), f"without {quantity(len(before.steps), 'training step')}"


@changing(
    "training",
    "onward refresh optimized.onnx --training training.onnx",
    "onward refresh optimized.onnx --training training.onnx -o training.onnx --force",
)
def refresh(
    model: Annotated[Path, argument("CHANGED", "Model that another tool has written.")],
    training: Annotated[Path, option("--training", "FILE", "Training model before that.")],
) -> _Changed:
    """Restore the training that another tool has dropped.

    Tools that change the inference graph lose the training information. Where the two models no
    longer match, nothing is guessed: every mismatch is listed, and nothing is written.
    """
    import onward
    from onward.inspect.formatting import quantity

    restored = onward.transform.refresh(str(model), str(training))
    return restored, quantity(len(restored.steps), "training step")
