"""Commands that make one model of another, without losing the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from onward.cli import options
from onward.cli.app import CHANGE, Misuse, command, parameters_of
from onward.cli.files import Where, target, working
from onward.cli.options import argument, option, pairs
from onward.errors import list_names

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
        _Texts,
        option("--from", "NAME", "An input of the part; those of the model unless given. May be repeated."),
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


@changing(
    "inlined",
    "onward inline training.onnx",
    "onward inline training.onnx --function 'onward.*' -o plain.onnx",
)
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
    model: options.Model,
    version: Annotated[int, argument("VERSION", "A version of the standard operator set.", min=1)],
) -> _Made:
    """Convert a model, training included, to another operator set."""
    import onward

    before = onward.load(str(model))
    made = onward.transform.convert_opset(before, version)
    return made, f"operator set {before.opset} to {made.opset}"


@command(
    CHANGE,
    "onward data training.onnx --to safetensors",
    "onward data training.onnx --to none -o single-file.onnx",
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
