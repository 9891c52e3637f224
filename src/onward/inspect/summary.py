"""A summary of a model: what goes in and out, what is trained and how, and how far that has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from onward.arguments import checked
from onward.errors import Error, InvalidModelError
from onward.inspect.parameters import exporter_remarks, verdicts, weights
from onward.inspect.quantization import describe_quantization
from onward.inspect.summary_fields import ROLES, Amount, File, Port, Quantization, Role, Training, Weight
from onward.inspect.training import describe_step
from onward.inspect.values import plain, port
from onward.model import Model, Source, load
from onward.model.serde import places_of
from onward.model.storage import is_external
from onward.recipe.exporter_notes import folding_remarks
from onward.recipe.preprocessing import notes_on_moves

FORMAT = 1
"""The version of the JSON form. New keys may come without a new one; none goes or changes its meaning."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What is in a model. `to_json` has the names of the fields as keys, at every level:

    - `format`: 1
    - `name`; `file`: path, bytes, external_bytes, external_files, ir_version, opset, opsets, producer, nodes, functions
    - `inputs`, `outputs` of the inference graph: lists of name, type, shape (numbers, names and null; null if unknown)
    - `parameters`: trained, frozen, trainable, statistics, constant; each with tensors, numbers, bytes
    - `remarks`: sentences about what an exporter seems to have folded away, merged or added; what augmentation moves
    - `quantization`: null, or weights (list of type, per, tensors, numbers), activations (numbers by type), ranges
    - `weights`: list of name, type, shape, numbers, bytes, role (one of these five), reason, group, steps
    - `steps`: none for an inference model, else a list of
        - `name`, `nodes`, `initialization`; `inputs` and `metrics` that inference does not have
        - `loss`: differentiated, operators, outputs, and terms: list of name, output, inputs, options, scale
        - `groups`: list of name, optimizer, operators, hyper, lr_now, options, slots, parameters, is_function
        - `trained`: tensors, numbers, bytes
        - `schedule`: list of name, numbers, choices
        - `clip`: null, or kind, limit, operator; `accumulation`: null, or batches, seen; `average`: null, or decay,
          updates; `loss_scale`: null, or scale, dynamic, settings
        - `progress`: step, steps, recorded
        - `state`: list of role, tensors, bytes
        - `hyperparameters`: every number that can be edited in the file, by the name of its initializer
    """

    name: str
    file: File
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: dict[Role, Amount]
    remarks: tuple[str, ...]
    quantization: Quantization | None
    weights: tuple[Weight, ...]
    steps: tuple[Training, ...]

    @property
    def is_training_model(self) -> bool:
        return bool(self.steps)

    def with_role(self, *roles: Role) -> list[Weight]:
        return [weight for weight in self.weights if weight.role in roles]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data: dictionaries, lists, texts, numbers and None."""
        return {"format": FORMAT, **plain(dataclasses.asdict(self))}


@checked()
def describe(model: Source) -> Summary:
    """Say what is in a model, by its file alone: it is not run, and weights outside the file are not loaded.

        print(onward.describe("training.onnx"))

    - `model`: any model
    """
    model = load(model)
    with blame_model():
        return _summary(model)


@contextmanager
def blame_model() -> Iterator[None]:
    """Within it, what a broken model makes go wrong is an error that says so."""
    try:
        yield
    except Error:
        raise
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        message = f"the model makes no sense: {error}"
        raise InvalidModelError(message, hint="`onward check` names the place") from error


def _summary(model: Model) -> Summary:
    judged = verdicts(model)
    found = weights(model, judged)
    steps = tuple(describe_step(model, index, found) for index in range(len(model.steps)))
    group = {name: group.name for step in reversed(steps) for group in step.groups for name in group.parameters}
    found = tuple(dataclasses.replace(weight, group=group.get(weight.name)) for weight in found)
    return Summary(
        name=model.path.name if model.path else model.graph.name or "model",
        file=_file(model),
        inputs=tuple(port(value) for value in model.inputs),
        outputs=tuple(port(value) for value in model.outputs),
        parameters={role: Amount.of(w for w in found if w.role == role) for role in ROLES},
        remarks=(
            *folding_remarks(model),
            *exporter_remarks(model, judged),
            *(note for step in model.steps for note in notes_on_moves(step)),
        ),
        quantization=describe_quantization(model),
        weights=found,
        steps=steps,
    )


def _file(model: Model) -> File:
    tensors = (place.tensor for place in places_of(model))
    external = {
        (t.location, t.offset, t.length): t for t in tensors if isinstance(t, ir.ExternalTensor) and is_external(t)
    }
    path = model.path
    return File(
        path=str(path) if path else None,
        bytes=path.stat().st_size if path and path.is_file() else None,
        external_bytes=sum(tensor.nbytes for tensor in external.values()),
        external_files=tuple(sorted({str(tensor.location) for tensor in external.values()})),
        ir_version=model.ir.ir_version,
        opset=model.opset,
        opsets={domain or "ai.onnx": version for domain, version in sorted(model.ir.opset_imports.items())},
        producer=" ".join(text for text in (model.ir.producer_name, model.ir.producer_version) if text),
        nodes=sum(1 for _ in model.graph.all_nodes()),
        functions=tuple(f"{domain}.{name}" for domain, name, _ in model.functions),
    )
