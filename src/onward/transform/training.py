"""Taking training off a model, and putting it back after another tool has changed the inference graph."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError
from onward.model import Model, Source, load
from onward.model.core import values
from onward.model.serde import stamp
from onward.transform.linear import put_back
from onward.transform.opset import convert_opset
from onward.transform.quantised import put_away


@checked()
def strip(source: Source) -> Model:
    """A copy without training: the inference graph, its weights as they are, and nothing that only training used.

        plain = onward.transform.strip("training.onnx")

    Weights that were stored as integers are so again.

    - `source`: any model
    """
    model = without_steps(source)
    put_away(model)
    put_back(model)
    return model


def without_steps(source: Source) -> Model:
    """The same in the form in which it is trained."""
    model = load(source).copy(steps=False)
    for key in [key for key in model.metadata if key.startswith("train.")]:
        del model.metadata[key]
    drop_unused_definitions(model)
    return model


def drop_unused_definitions(model: Model) -> None:
    """Remove functions that nothing calls, and imports of operator sets that nothing uses, in place."""
    used: set[ir.OperatorIdentifier] = set()
    graphs = [model.graph, *(graph for step in model.steps for graph in (step.algorithm, step.initialization) if graph)]
    pending = [node.op_identifier() for graph in graphs for node in graph.all_nodes()]
    while pending:
        identifier = pending.pop()
        if identifier not in used:
            used.add(identifier)
            if function := model.functions.get(identifier):
                pending += [node.op_identifier() for node in function.all_nodes()]
    for identifier in [identifier for identifier in model.functions if identifier not in used]:
        del model.functions[identifier]
    domains = {"", *(domain for domain, _, _ in used)}
    for domain in [domain for domain in model.ir.opset_imports if domain not in domains and domain != "ai.onnx"]:
        del model.ir.opset_imports[domain]


@checked()
def refresh(changed: Source, training: Source) -> Model:
    """The inference graph of `changed` with the training of `training`, which was made for an earlier form of it.

        again = onward.transform.refresh("quantised.onnx", "training.onnx")

    Training refers to the inference graph by name. Where a name is gone, or has another type or shape, nothing is
    guessed: all such places are reported at once.

    - `changed`: the model that has lost its training, or has an older one
    - `training`: the training model
    """
    changed, training = load(changed), load(training)
    if not training.steps:
        raise InvalidModelError("there is no training to put back: the other model has none")
    result, source = strip(changed), convert_opset(training, changed.opset).copy()
    new = {value.name: value for value in values(result.graph)}
    problems = [problem for value in _read_by_training(source) if (problem := _mismatch(value, new.get(value.name)))]
    if problems:
        recipe = any("train.recipe" in step.metadata for step in training.steps)
        raise InvalidModelError(
            "the training no longer matches the inference graph:\n" + "\n".join(f"  {line}" for line in problems),
            hint="prepare the changed model again" + (" with the recipe that the file records" if recipe else ""),
        )
    old = {value: new[value.name] for value in values(source.graph) if value.name in new}
    for step in source.steps:
        for node in step.algorithm.all_nodes():
            for i, value in enumerate(node.inputs):
                if value in old:
                    node.replace_input_with(i, old[value])
    result.steps = source.steps
    result.functions.update({k: f.clone() for k, f in source.functions.items() if k not in result.functions})
    for domain, version in source.ir.opset_imports.items():
        result.ir.opset_imports.setdefault(domain, version)
    result.ir.ir_version = max(result.ir.ir_version or 0, source.ir.ir_version or 0)
    drop_unused_definitions(result)
    return stamp(result)


def _read_by_training(model: Model) -> Iterator[ir.Value]:
    """The values of the inference graph that training reads, differentiates or updates."""
    by_name = {value.name: value for value in values(model.graph)}
    read: dict[ir.Value, None] = {}
    for step in model.steps:
        for node in step.algorithm.all_nodes():
            read.update((v, None) for v in node.inputs if v is not None and by_name.get(v.name) is v)
        read.update((by_name[name], None) for name in (*step.update, *step.differentiated()) if name in by_name)
    yield from read


def _mismatch(old: ir.Value, new: ir.Value | None) -> str | None:
    if new is None:
        return f"`{old.name}` is gone"
    if old.is_initializer() and not new.is_initializer():
        return f"`{old.name}` is no longer an initializer"
    if old.dtype is not None and new.dtype is not None and old.dtype != new.dtype:
        return f"`{old.name}` was {old.dtype.name.lower()}, and is {new.dtype.name.lower()}"
    if old.shape is not None and new.shape is not None and not _compatible(old.shape, new.shape):
        return f"`{old.name}` had shape {old.shape}, and has {new.shape}"
    return None


def _compatible(old: ir.Shape, new: ir.Shape) -> bool:
    if len(old) != len(new):
        return False
    return all(a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in zip(old, new, strict=True))
