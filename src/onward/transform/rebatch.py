"""Models for one fixed size of batch, made to take any."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import InvalidModelError, UnsupportedError
from onward.model import Model, Source, read
from onward.shapes import constant_ints
from onward.transform.training import strip

_BATCH = "batch"
_TOLERANCE = 1e-4


def fixed_batch(model: Model) -> int | None:
    """The one size of batch that all inputs of a model have; None if it takes any, or if they differ."""
    shapes = [value.shape for value in model.inputs]
    sizes = {shape[0] if shape is not None and len(shape) else None for shape in shapes}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def rebatch(source: Source) -> Model:
    """A copy of a model for a fixed size of batch that takes any size, such as one that was exported for one image.

    The first dimension of inputs becomes a symbol, and shapes that nodes reshape to follow it. Then the model is run:
    for twice as many samples it must give what it gives for each half, else it is refused.
    """
    model = read(source)
    size = fixed_batch(model)
    if size is None:
        raise InvalidModelError("the model has no fixed size of batch", hint="it may take any size as it is")
    result = model.copy()
    for value in [*result.inputs, *result.outputs]:
        value.shape = _freed(value.shape, size)
    for node in list(result.graph):
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
        if node.op_type == "Reshape" and node.domain in ("", "ai.onnx"):
            _free_target(result, node, size)
    _compare(model, result, size)
    return result


def _freed(shape: ir.Shape | None, size: int) -> ir.Shape | None:
    if shape is None or not len(shape) or shape[0] != size:
        return shape
    return ir.Shape([_BATCH, *list(shape)[1:]])


def _free_target(model: Model, node: ir.Node, size: int) -> None:
    """Let a constant shape follow the batch: its first dimension is what remains, or that of the input."""
    target = constant_ints(node.inputs[1])
    if not target or target[0] <= 0:
        return
    if -1 not in target:
        new = (-1, *target[1:])
    elif target[0] == size and not node.attributes.get_int("allowzero", 0):
        new = (0, *target[1:])
    else:
        return
    name = model.names().fresh(f"{node.name or 'reshape'}/shape")
    shape = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(new)]))
    shape.const_value = ir.Tensor(np.asarray(new, np.int64), name=name)
    model.graph.register_initializer(shape)
    node.replace_input_with(1, shape)


# ---- whether it is the same model ------------------------------------------------------------------------------------


def _compare(old: Model, new: Model, size: int) -> None:
    rng = np.random.default_rng(0)
    halves = [{value.name or "": _sample(rng, value) for value in old.inputs} for _ in range(2)]
    whole = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    expected = [_run(old, half) for half in halves]
    try:
        found = _run(new, whole)
    except Exception as error:  # whatever the runtime says about it
        raise _refused(size, str(error).strip().splitlines()[0]) from error
    for value, first, second, both in zip(new.outputs, *expected, found, strict=True):
        wanted = np.concatenate([first, second]) if first.ndim else first
        if both.shape != wanted.shape:
            raise _refused(size, f"for {2 * size} samples `{value.name}` has the shape {list(both.shape)}")
        if not np.allclose(both, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise _refused(size, f"`{value.name}` of a sample depends on the other samples")


def _sample(rng: np.random.Generator, value: ir.Value) -> np.ndarray:
    """An input that any model takes: small numbers, of which whole ones may be indices."""
    assert value.shape is not None and value.dtype is not None
    shape = [size if isinstance(size, int) else 2 for size in value.shape]
    dtype = value.dtype.numpy()
    numbers: np.ndarray = rng.normal(size=shape) if value.dtype.is_floating_point() else rng.integers(0, 2, shape)
    return numbers.astype(dtype)


def _run(model: Model, inputs: Mapping[str, np.ndarray]) -> list[Any]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:  # a model of any size can be read from a file
        path = strip(model).save(Path(folder) / "model.onnx")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return [np.asarray(array) for array in session.run(None, dict(inputs))]


def _refused(size: int, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the model works for batches of {size} only: {why}",
        hint=f"export it again with a dynamic batch, or train it with batches of {size}",
    )
