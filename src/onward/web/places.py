"""Where in a file the numbers of tensors are, so that a page writes trained ones over them: the file stays exact."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.errors import UnsupportedError, list_names
from onward.model import Model
from onward.model.state import all_states
from onward.model.storage.tensor_sites import inside, sites
from onward.model.storage.wire import messages
from onward.training.run import in_form_of
from onward.transform.training import strip

_GRAPH, _TRAINING, _ALGORITHM = 7, 20, 2  # ModelProto.graph, .training_info; TrainingInfoProto.algorithm
_INITIALIZER, _NODE = 5, 1  # of GraphProto
_OUTPUT, _ATTRIBUTE, _TENSOR = 2, 5, 5  # NodeProto.output, .attribute; AttributeProto.t
_NAME, _RAW_DATA = 8, 9  # of TensorProto

Span = tuple[int, int]


class File(NamedTuple):
    """A model as bytes, and where each state is in them."""

    data: bytes
    places: list[tuple[str, Span]]


def training_file(training: Model) -> File:
    """A training model, and where its state is."""
    data = _bytes(training)
    found = dict(_tensors(data))
    return File(data, [(state.name, found[state.name]) for state in all_states(training)])


def trained_file(original: Model, training: Model) -> File:
    """What comes out of training as `onward train` writes it, and which state is where.

    Where weights are computed from state, as those are that adapters are merged into, it is the graph that is trained.
    Which tensors follow which state is found out: state is changed, and it is looked at what changes.
    """
    probe = _changed(training)
    for form in (lambda model: in_form_of(original, model), strip):
        before, after = (_by_name(_bytes(form(model))) for model in (training, probe))
        changed = {name for name, value in after.items() if before.get(name) != value}
        source = _sources(changed, after, probe)
        if changed and source.keys() == changed and before.keys() == after.keys():
            data = _bytes(form(training))
            spans = dict(_tensors(data))
            return File(data, [(source[name], spans[name]) for name in sorted(changed)])
    raise UnsupportedError(
        "weights of the trained model are computed from what is trained, and a page only copies them",
        hint="train it with `onward train`",
    )


def _changed(training: Model) -> Model:
    """The same with other numbers in all state that has a fraction: each its own."""
    result, random = training.copy(), np.random.default_rng(0)
    for state in all_states(training):
        if state.value.dtype is not None and state.value.dtype.is_floating_point():
            result.set(state.name, random.normal(size=state.array.shape).astype(state.array.dtype))
    return result


def _sources(changed: Iterable[str], after: Mapping[str, bytes], probe: Model) -> dict[str, str]:
    """Which state each tensor is a copy of; averages of parameters, where they are what is exported."""
    known = {state.array.tobytes(): state.name for state in all_states(probe)}
    return {name: known[after[name]] for name in changed if after[name] in known}


def _by_name(data: bytes) -> dict[str, bytes]:
    return {name: data[begin:end] for name, (begin, end) in _tensors(data)}


def _bytes(model: Model) -> bytes:
    """A model as one file, its tensors as plain bytes in it."""
    model = model.copy()
    for place in sites(model.graph, *(step.algorithm for step in model.steps)):
        tensor: Any = place.tensor
        if tensor is not None and tensor.dtype != ir.DataType.STRING:
            place.tensor = inside(tensor)
    with tempfile.TemporaryDirectory() as folder:
        return model.save(Path(folder) / "model.onnx", data="none").read_bytes()


def _tensors(data: bytes) -> Iterator[tuple[str, Span]]:
    """Initializers of the main graph and of algorithms, and Constants of the main graph by the value that they give."""
    whole = (0, len(data))
    for graph in (*messages(data, whole, _GRAPH), *messages(data, whole, _TRAINING, _ALGORITHM)):
        for tensor in messages(data, graph, _INITIALIZER):
            yield from _raw(data, tensor, _text(data, tensor, _NAME))
    for node in messages(data, whole, _GRAPH, _NODE):
        for tensor in messages(data, node, _ATTRIBUTE, _TENSOR):
            yield from _raw(data, tensor, _text(data, node, _OUTPUT))


def _raw(data: bytes, tensor: Span, name: str) -> Iterator[tuple[str, Span]]:
    yield from ((name, span) for span in messages(data, tensor, _RAW_DATA))


def _text(data: bytes, message: Span, number: int) -> str:
    for begin, end in messages(data, message, number):
        return data[begin:end].decode()
    return ""


def averages(training: Model) -> dict[str, str]:
    """Parameter -> its moving average, where training keeps such."""
    states = {state.name: state for state in all_states(training)}
    found = {state.parameter: name for name, state in states.items() if state.role == "ema" and state.parameter}
    others = [name for name, average in found.items() if states[name].array.dtype != states[average].array.dtype]
    if others:
        raise UnsupportedError(
            f"averages are kept in another type than {list_names(others, 3)}, and a page does not round them",
            hint="leave out `ema`, or train it with `onward train`",
        )
    return found
