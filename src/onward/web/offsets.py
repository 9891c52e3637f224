"""Offsets of tensors in the bytes of models, where a page overwrites initial state with trained."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
File = tuple[bytes, list[tuple[str, Span]]]
"""A model as bytes, and the span of each state in them."""


def training_file(training: Model) -> File:
    """Return the bytes of a training model, and the spans of its state."""
    data = _bytes(training)
    spans = dict(_tensors(data))
    return data, [(state.name, spans[state.name]) for state in all_states(training)]


def trained_file(original: Model, training: Model) -> File:
    """Return the bytes of the model that `onward train` writes, and the spans of trained state.

    If its weights are computed from state, such as merged adapters, it is the graph of the training
    model. Which tensor follows which state is found by experiment: state changes, tensors follow.
    """
    probe = training.copy()
    random = np.random.default_rng(0)
    for state in all_states(training):
        if state.value.dtype is not None and state.value.dtype.is_floating_point():
            probe.set(state.name, random.normal(size=state.array.shape).astype(state.array.dtype))
    # Of two states with equal bytes the last wins: averages of parameters, where they are exported.
    states = {state.array.tobytes(): state.name for state in all_states(probe)}
    for form in (lambda model: in_form_of(original, model), strip):
        data = _bytes(form(training))
        spans, probe_data = dict(_tensors(data)), _bytes(form(probe))
        before = {name: data[begin:end] for name, (begin, end) in spans.items()}
        after = {name: probe_data[begin:end] for name, (begin, end) in _tensors(probe_data)}
        changed = sorted(name for name, value in after.items() if before.get(name) != value)
        if changed and all(after[name] in states for name in changed) and before.keys() == after.keys():
            return data, [(states[after[name]], spans[name]) for name in changed]
    raise UnsupportedError(
        "a page copies trained weights, but this model computes weights from them", hint="train it with `onward train`"
    )


def _bytes(model: Model) -> bytes:
    """Return a model as one file, with its tensors as raw data in it."""
    model = model.copy()
    for site in sites(model.graph, *(step.algorithm for step in model.steps)):
        tensor: Any = site.tensor
        if tensor is not None and tensor.dtype != ir.DataType.STRING:
            site.tensor = inside(tensor)
    with tempfile.TemporaryDirectory() as folder:
        return model.save(Path(folder) / "model.onnx", data="none").read_bytes()


def _tensors(data: bytes) -> Iterator[tuple[str, Span]]:
    """Yield the spans of initializers, and of Constants of the main graph by the names of their outputs."""
    whole = (0, len(data))
    for graph in (*messages(data, whole, _GRAPH), *messages(data, whole, _TRAINING, _ALGORITHM)):
        for tensor in messages(data, graph, _INITIALIZER):
            yield from _raw(data, tensor, tensor, _NAME)
    for node in messages(data, whole, _GRAPH, _NODE):
        for tensor in messages(data, node, _ATTRIBUTE, _TENSOR):
            yield from _raw(data, tensor, node, _OUTPUT)


def _raw(data: bytes, tensor: Span, message: Span, name_field: int) -> Iterator[tuple[str, Span]]:
    """Yield the span of a tensor's raw data, if any, with the name in a field of a message."""
    begin, end = next(messages(data, message, name_field), (0, 0))
    yield from ((data[begin:end].decode(), span) for span in messages(data, tensor, _RAW_DATA))


def averages(training: Model) -> dict[str, str]:
    """Return the moving average of each parameter that has one."""
    states = {state.name: state for state in all_states(training)}
    averages = {state.parameter: name for name, state in states.items() if state.role == "ema" and state.parameter}
    others = [name for name, average in averages.items() if states[name].array.dtype != states[average].array.dtype]
    if others:
        raise UnsupportedError(
            f"a page does not round averages to the type of {list_names(others, 3)}",
            hint="leave out `ema`, or train it with `onward train`",
        )
    return averages
