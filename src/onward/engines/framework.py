"""The interface of a framework: a table of operators, conversion from and to numpy, and a
derivative.

A table maps an operator to a function of its inputs, in the order of the standard. A missing input
is None; missing inputs at the end are left out. Keyword parameters of the function are attributes,
with the defaults of the schema (a graph is passed as a callable), and `outputs`, the number of
outputs of the node. The function returns the output or a tuple of outputs. Inputs are tensors,
except for sizes and indices, which are numpy arrays (see `HOST_INPUTS`). Outputs that depend only
on shapes may be numpy arrays, too.

    operators = Operators()
    operators(Abs=torch.abs, Floor=torch.floor)

    @operators.define("Concat")
    def concat(*inputs, axis):
        return torch.cat(inputs, axis)

Operators follow the newest version of the standard. Older nodes are converted before the call.
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
    """Operator -> function. Operators of other domains are named `domain.Operator`."""

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
"""Files of a table, in their fixed order."""


def collect_operators(package: str, families: Sequence[str], name: str = "operators") -> Operators:
    """Return the rows of all files of a package."""
    operators = Operators()
    for family in families:
        operators(**getattr(importlib.import_module(f"{package}.{family}"), name))
    return operators


def table(package: str, namespace: Any, kinds: Iterable[type] = ()) -> Operators:
    """Return the rows of a framework's package, and shared rows for the other operators.

    Args:
        namespace: The module that has the functions which shared rows name (`xp.abs`)
        kinds: Tensor types of the namespace
    """
    register(namespace, kinds)
    operators = Operators()
    for family in FAMILIES:
        for module in (f"{package}.{family}", f"onward.engines.shared.{family}"):
            if importlib.util.find_spec(module) is not None:
                rows = importlib.import_module(module).operators.items()
                operators(**{name: function_of(row, namespace) for name, row in rows if name not in operators})
    return operators


class NotOnHost(Exception):
    """A value is needed during tracing, when only shapes exist."""


class Framework(ABC):
    """One framework, on one device."""

    name: ClassVar[str]
    operators: Operators
    cannot: ClassVar[Mapping[str, str]] = {}
    """Operators that the framework cannot express -> the reason."""

    takes_numbers: ClassVar[Mapping[str, Sequence[int]]] = {}
    """Inputs that stay numpy arrays if they are scalars on the host. Kernels may inline them."""

    on_host: Mapping[str, Function] | None = None
    """Table for nodes whose inputs are all on the host (default: the table of numpy)."""

    fuses: ClassVar[Sequence[str]] = ()
    """Operators that replace matching groups of nodes: `Attention`, `onward.Linear` (see fusion.py)."""

    compiles_operators: ClassVar[bool] = False
    """True if eager execution compiles each operator. Then compiling a whole step is faster."""

    only_compiled: ClassVar[bool] = False
    """True if operators run only inside compiled code, never eagerly."""

    most_nodes: int = 5_000
    """Node limit for compilation. It takes milliseconds per node, and more per node in larger graphs."""

    @classmethod
    def devices(cls) -> list[str]:
        """Return the valid values of `device` on this machine."""
        return ["cpu"]

    @classmethod
    def check_device(cls, device: str, called: str) -> None:
        """Raise if this machine does not have the device."""
        if device not in cls.devices():
            raise UnknownNameError(f"{called} has no device `{device}` here", hint=f"it has {', '.join(cls.devices())}")

    @abstractmethod
    def supports(self, dtype: np.dtype) -> bool:
        """True if tensors may have this type. Other arrays stay on the host."""

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any:
        """Return an array as a tensor on the device."""

    @abstractmethod
    def array(self, tensor: Any) -> np.ndarray:
        """Return a tensor as an array. Raise `NotOnHost` during tracing."""

    @abstractmethod
    def derivative(
        self, function: Callable[[Sequence[Any]], tuple[Any, list[Any]]], xs: Sequence[Any]
    ) -> tuple[Any, list[Any], Callable[[], Sequence[Any]]]:
        """Return `y, more = function(xs)` and a function for the gradients of `y.sum()`; all must be differentiable."""

    def host(self, value: Any) -> np.ndarray:
        """Return a tensor or an array as an array."""
        return value if isinstance(value, np.ndarray) else self.array(value)

    def owned(self, value: Any) -> np.ndarray:
        """Return a copy as an array, in memory that the engine never uses again."""
        return np.array(self.host(value))

    def place(self, value: Any) -> Any:
        """Return a tensor or an array as a tensor."""
        return self.tensor(value) if isinstance(value, np.ndarray) else value

    def typed(self, tensor: Any, dtype: ir.DataType | None) -> Any:
        """Return a result in the type of the graph. The framework may have computed it in fewer bits."""
        return tensor

    def adopt(self, value: Any) -> Any:
        """Convert a tensor of any framework, if possible without a copy. Unsupported types stay on the host."""
        return value if isinstance(value, np.ndarray) and not self.supports(value.dtype) else self.place(value)

    def feed(self, value: Any) -> Any:
        """Convert a tensor of any framework to an input of a compiled function."""
        return self.adopt(value)

    def copy(self, tensor: Any) -> Any:
        """Return a copy in separate memory if tensors of the framework can change."""
        return tensor

    def hold(self, name: str, value: Any) -> Any:
        """Return state or a constant of that name as a tensor in separate memory."""
        return self.copy(self.adopt(value))

    def compile(self, function: Function) -> Function:
        """Compile a function of dictionaries: (state, constants, batch) -> (new state, results)."""
        return function

    def compile_step(self, function: Function) -> Function:
        """Compile a training step, which may overwrite its input state."""
        return self.compile(function)

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that must be active while operators run."""
        return contextlib.nullcontext()

    def is_tracing(self) -> bool:
        """True if new tensors are symbolic, since a step is being traced."""
        return False


@functools.cache
def keywords(function: Function) -> list[str]:
    """Return the keyword-only parameters of a function."""
    if (names := getattr(function, "asks_for", None)) is not None:  # its signature does not list them
        return list(names)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a C function without a signature: it takes the inputs only
        return []
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def framework_of(engine: str, **options: Any) -> Framework:
    """Return a framework by name, made with its options."""
    factory = framework_class(engine)
    check_options(engine, options, factory)
    return factory(**options)


def framework_class(engine: str) -> type[Framework]:
    module, name = _FRAMEWORKS[engine]
    try:
        framework: type[Framework] = getattr(importlib.import_module(module), name)
        return framework
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

# Operator -> indices of inputs that are numpy arrays: sizes, indices and counts.
#
# Shape arithmetic stays on the host. So shapes are static when a graph with dynamic shapes is
# traced, and `jax.jit` and `torch.compile` compile it once per shape.

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
"""Operators on text, files and sizes, without derivatives. numpy always computes them."""

_MANY = 1 << 14


def counts_far(operator: str, inputs: Sequence[np.ndarray]) -> bool:
    """True if a node runs on the device because of its large output, such as the `Range` of random numbers."""
    if operator == "Dropout":  # the framework's own generator draws the mask
        return True
    if operator != "Range":
        return False
    start, limit, step = (array.item() for array in inputs)
    return bool((limit - start) / step >= _MANY)
