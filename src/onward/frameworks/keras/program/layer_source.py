"""Source of the `Operations` layers of a functional model: a class for each, which needs only Keras."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from onward.frameworks.keras.layered import Operations
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.keras.program.recording import MENTIONED, record
from onward.frameworks.keras.program.source import Variable, class_heading, program_text, write_list
from onward.frameworks.program.sizes import Choices
from onward.frameworks.program.source_text import Identifiers, quote


@dataclasses.dataclass(frozen=True)
class LayerClass:
    """Class of a layer in a program, and its variables in their order."""

    name: str
    variables: dict[str, Variable]


def write_layers(live: Any, package: str, file: str) -> tuple[str, dict[str, LayerClass]]:
    """Return the program with the classes of a model's own layers, and the class of each by its name."""
    blocks: list[list[str]] = []
    used: dict[str, Any] = {}
    classes: dict[str, LayerClass] = {}
    for layer in live.layers:
        if isinstance(layer, Operations):
            name = f"Operations{len(classes) + 1}"
            lines, classes[layer.name], functions = _layer(layer, package, name)
            blocks.append(lines)
            used |= functions
    heading = (
        "Model of Keras, written by Onward. Needs only Keras, on any backend.\n\n"
        f"    import keras\n{f'    import {package}' + chr(10) if classes else ''}\n"
        f"    model = keras.models.load_model({quote(file)})\n"
    )
    return program_text(heading, blocks, used.values()), classes


def _layer(layer: Operations, package: str, name: str) -> tuple[list[str], LayerClass, dict[str, Any]]:
    """Return the lines of a class, its variables, and the functions that it calls."""
    constants: dict[str, np.ndarray] = {}
    identifiers = Identifiers(MENTIONED)
    inputs = {value.name or "": identifiers.like(value.name or "") for value in layer.model.inputs}
    weights = list(layer.weights_by_name)
    model = layer.opened()
    places = {weight: f"params[{quote(weight)}]" for weight in weights}
    program = record(model, {**places, **inputs}, Choices(model.inputs), constants)
    steps = program.steps()
    written = program.statements(steps, program.results.values())
    body = written.lines()
    texts = [written.name(value).text for value in program.results.values()]
    listed = ", ".join(inputs.values())
    lines = [
        *(["params = self.params"] if "params[" in "".join([*body, *texts]) else []),
        f"{listed} = inputs" if len(inputs) > 1 else f"{listed} = as_single(inputs)",
        *body,
        f"return {texts[0] if len(texts) == 1 else write_list(texts)}",
    ]
    variables = {
        weight: Variable(f"variable_{i}", array_of(variable), weight in layer.trained)
        for i, (weight, variable) in enumerate(layer.weights_by_name.items())
    }
    for constant, array in constants.items():
        variables[constant] = Variable(f"variable_{len(variables)}", array)
    heading = class_heading(package, f"{name}(keras.layers.Layer)", weights, variables)
    functions = {step.call.__name__: step.call for step in steps if step.call is not None}
    call = ["    def call(self, inputs):", *(f"        {line}" for line in lines)]
    return [*heading, *call], LayerClass(name, variables), functions
