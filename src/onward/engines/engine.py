"""What all engines can do."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.engines.distributed import Alone, ProcessGroup
from onward.engines.failures import refuse_endless_loops
from onward.errors import DataError, UnknownNameError, UnsupportedError, near, near_or_first
from onward.lowering.rounds import Steps, as_one_step, input_of_run, of_round
from onward.model import Model
from onward.model.state import State, carried_state, states
from onward.model.walk import graphs_of

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class StateShard:
    """A shard of a tensor of the state: numbers in a row."""

    start: int
    """Which of its numbers is the first of them."""
    numbers: np.ndarray
    size: int
    """How many the whole tensor has."""


class Results(dict[str, Any]):
    """Results by name. A name that is not among them is an error that lists those that are."""

    def __missing__(self, name: str) -> Any:
        raise no_result(name, self)


def no_result(name: str, results: Iterable[str]) -> UnknownNameError:
    """Return the error for a result that there is not."""
    return UnknownNameError(f"there is no result `{name}`", hint=near_or_first(str(name), results))


class Engine(ABC):
    """Runs a step of a training model, or a round of several, and holds its state meanwhile."""

    def __init__(self, model: Model, step: Steps):
        self.model = model
        self._one = as_one_step(model, step)
        self._steps = step
        executed = self._one.model.step(self._one.index)
        refuse_endless_loops([*graphs_of(model), executed.algorithm])
        self.inputs: dict[str, ir.Value] = {}
        """What a batch must hold, by name."""
        self._known = {value.name or "": value for value in (*model.inputs, *executed.algorithm.inputs)}
        """What it may hold: to evaluate may take more than a step."""
        self.loss = "loss"
        """The metric that is minimised."""
        self.on_compile: Callable[[str], None] = lambda text: None
        """Told when a step is compiled, which takes a while."""
        self.rows: int | None = None
        """How many rows a whole batch of the training has, if it is known: a step is not compiled for smaller ones."""
        self.group: ProcessGroup = Alone()
        """The processes that train together."""
        self.is_sharded = False
        """Whether this process has only a part of the state, so that all must take part when it is asked for."""
        self._takes_tensors = False
        """Whether a batch may be on a device, as tensors of another framework."""
        self._carried = {state.name: state.value for state in carried_state(self._one.model, self._one.index)}

    @property
    def batches(self) -> int:
        """How many batches a step takes: of a round of several, as many as the most frequent one runs."""
        return self._one.batches

    @property
    def of_a_batch(self) -> dict[str, ir.Value]:
        """The inputs of one batch, where a step takes several."""
        others = {input_of_run(name, number) for name in self.inputs for number in range(1, self.batches)}
        return {name: value for name, value in self.inputs.items() if name not in others}

    def states(self) -> list[State]:
        """The state, as it was when it was loaded: what is what."""
        return states(self._one.model, self._one.index)

    @abstractmethod
    def step(self, batch: Arrays | Sequence[Arrays]) -> Arrays:
        """One update of the state by a batch; the metrics of the step. If the loss is not finite, the state stays.

        A round in which a step runs several times takes a list of so many batches.
        """

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

    def reset(self) -> None:
        """Start over: the state as it is in the file, then as its initializations make it, the same on every engine."""
        from onward.engines.initialization import start_over

        fresh = start_over(self.model)
        self.load_state({name: fresh.array(*self._place(name)) for name in self._carried})

    @abstractmethod
    def close(self) -> None:
        """Give back memory and devices."""

    def _refuse_state_unless(self, is_held: Callable[[ir.DataType], bool], holder: str) -> None:
        for name, value in self._carried.items():
            tensor = value.const_value
            assert tensor is not None
            if not is_held(tensor.dtype):
                raise UnsupportedError(
                    f"{holder} holds no state of the type {str(tensor.dtype).lower()}, which `{name}` has",
                    hint='take another engine: `engine="numpy"` (`--engine numpy`)',
                )

    def _fitting(self, batch: Arrays | Sequence[Arrays], names: Collection[str]) -> dict[str, Any]:
        """What a part of the step takes of a batch. Refuses one that is not what the step takes, before a runtime does
        with fewer words; a part may take less."""
        arrays = batch if isinstance(batch, Mapping) else of_round(_as_batches(batch))
        known = self._known | self.inputs
        given = {name: _array(array) for name, array in arrays.items() if name not in known or name in names}
        check_names(given, names)
        wrong = [misfit(name, given[name], known[name].dtype, known[name].shape, self._takes_tensors) for name in names]
        if any(wrong):
            raise DataError("the batch does not fit the model: " + "; ".join(filter(None, wrong)))
        sizes = [given[name].shape for name in names if given[name].shape]
        if sizes and all(0 in shape for shape in sizes):  # a mean of nothing is 0 to some runtimes; others crash
            raise DataError("the batch has no rows", hint="leave out empty batches")
        return given

    def _fitting_state(self, state: Arrays) -> dict[str, Any]:
        """What is given in place of the state, or of a part of it."""
        wrong = []
        given = {name: _array(array) for name, array in state.items()}
        for name, array in given.items():
            if name not in self._carried:
                raise UnknownNameError(f"there is no state `{name}`", hint=near(name, self._carried))
            tensor = self._carried[name].const_value
            assert tensor is not None
            wrong.append(misfit(name, array, tensor.dtype, ir.Shape(tensor.shape.numpy()), self._takes_tensors))
        if any(wrong):
            raise DataError("the state does not fit the model: " + "; ".join(filter(None, wrong)))
        return given

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Model | None]:
        """The training model as it is now, to be written within. None in a process that only helps the first to it."""
        yield self.updated()

    def shards(self) -> dict[str, StateShard] | None:
        """A copy of what this process has to write of the state, where several divide it: each number is in one of
        them. None where the state is whole, or is not divided into rows of numbers; then `snapshot` has it."""
        return None

    def find_not_finite(self) -> str | None:
        """A weight that training has made NaN or infinite, in whatever process it is."""
        learned = {state.name for state in self.states() if state.role in ("parameter", "statistics")}
        return next((n for n, array in self.state().items() if n in learned and not np.isfinite(array).all()), None)

    def updated(self) -> Model:
        """A copy of the training model that holds the state as it is now."""
        model = self.model.copy()
        for name, array in self.state().items():
            place, step = self._place(name)
            model.set(place, array, step)
        return model

    def with_state(self, hold: Callable[[str, ir.TensorProtocol], ir.TensorProtocol]) -> Model:
        """A copy of the training model that holds other tensors as state: those that are made of its own, by name."""
        model = self.model.copy()
        for name in self._carried:
            place = model.initializer(*self._place(name))
            assert place.const_value is not None
            place.const_value = hold(name, place.const_value)
        return model

    def _place(self, name: str) -> tuple[str, int]:
        """The name of state in the model itself, and the step that it is of."""
        step, original = self._one.origins.get(name, (self._one.index, name))
        return original, step

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ELSEWHERE = 'torch, jax and tensorflow have it: `engine="torch"` (`--engine torch`)'


def check_options(engine: str, options: Iterable[str], made: Callable[..., Any]) -> None:
    """Refuse options that an engine does not have, by the signature of what makes it."""
    parameters = inspect.signature(made).parameters.values()
    known = [p.name for p in parameters if p.name not in ("model", "step") and p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else None
            hint = _ELSEWHERE if name in ("precision", "deterministic") else near(name, known) or has
            raise UnsupportedError(f"the engine `{engine}` has no option `{name}`", hint=hint)


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


def fitting_inputs(
    given: Any, inputs: Mapping[str, ir.Value], defaults: Mapping[str, ir.Value], takes_tensors: bool
) -> dict[str, Any]:
    """Return the inputs of a graph as arrays, lists of them and None; raise if they do not fit it."""
    if not isinstance(given, Mapping):
        raise DataError(
            f"the inputs are {type(given).__name__}, not arrays by name", hint=f"it takes {', '.join(inputs)}"
        )
    check_names(given, inputs, defaults)
    values = {name: _array(value) for name, value in given.items()}
    known = {**defaults, **inputs}
    wrong = [_misfit_of(known[name], value, takes_tensors) for name, value in values.items()]
    if any(wrong):
        raise DataError("the inputs do not fit the model: " + "; ".join(filter(None, wrong)))
    return values


def _as_batches(batch: Any) -> Sequence[Arrays]:
    """Return the batches of a round of several steps; raise if they are no such thing."""
    if isinstance(batch, list | tuple) and all(isinstance(each, Mapping) for each in batch):
        return batch
    raise DataError(f"the batch is {type(batch).__name__}, not arrays by name", hint="give a dict: input -> array")


def _misfit_of(declared: ir.Value, value: Any, takes_tensors: bool) -> str | None:
    """What is wrong with an input that may be a sequence, in words."""
    name = declared.name or ""
    if isinstance(declared.type, ir.TensorType):
        return misfit(name, value, declared.dtype, declared.shape, takes_tensors)
    if isinstance(declared.type, ir.SequenceType):
        if not isinstance(value, list):
            return f"`{name}` is {type(value).__name__}, not a list of arrays"
        parts = (
            misfit(f"{name}[{i}]", _array(part), declared.dtype, None, takes_tensors) for i, part in enumerate(value)
        )
        return next(filter(None, parts), None)
    return None


def misfit(
    name: str, array: Any, dtype: ir.DataType | None, shape: ir.Shape | None, takes_tensors: bool = False
) -> str | None:
    """What is wrong with an array, in words."""
    if not isinstance(array, np.ndarray) and not (takes_tensors and hasattr(array, "__dlpack__")):
        return f"`{name}` is {type(array).__name__}, not an array in the memory of the CPU"
    expected = dtype.numpy() if dtype is not None else None
    if (
        expected is not None
        and isinstance(array, np.ndarray)
        and not (array.dtype == expected or (expected.kind == "O" and array.dtype.kind in "US"))
    ):
        return f"`{name}` is {array.dtype}, not {expected}"  # of what is on a device, the framework says it
    if shape is None:
        return None
    fits = len(shape) == len(array.shape) and all(
        not isinstance(size, int) or size == given for size, given in zip(shape, array.shape, strict=True)
    )
    return None if fits else f"`{name}` has the shape {list(array.shape)}, not {_show_shape(shape)}"


_IN_MEMORY_OF_THE_CPU = (1, 3, 11)
"""Numbers of devices in the protocol by which frameworks exchange tensors: the CPU, and memory that GPUs read, too."""


def _array(value: Any) -> Any:
    """What is given as an array, without a copy; what is on another device stays there, for the framework to take."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value) if isinstance(value, np.generic) else value
    if value.__dlpack_device__()[0] not in _IN_MEMORY_OF_THE_CPU:
        return value
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # another device, a type that numpy lacks, or a variable
        return value


def _show_shape(shape: ir.Shape) -> str:
    return "[" + ", ".join(str(size) if isinstance(size, int) else str(size.value or "?") for size in shape) + "]"
