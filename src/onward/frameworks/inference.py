"""Inference models for frameworks: their trainable parameters, and a comparison with stock ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.agreement.inputs import example_inputs, generator
from onward.agreement.steps import epsilon_in, types_in
from onward.agreement.tolerance import Sides, Tolerance, gap
from onward.engines import function
from onward.errors import Error, MismatchError, UnsupportedError, first_line
from onward.model import Model
from onward.model.checks import check_signatures
from onward.model.core import values
from onward.model.walk import is_random, nodes_of
from onward.recipe.constants import expose
from onward.recipe.trainable import candidates, judge
from onward.recipe.training_mode import functions_to_inline
from onward.standard import OLDEST_OPSET
from onward.transform.bodies import lift_from_bodies, return_to_bodies
from onward.transform.inline import inline
from onward.transform.opset import of_one_opset
from onward.transform.padding import write_padding
from onward.transform.types import fill_in_types

Arrays = Mapping[str, np.ndarray]

_SHAKE = 1e-6
"""Relative perturbation of weights, as large as the rounding of float32 sums of many terms."""
_SHAKES = 4
_BEYOND_DOUBT = 10
"""Outputs differ if they are this many times further apart than perturbed weights move them."""
_ROUNDED_HALF = 2.0**-23
"""Rounding of a Sigmoid near 0, which ONNX Runtime computes as a sum with 0.5."""


def open_parameters(model: Model) -> tuple[Model, list[str]]:
    """Return a copy of an inference model with its parameters as initializers, and their names.

    Parameters are what `prepare` would train for a loss of all outputs, wherever the file stores them.
    """
    model = of_one_opset(check_signatures(model).copy(), OLDEST_OPSET)
    lifted = lift_from_bodies(model)
    if hidden := functions_to_inline(model):
        model = inline(model, hidden)
    write_padding(model)
    for value in [value for value in model.graph.inputs if value.is_initializer()]:  # of IR version 3, or a default
        model.graph.inputs.remove(value)
    stored = dict(candidates(model.graph))
    chosen = [choice.name for choice in judge(model, model.outputs) if choice.role == "parameter"]
    parameters = [expose(model.graph, stored[name][0]).name or "" for name in chosen]
    return_to_bodies(model, lifted - {*parameters})
    return model, parameters


def try_outputs(model: Model, compute: Callable[[dict[str, np.ndarray]], Arrays], framework: str) -> None:
    """Compare outputs with those of stock ONNX Runtime, for generated inputs.

    Nothing is compared if ONNX Runtime runs on none of them, or if the model draws random numbers.

    Raises:
        MismatchError: They differ by more than rounding moves them.
    """
    if any(map(is_random, nodes_of(model))):
        return
    refusal = None
    for inputs, expected in _examples(model):
        try:
            actual = compute(inputs)
        except Exception as error:  # some inputs that ONNX Runtime takes are too small for a framework
            problem = f"{framework} does not run the model: {first_line(error)}"
            refusal = refusal or (error if isinstance(error, Error) else UnsupportedError(problem))
            continue
        hint = f"report the model; run it on an engine: `onward.engines.function(model, engine='{framework}')`"
        tolerance = Tolerance(epsilon=epsilon_in(types_in(model)), equal_nan=True)
        compare = Sides("that of ONNX Runtime", hint, tolerance)
        tensors = {name: x for name, x in expected.items() if isinstance(x, np.ndarray) and x.dtype.kind in "biuf"}
        try:
            compare(actual, tensors)
        except MismatchError:
            moved = _moved(model, inputs, tensors)
            compare(actual, {n: x for n, x in tensors.items() if not gap(actual[n], x) <= _BEYOND_DOUBT * moved[n]})
        return
    if refusal is not None:
        raise refusal


def _examples(model: Model) -> Iterator[tuple[dict[str, np.ndarray], Mapping[str, Any]]]:
    """Yield generated inputs for which ONNX Runtime runs the model, and its outputs.

    The last inputs are those too small for pooling, which frameworks refuse or leave empty.
    """
    last = []
    with suppress(Error):
        run = function(model, engine="onnxruntime", threads=1)
        for inputs in example_inputs(model):
            with suppress(Error):
                example = inputs, run(inputs)
                if _is_too_small(model, inputs):
                    last.append(example)
                else:
                    yield example
    yield from last


def _is_too_small(model: Model, inputs: Mapping[str, np.ndarray]) -> bool:
    """True if a pooling window is larger than its image, for these inputs."""
    sized = model.copy()
    for value in sized.inputs:
        value.shape = ir.Shape(inputs[value.name or ""].shape)
    with suppress(Error):
        fill_in_types(sized, values(sized.graph))
    for node in sized.graph:
        shape = node.inputs[0].shape if node.op_type in ("MaxPool", "AveragePool") and node.inputs[0] else None
        if shape is not None and shape.is_static():
            window, pads = node.attributes["kernel_shape"].as_ints(), node.attributes.get_ints("pads") or ()
            sizes = np.array(shape[2:]) + np.reshape(pads or [0] * 2 * len(window), (2, -1)).sum(0)
            if (sizes < window).any():
                return True
    return False


def _moved(model: Model, inputs: dict[str, np.ndarray], expected: Arrays) -> dict[str, float]:
    """Return how far perturbed weights move each output."""
    rng, sigmoids = generator(0), {v.name for v in model.outputs if (n := v.producer()) and n.op_type == "Sigmoid"}
    moved = {name: _ROUNDED_HALF if name in sigmoids else 0.0 for name in expected}
    for _ in range(_SHAKES):
        shaken = model.copy()
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and value.const_value.dtype.is_floating_point():
                array = value.const_value.numpy()
                factor = 1 + _SHAKE * rng.uniform(-1, 1, array.shape)
                shaken.set(name, (array * factor).astype(array.dtype))
        others = function(shaken, engine="onnxruntime", threads=1)(inputs)
        moved = {name: max(moved[name], gap(others[name], array)) for name, array in expected.items()}
    return moved
