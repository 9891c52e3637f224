"""Source of a Keras program: a model class, and an optimizer if Keras has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onward.engines.framework import Function
from onward.engines.keras.types import as_single, available, fit_target, plain_name
from onward.frameworks.keras.forward import GraphOptimizer, TrainingModel
from onward.frameworks.keras.layered import Operations
from onward.frameworks.keras.optimizer import array_of
from onward.frameworks.keras.program.recording import MENTIONED, Program, record
from onward.frameworks.keras.step_graphs import Forward, StepGraphs
from onward.frameworks.program.audit import audit_program
from onward.frameworks.program.calls import ProgramStep, in_order
from onward.frameworks.program.sizes import Choices
from onward.frameworks.program.source_bundle import SourceBundle
from onward.frameworks.program.source_text import (
    RESERVED,
    Identifiers,
    arrange_imports,
    break_lines,
    docstring,
    identifier,
    quote,
)
from onward.model import Model
from onward.model.state import STEP, states


class Variable(NamedTuple):
    """Variable of the program, with its initial value."""

    attribute: str  # of the model that `model_with_state` makes
    array: np.ndarray
    trainable: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """Program, and its variables in their order."""

    text: str
    package: str
    class_name: str
    model: Sequence[Variable]
    optimizer: Sequence[Variable]  # none for an optimizer of Keras


def write_program(model: Model, live: TrainingModel, package: str, file: str) -> Source:
    """Return the program that computes what a live model computes.

    Keras registers its classes under `package`; `file` holds its state.
    """
    return _Writer(model, live, package, file).source()


class _Writer:
    def __init__(self, model: Model, live: TrainingModel, package: str, file: str):
        self._live = live
        self._package = package
        self._file = file
        self._model = model
        self._parts = StepGraphs(model, lambda graph: graph)
        self._choices = Choices([*model.inputs, *model.step().algorithm.inputs])
        self._constants: dict[str, np.ndarray] = {}
        self._used: dict[str, Function] = {}
        self._places = {name: f"params[{quote(name)}]" for name in live.variables_by_name}
        self._state = live.optimizer.state() if isinstance(live.optimizer, GraphOptimizer) else {}
        self._class_name = _class_name(live.name)

    def source(self) -> Source:
        passes = self._passes()
        optimizer = self._optimizer() if isinstance(self._live.optimizer, GraphOptimizer) else []
        model = [*self._heading(), *passes]
        text = program_text(self._docstring(), [model, optimizer], self._used.values())
        return Source(text, self._package, self._class_name, self._variables(), self._slots())

    def _docstring(self) -> str:
        return (
            "Run of Keras, written by Onward. Needs only Keras, on any backend.\n\n"
            f"    import keras\n    import {self._package}\n\n"
            f"    loaded = keras.models.load_model({quote(self._file)})\n"
            "    loaded.fit(...)  # resumes the run\n"
        )

    def _heading(self) -> list[str]:
        names = list(self._live.variables_by_name)
        variables = dict(zip([*names, *self._constants], self._variables(), strict=True))
        return class_heading(self._package, f"{self._class_name}(keras.Model)", names, variables)

    def _variables(self) -> list[Variable]:
        variables = self._live.variables_by_name.items()
        stored = [(array_of(v).astype(self._live.source.array(n).dtype), v.trainable) for n, v in variables]
        stored += [(array, False) for array in self._constants.values()]
        return [Variable(f"variable_{i}", array, trainable) for i, (array, trainable) in enumerate(stored)]

    def _slots(self) -> list[Variable]:
        return [Variable(f"variable_{i}", array) for i, array in enumerate(self._state.values())]

    def _passes(self) -> list[str]:
        inference, training = (self._pass(forward) for forward in (self._parts.inference(), self._parts.training()))
        call = ["    def call(self, inputs, training=False):", *inference]
        if training != inference:
            call[1:] = [
                "        return self.training_pass(inputs) if training else self.inference_pass(inputs)",
                "",
                "    def inference_pass(self, inputs):",
                *inference,
                "",
                "    def training_pass(self, inputs):",
                *training,
            ]
        return [*call, *([] if self._live.loss is not None else self._loss()), *self._exclusions()]

    def _pass(self, forward: Forward) -> list[str]:
        names = Identifiers(MENTIONED)
        inputs = {name: names.like(name) for name in self._live.input_names}
        listed = ", ".join(inputs.values())
        stores = {new: self._places[name] for name, new in forward.updates.items()}
        lines, texts = self._computed(self._record(forward.graph, inputs), stores)
        lines = [f"{listed} = inputs" if len(inputs) > 1 else f"{listed} = as_single(inputs)", *lines]
        if self._live.loss is None:
            watched = [texts[name] for name in forward.watched]
            lines.append(f"self.watched = {write_list(watched)}  # the loss reads these values")
        outputs = [texts[name] for name in forward.outputs]
        lines.append(f"return {outputs[0] if len(outputs) == 1 else write_list(outputs)}")
        return _indent(["params = self.params", *lines] if "params[" in "".join(lines) else lines)

    def _record(self, graph: Model, expressions: Mapping[str, str]) -> Program:
        return record(graph, {**self._places, **expressions}, self._choices, self._constants)

    def _computed(self, program: Program, stores: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
        """Return the statements of a program, and the expressions of its results."""
        steps = program.steps(stores)
        self._use(steps)
        results = {name: value for name, value in program.results.items() if name not in (stores or {})}
        written = program.statements(steps, results.values())
        return written.lines(), {name: written.name(value).text for name, value in results.items()}

    def _use(self, steps: Iterable[ProgramStep]) -> None:
        """Collect the functions that are copied into the program."""
        self._used |= {step.call.__name__: step.call for step in steps if step.call is not None}

    def _loss(self) -> list[str]:
        loss = self._parts.loss()
        names = Identifiers([*MENTIONED, "y"])
        watched = {name: names.like(name) for name in loss.watched}
        targets = {value.name or "": names.like(value.name or "") for value in loss.targets}
        body, texts = self._computed(self._record(loss.graph, {**watched, **targets}))
        lines = ['assert sample_weight is None, "the loss takes no sample_weight"']
        lines += ["params = self.params"] if "params[" in "".join(body) else []
        lines.append(f"{write_list(list(watched.values()))} = self.watched")
        if targets:
            lines.append(f"{write_list(list(targets.values()))} = y if isinstance(y, (list, tuple)) else [y]")
        for value in loss.targets:
            rank, dtype = len(value.shape or ()), str(value.dtype.numpy().name if value.dtype else "float32")
            lines.append(f'{targets[value.name or ""]} = fit_target({targets[value.name or ""]}, "{dtype}", {rank})')
        return [
            "",
            "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):",
            *_indent([*lines, *body, f"return {texts[loss.name]}"]),
        ]

    def _exclusions(self) -> list[str]:
        """Return a method that restores the variables without weight decay, which Keras does not save."""
        optimizer = self._live.optimizer
        if isinstance(optimizer, GraphOptimizer) or not optimizer.weight_decay:
            return []
        variables = self._live.variables_by_name.items()
        spared = [self._places[name] for name, v in variables if v.trainable and not optimizer._use_weight_decay(v)]
        if not spared:
            return []
        return [
            "",
            "    def compile_from_config(self, config):",
            *_indent(
                [
                    "config = keras.saving.deserialize_keras_object(config)",
                    f"spared = [{', '.join(f'self.{name}' for name in spared)}]",
                    'config["optimizer"].exclude_from_weight_decay(var_list=spared)',
                    "self.compile(**config)",
                    "self.optimizer.build(self.trainable_variables)",
                ]
            ),
        ]

    def _optimizer(self) -> list[str]:
        graph, contract = self._parts.apply()
        trained = [name for name, v in self._live.variables_by_name.items() if v.trainable]
        own = {name: f"slots[{quote(name)}]" for name in self._state}
        places = {**{name: f"params[{quote(name)}]" for name in trained}, **own}
        gradients = {fed: f"gradients[{quote(name)}]" for fed, name in contract.gradients.items()}
        program = record(graph, {**places, **gradients}, self._choices, self._constants)
        self._use(program.steps())
        slots = {state.name: state.parameter for state in states(self._model) if state.parameter in trained}
        owners = {name: slots.get(name, name if name in trained else "") or "" for name in places}
        updates = {name: new for name, new in contract.update.items() if name in places}
        body = _by_parameter(program, updates, owners, places)
        apply = [
            "variables = list(trainable_variables or self._trainable_variables)",
            "if not self.built:",
            "    self.build(variables)",
            f"names = {write_list([quote(name) for name in trained])}",
            "params, gradients, slots = dict(zip(names, variables)), dict(zip(names, grads)), self.slots",
            *body,
            f"self.iterations.assign(ops.cast({own[STEP]}, self.iterations.dtype))",
        ]
        variables = zip(self._state, self._slots(), strict=True)
        return [
            f'@keras.saving.register_keras_serializable(package="{self._package}")',
            "class Update(keras.optimizers.Optimizer):",
            '    """Update of the run, with its own learning rate: `learning_rate` has no effect."""',
            "",
            "    def build(self, variables):",
            "        if self.built:",
            "            return",
            "        super().build(variables)",
            "        self.slots = {",
            *(f"            {quote(name)}: self._slot({_weight(quote(name), slot)})," for name, slot in variables),
            "        }",
            "",
            '    def _slot(self, name, shape, dtype="float32"):',
            "        return self.add_variable(shape, dtype=available(dtype), name=plain_name(name))",
            "",
            "    def apply(self, grads, trainable_variables=None):",
            *_indent(apply),
        ]


def class_heading(package: str, head: str, names: Sequence[str], variables: Mapping[str, Variable]) -> list[str]:
    """Return the begin of a class with these variables: those in `names` in `params`, others as attributes."""
    constants = [name for name in variables if name not in names]
    return [
        f'@keras.saving.register_keras_serializable(package="{package}")',
        f"class {head}:",
        "    def __init__(self, **options):",
        "        super().__init__(**options)",
        "        self.params = {",
        *(f"            {quote(name)}: self._weight({_weight(quote(name), variables[name])})," for name in names),
        "        }",
        *(f"        self.{name} = self._weight({_weight(quote(name), variables[name])})" for name in constants),
        "        self.built = True",
        "",
        '    def _weight(self, name, shape, dtype="float32", trainable=False):',
        "        options = dict(shape=shape, dtype=available(dtype), trainable=trainable)",
        '        return self.add_weight(name=plain_name(name), initializer="zeros", **options)',
        "",
    ]


def program_text(heading: str, blocks: Sequence[Sequence[str]], used: Iterable[Function]) -> str:
    """Return the program of these blocks of lines, with the functions that they call."""
    body = "\n".join("\n".join(block) for block in blocks)
    helpers = [f for f in (available, as_single, fit_target, plain_name) if f"{f.__name__}(" in body]
    own = SourceBundle()
    own.add(*helpers, *used)
    imports = ["from __future__ import annotations", "import keras", "from keras import ops", *own.imports()]
    imports += ["import math"] if "math." in body else []
    texts = [*own.texts(), *(break_lines("\n".join(block)) for block in blocks if block)]
    parts = [docstring(heading), arrange_imports(imports), *(f"\n{text}" for text in texts)]
    return audit_program("\n\n".join(parts) + "\n", ["keras"])


def _by_parameter(
    program: Program, updates: Mapping[str, str], owners: Mapping[str, str], places: Mapping[str, str]
) -> list[str]:
    """Return the statements of an update: common ones, and loops over parameters with equal ones."""
    parts: dict[str, list[str]] = {}
    for name in updates:
        parts.setdefault(owners[name], []).append(name)
    values = {name: program.results[new] for name, new in updates.items()}
    every = program.steps()
    needed = {owner: set(in_order([values[name] for name in names])) for owner, names in parts.items()}
    common = parts.pop("", [])
    shared = [s for s in every if sum(s in steps for steps in needed.values()) > 1 or s in needed.get("", ())]
    outside = {value for step in every if step not in set(shared) for value in step.values()}
    reused = [value for step in shared for value in step.results if value in outside]
    first = program.statements(shared, [*reused, *(values[name] for name in common)])
    lines = first.lines()
    names = {value: first.name(value).text for value in (*reused, *(values[name] for name in common))}
    loops: dict[str, list[str]] = {}
    for owner, slots in parts.items():
        steps = [step for step in every if step in needed[owner] and step not in set(shared)]
        for value in (value for step in steps for value in step.values()):
            value.path = _of_any(value.path, owner)
        inner = program.statements(steps, [values[name] for name in slots], names)
        body = inner.lines()
        stores = [f"{_of_any(places[name], owner)}.assign({inner.name(values[name]).text})" for name in slots]
        loops.setdefault("\n".join([*body, *stores]), []).append(owner)
    for text, over in loops.items():
        listed = "names" if len(loops) == 1 else write_list([quote(name) for name in over])
        lines += [f"for name in {listed}:", *(f"    {line}" for line in text.split("\n"))]
    return [*lines, *(f"{places[name]}.assign({first.name(values[name]).text})" for name in common)]


def _of_any(text: str, owner: str) -> str:
    """Return source that updates one parameter as source that updates any `name`."""
    text = text.replace(f"[{quote(owner)}]", "[name]")
    is_plain = quote(owner)[1:-1] == owner and not {*owner} & {"{", "}"}
    return text.replace(f'["{owner}/', '[f"{name}/') if is_plain else text


def _weight(name: str, variable: Variable) -> str:
    dtype = str(variable.array.dtype)
    options = [name, str(variable.array.shape)]
    options += [] if dtype == "float32" else [f'dtype="{dtype}"']
    return ", ".join([*options, *(["trainable=True"] if variable.trainable else [])])


def _class_name(name: str) -> str:
    words = [word for word in identifier(name).split("_") if word]
    joined = "".join(word[:1].upper() + word[1:] for word in words)
    is_free = joined.isidentifier() and joined not in RESERVED and joined != "Update"
    return joined if is_free else f"Model{joined}"


def write_list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]


# ---- `Operations` layers of functional models: a class for each ------------------------------------------------------


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
