"""Reset a training model to its initial state.

fresh = onward.reset("training.onnx")         # weights, moments, counters
fresh = onward.reset("training.onnx", seed=7) # other random numbers

The engine `numpy` computes the initial state, so that all engines start from the same numbers.
"""

from __future__ import annotations

import hashlib
import json

import onnx_ir as ir

from onward.arguments import Seed, checked
from onward.constants import stored_tensor
from onward.engines import function
from onward.errors import InvalidModelError, RecipeError, UnsupportedError, list_names
from onward.lowering.step import lower_for_engine
from onward.model import Model, Source, Step, load
from onward.model.checks import callees_first
from onward.model.state import ROLE_KEY, with_metadata
from onward.model.walk import is_random
from onward.recipe.random import new_key
from onward.standard import is_standard
from onward.transform.training import keep_only

_PROGRESS = "train.progress"


@checked()
def reset(training: Source, *, seed: Seed | None = None) -> Model:
    """Return the training model with its initial state: the state in the file, then every
    initialization in order.

        fresh = onward.reset("training.onnx", seed=1)

    State without an initialization binding keeps the value in the file.

    - `training`: a training model
    - `seed`: seed of the random numbers, which replaces the seeds in the file (default: the seeds
      in the file; an operator without a seed draws other numbers each time)
    """
    model = load(training)
    if seed is None:
        return start_over(model)
    reseeded = with_seed(model, seed)
    if reseeded is model:
        raise RecipeError(
            "the initialization draws no random numbers, so a seed has no effect",
            hint="leave it out, or prepare the model with an initializer: `init=` (`--init`)",
        )
    return start_over(reseeded)


def state_left_as_stored(model: Model) -> list[str]:
    """Return the state that a reset does not change, since no initialization binding names it."""
    anywhere = {name for step in model.steps for name in step.reset}
    names = (
        name
        for step in model.steps
        for name in step.update
        if name not in (step.reset if name in step.algorithm.initializers else anywhere)
    )
    return list(dict.fromkeys(names))


def start_over(source: Model) -> Model:
    """Return a copy of a training model with its initial state."""
    model = source.copy()
    model.step()  # raises if there is none
    if not any(step.reset for step in model.steps):
        raise UnsupportedError(
            "the model has no initialization, so its initial state is unknown",
            hint="`onward prepare` writes one: strip the model first (`onward strip`)",
        )
    for index, step in enumerate(model.steps):
        for name, tensor in _initial(source, index).items() if step.reset else ():
            value = model.initializer(name, index)
            value.const_value = _fitting(name, tensor, value.const_value)
        if _PROGRESS in step.metadata:
            step.metadata[_PROGRESS] = json.dumps({"step": 0, "epoch": 0, "samples": 0})
    return model


def _fitting(name: str, new: ir.TensorProtocol, old: ir.TensorProtocol | None) -> ir.TensorProtocol:
    assert old is not None
    if (new.dtype, list(new.shape)) != (old.dtype, list(old.shape)):
        raise InvalidModelError(
            f"`{name}` is {_describe(old)}, but its initialization is {_describe(new)}",
            hint="`onward check MODEL` lists all errors",
        )
    return with_metadata(new, dict(old.metadata_props), old)


def _describe(tensor: ir.TensorProtocol) -> str:
    return f"{tensor.dtype.name.lower()}{list(tensor.shape.numpy())}"


def _initial(model: Model, index: int) -> dict[str, ir.TensorProtocol]:
    """Return state -> its initial value. Stored tensors are not read into memory."""
    initialization = lower_for_engine(model, index, "initialization")
    graph = initialization.graph
    if graph.inputs:
        names = list_names([value.name or "" for value in graph.inputs], 5)
        raise InvalidModelError(f"the initialization has inputs, which nothing feeds: {names}", hint="remove them")
    stored = {value.name or "": tensor for value in graph.outputs if (tensor := stored_tensor(value)) is not None}
    keep_only(initialization, [value for value in graph.outputs if value.name not in stored])
    arrays = function(initialization)({}) if graph.outputs else {}
    return stored | {name: ir.Tensor(array) for name, array in arrays.items()}


# ---- seeds -----------------------------------------------------------------------------------------------------------


def with_seed(source: Model, seed: int) -> Model:
    """Return a copy with other seeds, or the model itself if its initializations draw nothing."""
    model = source.copy()
    keys = [value for step in model.steps for value in _keys(step)]
    for value in keys:
        old = value.const_value
        assert old is not None
        value.const_value = with_metadata(ir.Tensor(new_key(seed)), dict(old.metadata_props), old)
    nodes = [(index, node) for index, step in enumerate(model.steps) for node in _drawing(model, step)]
    for index, node in nodes:
        node.attributes.add(ir.AttrFloat32("seed", _number(f"{seed}/{index}/{node.outputs[0].name}")))
    return model if keys or nodes else source


def _keys(step: Step) -> list[ir.Value]:
    """Return the keys of Onward's random generator, by the role that `prepare` gives them."""
    values = step.initialization.initializers.values() if step.initialization is not None else ()
    return [v for v in values if v.const_value is not None and v.const_value.metadata_props.get(ROLE_KEY) == "rng"]


def _drawing(model: Model, step: Step) -> list[ir.Node]:
    """Return the random nodes of an initialization. Raise if one may run more than once."""
    graph = step.initialization
    if graph is None:
        return []
    functions: set[ir.OperatorIdentifier] = set()
    for key in callees_first(model.functions):
        if any(_draws(node) or node.op_identifier() in functions for node in model.functions[key].all_nodes()):
            functions.add(key)
    direct = [node for node in graph if _draws(node)]
    inner = [node for node in graph.all_nodes() if _draws(node) or node.op_identifier() in functions]
    if hidden := [node for node in inner if node not in direct]:
        raise UnsupportedError(
            f"`{hidden[0].name or hidden[0].op_type}` of the initialization may draw random numbers more than once",
            hint="inline functions first (`onward inline MODEL`); a seed within a loop is not changed",
        )
    return direct


def _draws(node: ir.Node) -> bool:
    return is_standard(node) and is_random(node)


def _number(text: str) -> float:
    """Return a seed of 24 bits, the most that the float attribute holds exactly."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big"))
