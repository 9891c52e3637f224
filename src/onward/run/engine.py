"""What all engines can do."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.errors import DataError, UnknownNameError, UnsupportedError, near
from onward.model import Model

Arrays = Mapping[str, np.ndarray]


class Engine(ABC):
    """Runs one step of a training model, and holds its state meanwhile."""

    def __init__(self, model: Model, step: int):
        self.model = model
        self.index = step
        self.inputs: dict[str, ir.Value] = {}
        """What a batch must hold, by name."""
        self.loss = "loss"
        """The metric that is minimised."""
        self.on_compile: Callable[[str], None] = lambda text: None
        """Told when a step is compiled, which takes a while."""

    @abstractmethod
    def step(self, batch: Arrays) -> Arrays:
        """One update of the state by a batch; the metrics of the step. If the loss is not finite, the state stays."""

    @abstractmethod
    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        """The gradient of the loss by each parameter. The state stays."""

    @abstractmethod
    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        """The metrics and the outputs of the model for a batch, as inference computes them. The state stays."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """A copy of the state."""

    @abstractmethod
    def load_state(self, state: Arrays) -> None:
        """Replace the state, or the part of it that is given."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory and devices."""

    def updated(self) -> Model:
        """A copy of the training model that holds the state as it is now."""
        model = self.model.copy()
        for name, array in self.state().items():
            model.set(name, array, self.index)
        return model

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_options(engine: str, options: Iterable[str], made: Callable[..., Any]) -> None:
    """Refuse options that an engine does not have, by the signature of what makes it."""
    parameters = inspect.signature(made).parameters.values()
    known = [p.name for p in parameters if p.name not in ("model", "step") and p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in known:
            hint = near(name, known) or (f"it has {', '.join(known)}" if known else None)
            raise UnsupportedError(f"the engine `{engine}` has no option `{name}`", hint=hint)


def check_batch(batch: Arrays, inputs: Mapping[str, ir.Value]) -> None:
    """Refuse a batch that is not what a model takes, before a runtime does with fewer words."""
    check_names(batch, inputs)
    wrong = [text for name, value in inputs.items() if (text := _misfit(batch[name], value))]
    if wrong:
        raise DataError("the batch does not fit the model: " + "; ".join(wrong))


def check_names(batch: Collection[str], inputs: Collection[str], defaults: Collection[str] = ()) -> None:
    """Refuse names that are missing or not inputs; those with a default may be given or not."""
    missing = [name for name in inputs if name not in batch]
    unknown = [name for name in batch if name not in inputs and name not in defaults]
    if missing or unknown:
        lines = [f"`{name}` is missing" for name in missing] + [f"`{name}` is not an input" for name in unknown]
        hint = near(unknown[0], inputs) if unknown else None
        raise UnknownNameError(
            "the batch does not fit the model: " + ", ".join(lines), hint=hint or f"it takes {', '.join(inputs)}"
        )


def _misfit(array: np.ndarray, value: ir.Value) -> str | None:
    expected = value.dtype.numpy() if value.dtype is not None else None
    shape = value.shape
    if expected is not None and isinstance(array, np.ndarray) and array.dtype != expected:  # else the framework says it
        return f"`{value.name}` is {array.dtype}, not {expected}"
    if shape is None:
        return None
    fits = len(shape) == len(array.shape) and all(
        not isinstance(size, int) or size == given for size, given in zip(shape, array.shape, strict=True)
    )
    return None if fits else f"`{value.name}` has the shape {list(array.shape)}, not {_shown(shape)}"


def _shown(shape: ir.Shape) -> str:
    return "[" + ", ".join(str(size) if isinstance(size, int) else str(size.value or "?") for size in shape) + "]"
