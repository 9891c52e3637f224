"""A run as a program of Keras: a model class with its passes and its loss, and where Keras has none, its optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np

from onward.convert.keras.graphs import Forward, Parts
from onward.convert.keras.live import GraphOptimizer, TrainingModel
from onward.convert.keras.ops.types import as_single, available, fitted
from onward.convert.keras.optimizers import array_of
from onward.convert.keras.source.recording import MENTIONED, Choices, Program, recorded
from onward.convert.program.audit import audit_program
from onward.convert.program.layout import arrange_imports, break_lines
from onward.convert.program.names import RESERVED, Identifiers, docstring, identifier, quoted
from onward.convert.program.own_source import OwnSource
from onward.engines.framework import Function
from onward.model import Model
from onward.model.state import STEP

_METHODS = ("inference_pass", "training_pass", "watched")
"""What a program's model has beside what those of Keras have."""


class Held(NamedTuple):
    """A variable of the program."""

    attribute: str
    array: np.ndarray
    """What it holds when the program is written."""
    trainable: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """A program, and its variables, in their order."""

    text: str
    package: str
    class_name: str
    model: Sequence[Held]
    optimizer: Sequence[Held]
    """Those of the program's own optimizer; none if that is one of Keras."""


def write_program(model: Model, live: TrainingModel, package: str, file: str) -> Source:
    """The program that computes what a live model does.

    `package` is what Keras registers its classes under, and `file` what holds its state.
    """
    return _Writer(model, live, package, file).source()


class _Writer:
    def __init__(self, model: Model, live: TrainingModel, package: str, file: str):
        self._live = live
        self._package = package
        self._file = file
        self._parts = Parts(model, lambda graph: graph)
        self._choices = Choices([*model.inputs, *model.step().algorithm.inputs])
        self._constants: dict[str, np.ndarray] = {}
        self._used: dict[str, Function] = {}
        has = [*dir(keras.Model()), *dir(keras.optimizers.Optimizer(0.0))]
        names = Identifiers([*MENTIONED, *_METHODS, *has])
        self._held = {name: names.like(name) for name in live.variables_by_name}
        self._state = live.optimizer.state() if isinstance(live.optimizer, GraphOptimizer) else {}
        self._own = {name: names.like(name) for name in self._state}
        self._names = names
        self._class_name = _class_name(live.name)

    def source(self) -> Source:
        passes = self._passes()
        optimizer = self._optimizer() if isinstance(self._live.optimizer, GraphOptimizer) else []
        model = [*self._heading(), *passes]
        body = "\n".join([*model, *optimizer])
        helpers = [function for function in (available, as_single, fitted) if f"{function.__name__}(" in body]
        own = OwnSource()
        own.add(*helpers, *self._used.values())
        imports = ["from __future__ import annotations", "import keras", "from keras import ops", *own.imports()]
        blocks = [
            self._docstring(),
            arrange_imports(imports),
            *(f"\n{text}" for text in own.texts()),
            "\n" + break_lines("\n".join(model)),
            *(["\n" + break_lines("\n".join(optimizer))] if optimizer else []),
        ]
        text = audit_program("\n\n".join(blocks) + "\n", ["keras"])
        return Source(text, self._package, self._class_name, self._variables(), self._slots())

    def _docstring(self) -> str:
        return docstring(
            "A run of Keras, written by Onward: needs nothing but Keras, on any of its backends.\n\n"
            f"    import keras\n    import {self._package}\n\n"
            f"    loaded = keras.models.load_model({quoted(self._file)})\n"
            "    loaded.fit(...)  # goes on where the run is\n"
        )

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _heading(self) -> list[str]:
        lines = [
            f'@keras.saving.register_keras_serializable(package="{self._package}")',
            f"class {self._class_name}(keras.Model):",
            "    def __init__(self, **options):",
            "        super().__init__(**options)",
        ]
        return [*lines, *map(_variable, self._variables()), "        self.built = True", ""]

    def _variables(self) -> list[Held]:
        held = self._live.variables_by_name.items()
        made = [Held(self._held[n], array_of(v).astype(_dtype(self._live, n)), v.trainable) for n, v in held]
        return [*made, *(Held(name, array) for name, array in self._constants.items())]

    def _slots(self) -> list[Held]:
        return [Held(self._own[name], array) for name, array in self._state.items()]

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
        inputs = self._input_names()
        wanted = {new: f"new_{self._held[name]}" for name, new in forward.updates.items()}
        program = self._program(forward.graph, inputs, wanted)
        listed = ", ".join(inputs.values())
        lines = [f"{listed} = inputs" if len(inputs) > 1 else f"{listed} = as_single(inputs)", *program.lines]
        lines += [f"self.{self._held[name]}.assign({program.results[new]})" for name, new in forward.updates.items()]
        if self._live.loss is None:
            watched = [program.results[name] for name in forward.watched]
            lines.append(f"self.watched = {written_list(watched)}  # what the loss looks at")
        outputs = [program.results[name] for name in forward.outputs]
        lines.append(f"return {outputs[0] if len(outputs) == 1 else written_list(outputs)}")
        return _indented(lines)

    def _input_names(self) -> dict[str, str]:
        names = Identifiers(MENTIONED)
        return {name: names.like(name) for name in self._live.input_names}

    def _program(self, graph: Model, given: Mapping[str, str], wanted: Mapping[str, str]) -> Program:
        state = {name: f"self.{attribute}" for name, attribute in self._held.items()}
        program = recorded(graph, {**state, **given}, self._choices, self._constants, wanted)
        self._used |= program.used
        return program

    def _loss(self) -> list[str]:
        loss = self._parts.loss()
        names = Identifiers([*MENTIONED, "y"])
        watched = {name: names.like(name) for name in loss.watched}
        targets = {value.name or "": names.like(value.name or "") for value in loss.targets}
        program = self._program(loss.graph, {**watched, **targets}, {loss.name: "loss"})
        lines = [
            'assert sample_weight is None, "the loss has no weights of samples"',
            f"{written_list(list(watched.values()))} = self.watched",
            f"{written_list(list(targets.values()))} = y if isinstance(y, (list, tuple)) else [y]",
        ]
        for value in loss.targets:
            rank, dtype = len(value.shape or ()), str(value.dtype.numpy().name if value.dtype else "float32")
            lines.append(f'{targets[value.name or ""]} = fitted({targets[value.name or ""]}, "{dtype}", {rank})')
        return [
            "",
            "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):",
            *_indented([*lines, *program.lines, f"return {program.results[loss.name]}"]),
        ]

    def _exclusions(self) -> list[str]:
        """What weight decay spares: Keras does not keep it in a file."""
        optimizer = self._live.optimizer
        if isinstance(optimizer, GraphOptimizer) or not optimizer.weight_decay:
            return []
        held = self._live.variables_by_name.items()
        spared = [self._held[name] for name, v in held if v.trainable and not optimizer._use_weight_decay(v)]
        if not spared:
            return []
        return [
            "",
            "    def compile_from_config(self, config):",
            *_indented(
                [
                    "config = keras.saving.deserialize_keras_object(config)",
                    f"spared = [{', '.join(f'self.{name}' for name in spared)}]",
                    'config["optimizer"].exclude_from_weight_decay(var_list=spared)',
                    "self.compile(**config)",
                    "self.optimizer.build(self.trainable_variables)",
                ]
            ),
        ]

    # ---- the optimizer -----------------------------------------------------------------------------------------------

    def _optimizer(self) -> list[str]:
        graph, contract = self._parts.apply()
        trained = {n: self._held[n] for n, v in self._live.variables_by_name.items() if v.trainable}
        given = {name: self._names.like(f"{attribute}_grad") for name, attribute in trained.items()}
        gradients = {name: given[parameter] for name, parameter in contract.gradients.items()}
        own = {name: f"self.{attribute}" for name, attribute in self._own.items()}
        wanted = {new: f"new_{({**self._own, **trained})[name]}" for name, new in contract.update.items()}
        program = recorded(graph, {**trained, **own, **gradients}, self._choices, self._constants, wanted)
        self._used |= program.used
        targets = {**own, **trained}
        apply = [
            "variables = list(trainable_variables or self._trainable_variables)",
            "if not self.built:",
            "    self.build(variables)",
            f"{written_list(list(trained.values()))} = variables",
            f"{written_list(list(given.values()))} = grads",
            *program.lines,
            *(f"{targets[n]}.assign({program.results[new]})" for n, new in contract.update.items() if n in targets),
            f"self.iterations.assign(ops.cast({own[STEP]}, self.iterations.dtype))",
        ]
        return [
            f'@keras.saving.register_keras_serializable(package="{self._package}")',
            "class Update(keras.optimizers.Optimizer):",
            '    """The whole update of the run, with its learning rate; that of Keras stands aside."""',
            "",
            "    def build(self, variables):",
            "        if self.built:",
            "            return",
            "        super().build(variables)",
            *map(_slot, self._slots()),
            "",
            "    def apply(self, grads, trainable_variables=None):",
            *_indented(apply),
        ]


def _variable(held: Held) -> str:
    name, dtype = held.attribute, str(held.array.dtype)
    options = [f'name="{name}"', f"shape={held.array.shape}"]
    options += [] if dtype == "float32" else [f"dtype={_written_type(dtype)}"]
    options += ['initializer="zeros"'] + ([] if held.trainable else ["trainable=False"])
    return f"        self.{name} = self.add_weight({', '.join(options)})"


def _slot(held: Held) -> str:
    name, dtype = held.attribute, _written_type(str(held.array.dtype))
    return f'        self.{name} = self.add_variable({held.array.shape}, dtype={dtype}, name="{name}")'


def _dtype(live: TrainingModel, name: str) -> str:
    return str(live.source.array(name).dtype)


def _written_type(dtype: str) -> str:
    return f'available("{dtype}")' if dtype.endswith("64") else f'"{dtype}"'


def _class_name(name: str) -> str:
    words = [word for word in identifier(name).split("_") if word]
    joined = "".join(word[:1].upper() + word[1:] for word in words)
    is_free = joined.isidentifier() and joined not in RESERVED and joined != "Update"
    return joined if is_free else f"Model{joined}"


def written_list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]
