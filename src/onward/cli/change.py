"""Commands that make one model of another, without losing the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import CHANGE, Misuse, command, parameters_of
from onward.cli.console import print_json, print_rows, remark, word
from onward.cli.files import Target, Where, target, working
from onward.cli.options import NUMBERS, argument, number, option, pairs
from onward.errors import InvalidModelError, UnknownNameError, list_names

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward import Model

_MOST = 64
"""Tensors with more elements than this are weights, not settings."""


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
            "Say which shape an input has, such as image=N,3,224,224, if the file does not. May be repeated.",
        ),
    ] = None,
    listed: Annotated[bool, option("--list", None, "List what can be set, and exit.")] = False,
    step: options.Step = 0,
    output: Annotated[Path | None, option("--output -o", "FILE", "Where to write; in place unless given.")] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Change learning rates, counters and other settings in a file, or say which shapes its inputs have.

    Hyper-parameters and counters are small tensors of the training step, so no node changes. All are set, or none is.
    """
    if model is None or not (settings or listed or shape):
        missing = "argument `MODEL`" if model is None else "what to set"
        raise Misuse(
            f"missing {missing}", "write for example `onward set training.onnx group0/lr=3e-4`, or use `--list`"
        )
    wanted = pairs(settings or [], "group0/lr=3e-4", NUMBERS)
    shapes = {name: _sizes(text) for name, text in pairs(shape or [], "--shape image=N,3,224,224", NUMBERS).items()}
    if listed and (wanted or shapes):
        raise Misuse("`--list` sets nothing", "leave it out, or the settings")
    place = Target(model, model) if output is None else target(model, output, "changed", force=force)
    from onward.model import load
    from onward.transform import declare

    with working(f"reading {model}", model):
        source = load(model)
        found = _settable(source, step) if listed else []
        changes = [_change(source, name, text, step) for name, text in wanted.items()]
        if shapes:
            source = declare(source, shapes)
            changes += [{"name": name, "old": None, "new": ",".join(map(str, s))} for name, s in shapes.items()]
    if listed and as_json:
        print_json(found)
    elif listed:
        print_rows([[f["name"], word(f["value"]), f["role"]] for f in found], styles=("", "bold", "dim"))
    if listed:
        return
    place.save(source)
    if as_json:
        print_json({"output": str(place.path), "changes": changes})
        return
    print_rows([[c["name"], f"{word(c['old'])} -> {word(c['new'])}"] for c in changes])
    remark(f"wrote {place.describe()}")


def _sizes(text: str) -> list[int | str]:
    return [int(size) if size.isdecimal() else size.strip() for size in text.split(",")]


def _change(source: Model, name: str, text: str, step: int) -> dict[str, Any]:
    """Set one tensor, in memory; what it was and is."""
    from onward.recipe.spec import check_setting

    tensor = _initializer(source, name, step)
    if tensor.size > _MOST:
        raise InvalidModelError(
            f"`{name}` has {tensor.size:,} elements: a weight, not a setting",
            hint="change weights in Python, with `Model.set`",
        )
    array = _array(name, text, tensor.dtype)
    check_setting(source, name, array.tolist(), step)
    source.set(name, array, step)
    return {"name": name, "old": _plain(tensor), "new": _plain(_initializer(source, name, step))}


def _initializer(source: Model, name: str, step: int) -> ir.TensorProtocol:
    """The tensor of that name; who types `lr` is told of `group0/lr`."""
    from onward.model.state import hyperparameters

    try:
        tensor = source.initializer(name, step).const_value
    except UnknownNameError as error:
        meant = [f"`{known}`" for known in hyperparameters(source, step) if known.endswith(f"/{name}")]
        hint = f"did you mean {' or '.join(meant)}?" if meant else error.hint or "`--list` shows what can be set"
        raise UnknownNameError(error.message, hint=hint) from error
    assert tensor is not None
    return tensor


def _array(name: str, text: str, dtype: ir.DataType) -> Any:
    """What was typed as an array of the tensor's type, if that can hold it."""
    import numpy as np

    kind = dtype.name.lower()
    try:
        given = np.asarray(number(text))
        if given.dtype.kind not in "biuf" or (given.dtype.kind == "b") != (kind == "bool"):
            raise ValueError
        with np.errstate(all="ignore"):
            array = given.astype(dtype.numpy())
    except (ValueError, TypeError, OverflowError):
        raise InvalidModelError(f"`{name}` is {kind}, and `{text}` is not", hint=_example(kind)) from None
    exact = not dtype.is_integer() or (array == given).all()
    if not exact or np.isfinite(array.astype(np.float64)).sum() != np.isfinite(given.astype(np.float64)).sum():
        raise InvalidModelError(f"`{name}` is {kind}, which cannot hold `{text}`", hint=_example(kind))
    return array


def _example(kind: str) -> str:
    if kind == "bool":
        return "write `true` or `false`"
    return "write a whole number" if "int" in kind else "write a number such as 1e-3, or a list such as [30,60]"


def _settable(source: Model, step: int) -> list[dict[str, Any]]:
    """Hyper-parameters, and the counters among the state."""
    from onward.model.state import hyperparameters, states

    found = [{"name": n, "role": "hyper", "value": value} for n, value in hyperparameters(source, step).items()]
    for state in states(source, step):
        tensor = state.value.const_value
        if tensor is not None and tensor.size == 1 and state.role not in ("parameter", "optimizer_state"):
            found.append({"name": state.name, "role": state.role, "value": _plain(tensor)})
    return found


def _plain(tensor: ir.TensorProtocol) -> Any:
    from onward.run_state.reading import plain

    return plain(tensor.numpy().tolist())


_Texts = list[str] | None
_Made = tuple[Any, str]
"""A model, and what to say about it."""


def _output_parameters(
    output: options.Output = None, data: options.Data = "auto", force: options.Force = False
) -> None:
    """The parameters that all of them have."""


def changing(ending: str, *examples: str) -> Callable[[Callable[..., _Made]], Callable[..., None]]:
    """Enter a function as a command that writes the model which it makes: `model-ending.onnx` unless given."""

    def decorate(function: Callable[..., _Made]) -> Callable[..., None]:
        def run(*, output: Path | None, data: Where, force: bool, **given: Any) -> None:
            files = [file for file in given.values() if isinstance(file, Path)]
            place = target(files[0], output, ending.format(**given), data=data, force=force)
            with working(f"changing {files[0]}", *files):
                made, note = function(**given)
            place.write(made, note)

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
def rename(model: options.Model, names: Annotated[list[str], argument("OLD=NEW...", "Values to rename.")]) -> _Made:
    """Rename inputs, outputs, weights and other values.

    They are renamed wherever the name stands: in all graphs, in Gradients, in bindings, in what the file records. The
    optimizer state of a parameter is renamed along with it.
    """
    import onward
    from onward.inspect.formatting import quantity

    wanted = pairs(names, "fc1.weight=encoder.weight")
    return onward.transform.rename(str(model), wanted), f"renamed {quantity(len(wanted), 'value')}"


@changing("prefixed", "onward prefix encoder.onnx encoder/", "onward prefix encoder.onnx encoder. -o named.onnx")
def prefix(model: options.Model, text: Annotated[str, argument("PREFIX", "What to put before names.")]) -> _Made:
    """Put a prefix before the names of all values and nodes."""
    import onward

    if not text:
        raise Misuse("the prefix is empty", "write for example `onward prefix encoder.onnx encoder/`")
    return onward.transform.add_prefix(str(model), text), ""


@changing(
    "{second.stem}",
    "onward merge encoder.onnx head.onnx -o whole.onnx",
    "onward merge encoder.onnx head.onnx --connect features=input --prefix head/",
)
def merge(
    first: Annotated[Path, argument("FIRST", "The model that runs first.")],
    second: Annotated[Path, argument("SECOND", "The model after it.")],
    connect: Annotated[
        _Texts,
        option(
            "--connect",
            "OUTPUT=INPUT",
            "Which output of the first is which input of the second; in order unless given. May be repeated.",
        ),
    ] = None,
    prefix: Annotated[str, option("--prefix", "TEXT", "Put this before all names of the second model.")] = "",
) -> _Made:
    """Join two models into one that runs both, and trains both."""
    import onward
    from onward.inspect.formatting import quantity

    joins = pairs(connect, "features=input") if connect else None
    made = onward.transform.merge(str(first), str(second), joins, prefix=prefix)
    return made, quantity(len(made.steps), "training step")


@changing(
    "part",
    "onward extract training.onnx --to hidden -o encoder.onnx",
    "onward extract training.onnx --from hidden --to logits -o head.onnx",
)
def extract(
    model: options.Model,
    inputs: Annotated[
        _Texts, option("--from", "NAME", "An input of the part; those of the model unless given. May be repeated.")
    ] = None,
    outputs: Annotated[
        _Texts, option("--to", "NAME", "An output of the part; those of the model unless given. May be repeated.")
    ] = None,
) -> _Made:
    """Cut a part out of a model.

    The part keeps as much of the training as it can carry: what lies behind the new outputs and is needed for the loss
    moves into the training step, and the state of parameters before the new inputs goes.
    """
    import onward
    from onward.inspect.formatting import quantity

    whole = onward.load(str(model))
    inputs = inputs or [value.name or "" for value in whole.inputs]
    outputs = outputs or [value.name or "" for value in whole.outputs]
    made = onward.transform.extract(whole, inputs, outputs)
    return made, f"{len(made.graph)} of {quantity(len(whole.graph), 'node')}"


@changing("inlined", "onward inline training.onnx", "onward inline training.onnx --function 'onward.*' -o plain.onnx")
def inline(
    model: options.Model,
    functions: Annotated[
        _Texts, option("--function", "PATTERN", "Which functions, as domain.Name; all unless given. May be repeated.")
    ] = None,
) -> _Made:
    """Replace calls of functions by what the functions compute."""
    import onward
    from onward.inspect.formatting import quantity

    before = onward.load(str(model))
    made = onward.transform.inline(before, functions or ["*"])
    gone = len(before.functions) - len(made.functions)
    return made, f"inlined {gone} of {quantity(len(before.functions), 'function')}"


@changing("opset{version}", "onward opset model.onnx 21", "onward opset training.onnx 18 -o older.onnx")
def opset(
    model: options.Model, version: Annotated[int, argument("VERSION", "A version of the standard operator set.", min=1)]
) -> _Made:
    """Convert a model, training included, to another operator set."""
    import onward

    before = onward.load(str(model))
    made = onward.transform.convert_opset(before, version)
    return made, f"operator set {before.opset} to {made.opset}"


@command(
    CHANGE, "onward data training.onnx --to safetensors", "onward data training.onnx --to none -o single-file.onnx"
)
def data(
    model: options.Model,
    to: Annotated[
        Literal["none", "data", "safetensors"],
        option("--to", "WHERE", "`none` (into the file), or `data` or `safetensors` (into a file beside it)."),
    ],
    output: options.Output = None,
    force: options.Force = False,
) -> None:
    """Move tensors in and out of the file.

    A .safetensors file is read by ONNX Runtime, and by everything else that knows the format.
    """
    place = target(model, output, "single" if to == "none" else "external", data=to, force=force)
    import onward

    with working(f"reading {model}", model):
        made = onward.load(str(model))
    place.write(made)


@changing("reset", "onward reset training.onnx", "onward reset trained.onnx --seed 7 -o fresh.onnx")
def reset(
    model: options.Model,
    seed: Annotated[
        int | None, option("--seed", "N", "Draw other random numbers; those of the file unless given.")
    ] = None,
) -> _Made:
    """Start over: weights, moments and counters as the initialization of the file makes them.

    What `onward prepare` writes as initialization are the weights that the model had, unless `--init` said otherwise,
    and zeros for what optimizers keep. State without an initialization stays as it is stored, and is named.
    """
    import onward
    from onward.engines.initialization import state_left_as_stored

    made = onward.reset(str(model), seed=seed)
    stored = state_left_as_stored(made)
    return made, f"kept as stored: {list_names(stored, 10)}" if stored else "all state is as initialised"


@changing("inference", "onward strip training.onnx", "onward strip training.onnx -o trained.onnx")
def strip(model: options.Model) -> _Made:
    """Take the training off, and keep the weights as they are."""
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
    model: Annotated[Path, argument("CHANGED", "The model as another tool has left it.")],
    training: Annotated[Path, option("--training", "FILE", "The training model from before.")],
) -> _Made:
    """Put training back that another tool has dropped.

    Tools that change the inference graph lose what the file says about training. Where the two no longer match, nothing
    is guessed: all such places are named, and nothing is written.
    """
    import onward
    from onward.inspect.formatting import quantity

    made = onward.transform.refresh(str(model), str(training))
    return made, quantity(len(made.steps), "training step")
