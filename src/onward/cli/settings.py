"""`onward set`: the numbers that steer training, changed in the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.cli import options
from onward.cli.app import CHANGE, Misuse, command
from onward.cli.console import print_json, print_rows, remark, word
from onward.cli.files import Target, target, working
from onward.cli.options import NUMBERS, argument, number, option, pairs
from onward.errors import InvalidModelError, UnknownNameError

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
        list[str] | None,
        argument("NAME=VALUE...", "Hyper-parameters, counters, other small tensors."),
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
    if listed:
        _print_settable(found, as_json)
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
    from onward.recipe.ranges import check_setting

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


def _print_settable(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_rows([[f["name"], word(f["value"]), f["role"]] for f in found], styles=("", "bold", "dim"))
