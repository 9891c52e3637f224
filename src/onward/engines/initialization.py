"""Starting over: the state of a training model as its initialization makes it.

fresh = onward.reset("training.onnx")         # weights, moments, counters
fresh = onward.reset("training.onnx", seed=7) # another draw

The numbers are computed by the engine `numpy` whatever engine trains then, so that all start from the same.
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
    """The training model as its initialization makes it: the stored state first, then every initialization in order.

        fresh = onward.reset("training.onnx", seed=1)

    State that no initialization binding names keeps the value in the file.

    - `training`: a training model
    - `seed`: what random numbers are drawn from, which the file says from then on. Without it, they are those of the
      seeds in the file; what has none there draws other numbers each time
    """
    model = load(training)
    if seed is None:
        return start_over(model)
    other = with_seed(model, seed)
    if other is model:
        raise RecipeError(
            "the initialization draws no random numbers, so a seed has no effect",
            hint="leave it out, or prepare the model with an initializer: `init=` (`--init`)",
        )
    return start_over(other)


def state_left_as_stored(model: Model) -> list[str]:
    """State that a reset leaves as it is stored, since no initialization binding names it."""
    anywhere = {name for step in model.steps for name in step.reset}
    found = (
        name
        for step in model.steps
        for name in step.update
        if name not in (step.reset if name in step.algorithm.initializers else anywhere)
    )
    return list(dict.fromkeys(found))


def start_over(source: Model) -> Model:
    """A copy with the state that the initialization makes."""
    model = source.copy()
    model.step()  # there is one
    if not any(step.reset for step in model.steps):
        raise UnsupportedError(
            "the model has no initialization, so nothing says what it starts from",
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
            f"`{name}` is {_describe(old)}, and the initialization makes {_describe(new)} of it",
            hint="`onward check` says all that is wrong",
        )
    return with_metadata(new, dict(old.metadata_props), old)


def _describe(tensor: ir.TensorProtocol) -> str:
    return f"{tensor.dtype.name.lower()}{list(tensor.shape.numpy())}"


# ---- what an initialization computes ---------------------------------------------------------------------------------


def _initial(model: Model, index: int) -> dict[str, ir.TensorProtocol]:
    """State -> its initial value. What is stored is not read, and what is repeated takes no room."""
    made = lower_for_engine(model, index, "initialization")
    if made.graph.inputs:
        names = list_names([value.name or "" for value in made.graph.inputs], 5)
        raise InvalidModelError(f"the initialization has inputs, and nobody feeds it: {names}")
    plain = {value.name or "": stored_tensor(value) for value in made.graph.outputs}
    found = {name: tensor for name, tensor in plain.items() if tensor is not None}
    keep_only(made, [value for value in made.graph.outputs if value.name not in found])
    arrays = function(made)({}) if made.graph.outputs else {}
    return found | {name: ir.Tensor(array) for name, array in arrays.items()}


# ---- seeds -----------------------------------------------------------------------------------------------------------


def with_seed(source: Model, seed: int) -> Model:
    """A copy whose initializations draw of another seed; the model itself, if they do not draw."""
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
    """The keys that our own generator draws of, as `prepare` tags them."""
    known = step.initialization.initializers.values() if step.initialization is not None else ()
    return [v for v in known if v.const_value is not None and v.const_value.metadata_props.get(ROLE_KEY) == "rng"]


def _drawing(model: Model, step: Step) -> list[ir.Node]:
    """The random operators of an initialization, each of which draws once."""
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
            f"the initialization draws within the node `{hidden[0].name or hidden[0].op_type}`, perhaps more than once",
            hint="replace functions by their bodies first (`onward inline`); a seed within a loop is not changed",
        )
    return direct


def _draws(node: ir.Node) -> bool:
    return is_standard(node) and is_random(node)


def _number(text: str) -> float:
    """A seed of 24 bits, which is as much as the attribute holds exactly."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:3], "big"))
