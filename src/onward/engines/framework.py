"""What the interpreter asks of a framework: a table of operators, ways to and from numpy, and a derivative.

A table maps an operator to a function of its inputs, in the order of its documentation. One that a node leaves out is
None, or not given if none follows. What the function asks for by keyword are attributes, which come with the schema's
defaults (a graph comes as a callable), and `outputs`, how many of them the node wants. It returns the output, or a
tuple of them. Inputs are tensors, but for those that say how large or where something is: these are numpy arrays (see
`HOST_INPUTS`), and so may be outputs that are known from shapes alone.

    operators = Operators()
    operators(Abs=torch.abs, Floor=torch.floor)

    @operators.define("Concat")
    def concat(*inputs, axis):
        return torch.cat(inputs, axis)

Operators are as the newest version of the standard has them: older forms are brought to it before the call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onward.engines.engine import check_options
from onward.engines.shared.arrays import function_of, register
from onward.errors import UnknownNameError, UnsupportedError

Function = Callable[..., Any]


class Operators(dict[str, Function]):
    """Operator -> function. Operators of other domains than the standard's are named `domain.Operator`."""

    def __call__(self, **functions: Function) -> None:
        for name, function in functions.items():
            self._add(name, function)

    def define(self, *names: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            for name in names:
                self._add(name, function)
            return function

        return register

    def _add(self, name: str, function: Function) -> None:
        if name in self:
            raise ValueError(f"`{name}` is in the table twice")
        self[name] = function


FAMILIES = ("elementwise", "algebra", "movement", "spatial", "layers", "control", "sequence", "host")
"""The files of a table, in the order in which all have them."""


def collect_operators(package: str, families: Sequence[str], name: str = "operators") -> Operators:
    """The rows of all files of a package."""
    made = Operators()
    for family in families:
        made(**getattr(importlib.import_module(f"{package}.{family}"), name))
    return made


def table(package: str, namespace: Any, kinds: Iterable[type] = ()) -> Operators:
    """The rows of all files of a framework's package, and shared ones for what it has none for.

    Functions that these only name are those of the namespace, to which tensors of the types `kinds` belong.
    """
    register(namespace, kinds)
    made = Operators()
    for family in FAMILIES:
        for place in (f"{package}.{family}", f"onward.engines.shared.{family}"):
            if importlib.util.find_spec(place) is not None:
                rows = importlib.import_module(place).operators.items()
                made(**{name: function_of(row, namespace) for name, row in rows if name not in made})
    return made


class NotOnHost(Exception):
    """A value is needed while a step is traced, when there are only shapes."""


class Framework(ABC):
    """One framework, on one device."""

    name: ClassVar[str]
    operators: Operators
    cannot: ClassVar[Mapping[str, str]] = {}
    """Operators that the framework has no way to express, and why."""

    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {}
    """Inputs of operators that stay arrays if they are scalars on the host: numbers may become a part of kernels."""

    on_host: Mapping[str, Function] | None = None
    """What computes nodes all of whose inputs are on the host, if that is not numpy's table."""

    fuses: ClassVar[Sequence[str]] = ()
    """Operators that nodes which amount to them are handed to: `Attention`, `onward.Linear` (see fusion.py)."""

    compiles_operators: ClassVar[bool] = False
    """Whether operators that are executed one by one are compiled one by one: then a whole step takes less time to."""

    only_compiled: ClassVar[bool] = False
    """Whether operators cannot be executed one by one, but only as a part of what is compiled."""

    most_nodes: int = 5_000
    """Steps of more are not compiled: it takes milliseconds for each, and more for each the more there are."""

    @classmethod
    def devices(cls) -> list[str]:
        """What `device` may be, on this machine."""
        return ["cpu"]

    @classmethod
    def check_device(cls, device: str, called: str) -> None:
        """Raise if this machine has no such device."""
        if device not in cls.devices():
            raise UnknownNameError(f"{called} has no device `{device}` here", hint=f"it has {', '.join(cls.devices())}")

    @abstractmethod
    def supports(self, dtype: np.dtype) -> bool:
        """Whether tensors may have this type; what may not stays on the host."""

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any:
        """An array as a tensor on the device."""

    @abstractmethod
    def array(self, tensor: Any) -> np.ndarray:
        """A tensor as an array. Raises `NotOnHost` while a step is traced."""

    @abstractmethod
    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        """`y, more = function(xs)`, and a function that computes the gradient of the sum of `y` by each of `xs`.

        `y` may itself be differentiated later, and so may the gradients.
        """

    def host(self, value: Any) -> np.ndarray:
        """A value, wherever it is, as an array."""
        return value if isinstance(value, np.ndarray) else self.array(value)

    def owned(self, value: Any) -> np.ndarray:
        """The same in memory that the engine will never read or write again: what is handed to a caller."""
        return np.array(self.host(value))

    def place(self, value: Any) -> Any:
        """A value, wherever it is, as a tensor."""
        return self.tensor(value) if isinstance(value, np.ndarray) else value

    def typed(self, tensor: Any, dtype: ir.DataType | None) -> Any:
        """A result as the graph has it, where the framework may have computed it with fewer bits."""
        return tensor

    def adopt(self, value: Any) -> Any:
        """A tensor of any framework as one of this, without a copy where both can see the memory.

        An array of a type that the framework lacks stays on the host.
        """
        return value if isinstance(value, np.ndarray) and not self.supports(value.dtype) else self.place(value)

    def feed(self, value: Any) -> Any:
        """What a compiled function takes in place of a tensor of any framework."""
        return self.adopt(value)

    def copy(self, tensor: Any) -> Any:
        """The same in memory that nobody else has, where tensors can change or are given away."""
        return tensor

    def hold(self, name: str, value: Any) -> Any:
        """State or a constant of that name, in memory that nobody else has."""
        return self.copy(self.adopt(value))

    def compile(self, function: Function) -> Function:
        """The same function made faster: (state, constants, batch) -> (new state, results), dictionaries of tensors."""
        return function

    def compile_step(self, function: Function) -> Function:
        """The same of a training step, which may overwrite the state that it is given."""
        return self.compile(function)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """What has to be switched on while operators run."""
        return contextlib.nullcontext()

    def is_tracing(self) -> bool:
        """Whether tensors that are made now are only a part of what is recorded."""
        return False


@functools.cache
def keywords(function: Function) -> list[str]:
    """What a function asks for by keyword."""
    if (said := getattr(function, "asks_for", None)) is not None:  # by names that Python may have none for
        return list(said)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C: it takes the inputs, and has no options that we would use
        return []
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def framework_of(engine: str, **options: Any) -> Framework:
    """The framework of that name; options are its own."""
    made = framework_class(engine)
    check_options(engine, options, made)
    return made(**options)


def framework_class(engine: str) -> type[Framework]:
    module, name = _FRAMEWORKS[engine]
    try:
        found: type[Framework] = getattr(importlib.import_module(module), name)
        return found
    except ModuleNotFoundError as error:
        if str(error.name).startswith("onward"):
            raise
        raise UnsupportedError(f"{engine} is not installed", hint=f"pip install 'onward[{engine}]'") from error


_FRAMEWORKS = {
    "numpy": ("onward.engines.numpy", "Numpy"),
    "torch": ("onward.engines.torch", "Torch"),
    "jax": ("onward.engines.jax", "Jax"),
    "tensorflow": ("onward.engines.tensorflow", "TensorFlow"),
    "keras": ("onward.engines.keras", "Keras"),
}


# ---- inputs that operators read on the host --------------------------------------------------------------------------

# Which inputs of operators are read on the host, as numpy arrays: those that say how large, where or how often.
#
# Shape arithmetic stays on the host. So a graph with dynamic shapes has only static ones by the time it is traced, and
# one graph goes through `jax.jit` and `torch.compile` for each shape that comes.

HOST_INPUTS: dict[str, Sequence[int]] = {
    **dict.fromkeys(("ConstantOfShape", "Range"), range(16)),
    **dict.fromkeys(
        (
            "AffineGrid", "CenterCropPad", "CumProd", "CumSum", "Expand", "OneHot", "ReduceL1", "ReduceL2",
            "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
            "ReduceSumSquare", "Reshape", "SequenceAt", "SequenceErase", "Split", "SplitToSequence", "Squeeze", "Tile",
            "TopK", "Trilu", "Unsqueeze", "Upsample", "onward.PairedRandomBits", "onward.RandomBits",
        ),
        (1,),
    ),
    **dict.fromkeys(("Col2Im", "DFT", "Dropout"), (1, 2)),
    **dict.fromkeys(("Pad", "STFT"), (1, 3)),
    **dict.fromkeys(("MaxUnpool", "SequenceInsert"), (2,)),
    "NonMaxSuppression": (2, 3, 4),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}  # fmt: skip
ONLY_ON_HOST = frozenset(
    (
        "BlackmanWindow", "HammingWindow", "HannWindow", "ImageDecoder", "MelWeightMatrix", "RegexFullMatch",
        "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "ai.onnx.ml.LabelEncoder",
    )
)  # fmt: skip
"""Operators on text, files and sizes, which have no derivative, nor counterparts here: always computed by numpy."""

_MANY = 1 << 14


def counts_far(operator: str, inputs: Sequence[np.ndarray]) -> bool:
    """Whether a node makes so many numbers that they are better made on the device: those that random ones are of.

    What is dropped is drawn by the framework's own generator, however few numbers there are.
    """
    if operator == "Dropout":
        return True
    if operator != "Range":
        return False
    start, limit, step = (array.item() for array in inputs)
    return bool((limit - start) / step >= _MANY)
