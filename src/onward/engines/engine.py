"""The interface of all engines: update, evaluate, and exchange state."""

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
from onward.engines.step_errors import refuse_endless_loops
from onward.errors import DataError, UnknownNameError, UnsupportedError, suggest, suggest_or_list
from onward.lowering.rounds import Steps, as_one_step, input_of_run, join_batches
from onward.model import Model
from onward.model.state import State, carried_state, states
from onward.model.walk import graphs_of

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class StateShard:
    """A shard of a state tensor: consecutive elements of the flattened tensor."""

    start: int
    """Index of the first element in the flattened tensor."""
    numbers: np.ndarray
    size: int
    """Number of elements of the full tensor."""


class Results(dict[str, Any]):
    """Results by name. A missing name raises an error that suggests the closest one."""

    def __missing__(self, name: str) -> Any:
        raise no_result(name, self)


def no_result(name: str, results: Iterable[str]) -> UnknownNameError:
    """Return the error for a missing result."""
    return UnknownNameError(f"unknown result `{name}`", hint=suggest_or_list(str(name), results))


class Engine(ABC):
    """Executor of one step of a training model, or of a round of several. Owns their state."""

    def __init__(self, model: Model, step: Steps):
        self.model = model
        self._one = as_one_step(model, step)
        self._steps = step
        executed = self._one.model.step(self._one.index)
        refuse_endless_loops([*graphs_of(model), executed.algorithm])
        self.inputs: dict[str, ir.Value] = {}
        """Required inputs of a batch, by name."""
        self._declared = {value.name or "": value for value in (*model.inputs, *executed.algorithm.inputs)}
        """Accepted inputs of a batch. Evaluation may need more than a step."""
        self.loss = "loss"
        """Name of the minimized metric."""
        self.on_compile: Callable[[str], None] = lambda text: None
        """Callback that is called before a step is compiled, which takes a while."""
        self.rows: int | None = None
        """Rows of a full batch, if known. A step is not compiled for smaller batches."""
        self.group: ProcessGroup = Alone()
        """Processes that train together."""
        self.is_sharded = False
        """True if this process has shards of the state. Then reading the state is collective."""
        self._takes_tensors = False
        """True if a batch may hold tensors of another framework, on a device."""
        self._carried = {state.name: state.value for state in carried_state(self._one.model, self._one.index)}

    @property
    def batches(self) -> int:
        """Number of batches per call of `step`: the runs of the most frequent step of a round."""
        return self._one.batches

    @property
    def of_a_batch(self) -> dict[str, ir.Value]:
        """Inputs of one batch, if a step takes several batches."""
        others = {input_of_run(name, number) for name in self.inputs for number in range(1, self.batches)}
        return {name: value for name, value in self.inputs.items() if name not in others}

    def states(self) -> list[State]:
        """Return the roles and values of the state as loaded from the file."""
        return states(self._one.model, self._one.index)

    @abstractmethod
    def step(self, batch: Arrays | Sequence[Arrays]) -> Arrays:
        """Update the state by a batch and return the metrics. Keep the state if the loss is not
        finite, unless the step has a dynamic loss scale, which shrinks.

        If a step runs several times in a round, pass a list of that many batches.
        """

    @abstractmethod
    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        """Return the gradient of the loss by each parameter. Keep the state."""

    @abstractmethod
    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        """Return metrics and outputs of the model for a batch, in inference mode. Keep the state."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the state."""

    @abstractmethod
    def load_state(self, state: Arrays) -> None:
        """Replace the named tensors of the state."""

    def reset(self) -> None:
        """Reset the state to the file, then run its initializations. The result is the same on every engine."""
        from onward.engines.initialization import start_over

        fresh = start_over(self.model)
        self.load_state({name: fresh.array(*self._origin(name)) for name in self._carried})

    @abstractmethod
    def close(self) -> None:
        """Free memory and devices."""

    def _refuse_state_unless(self, is_held: Callable[[ir.DataType], bool], holder: str) -> None:
        for name, value in self._carried.items():
            tensor = value.const_value
            assert tensor is not None
            if not is_held(tensor.dtype):
                raise UnsupportedError(
                    f"{holder} cannot hold `{name}`, a state of type {str(tensor.dtype).lower()}",
                    hint='use `engine="numpy"` (`--engine numpy`)',
                )

    def _fitting(self, batch: Arrays | Sequence[Arrays], names: Collection[str]) -> dict[str, Any]:
        """Return the named inputs of a batch. Raise if they do not fit the model."""
        batch = batch if isinstance(batch, Mapping) else join_batches(_as_batches(batch))
        declared = self._declared | self.inputs
        arrays = {name: _array(array) for name, array in batch.items() if name not in declared or name in names}
        check_names(arrays, names)
        arrays |= {name: _widened(arrays[name], declared[name].dtype) for name in names}
        _raise_misfits(
            "batch", (self._misfit(name, arrays[name], declared[name].dtype, declared[name].shape) for name in names)
        )
        shapes = [arrays[name].shape for name in names if arrays[name].shape]
        if shapes and all(0 in shape for shape in shapes):  # some runtimes return 0 as the mean; others crash
            raise DataError("the batch has no rows", hint="leave out empty batches")
        return arrays

    def _fitting_state(self, state: Arrays) -> dict[str, Any]:
        """Return named tensors of the state as arrays. Raise if they do not fit the model."""
        misfits = []
        arrays = {name: _array(array) for name, array in state.items()}
        for name, array in arrays.items():
            if name not in self._carried:
                raise UnknownNameError(f"the model has no state `{name}`", hint=suggest(name, self._carried))
            tensor = self._carried[name].const_value
            assert tensor is not None
            misfits.append(self._misfit(name, array, tensor.dtype, ir.Shape(tensor.shape.numpy())))
        _raise_misfits("state", misfits)
        return arrays

    def _misfit(self, name: str, array: Any, dtype: ir.DataType | None, shape: ir.Shape | None) -> str | None:
        return misfit(name, array, dtype, shape, self._takes_tensors)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Model | None]:
        """Yield the training model with the current state, to be written inside the context.

        Yield None in a process that only sends its shards to the first process.
        """
        yield self.updated()

    def shards(self) -> dict[str, StateShard] | None:
        """Return the state shards that this process writes. Every element is in the shards of one
        process.

        Return None if the state is not sharded into consecutive elements. Then use `snapshot`.
        """
        return None

    def find_not_finite(self) -> str | None:
        """Return the name of a weight that is NaN or infinite in any process, or None."""
        learned = {state.name for state in self.states() if state.role in ("parameter", "statistics")}
        return next((n for n, array in self.state().items() if n in learned and not np.isfinite(array).all()), None)

    def updated(self) -> Model:
        """Return a copy of the training model with the current state."""
        model = self.model.copy()
        for name, array in self.state().items():
            original, step = self._origin(name)
            model.set(original, array, step)
        return model

    def with_state(self, hold: Callable[[str, ir.TensorProtocol], ir.TensorProtocol]) -> Model:
        """Return a copy of the training model whose state tensors are `hold(name, tensor)`."""
        model = self.model.copy()
        for name in self._carried:
            value = model.initializer(*self._origin(name))
            assert value.const_value is not None
            value.const_value = hold(name, value.const_value)
        return model

    def _origin(self, name: str) -> tuple[str, int]:
        """Return the name of a state tensor in the file, and the index of its step."""
        step, original = self._one.origins.get(name, (self._one.index, name))
        return original, step

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_options(engine: str, options: Iterable[str], factory: Callable[..., Any]) -> None:
    """Raise if the function or class that makes an engine does not take these options."""
    parameters = inspect.signature(factory).parameters.values()
    accepted = [p.name for p in parameters if p.name not in ("model", "step") and p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in accepted:
            hint = suggest(name, accepted) or (f"it has {', '.join(accepted)}" if accepted else None)
            if name in ("precision", "deterministic"):
                hint = 'torch, jax and tensorflow have it: `engine="torch"` (`--engine torch`)'
            raise UnsupportedError(f"the engine `{engine}` has no option `{name}`", hint=hint)


def check_names(batch: Collection[str], inputs: Collection[str], defaults: Collection[str] = ()) -> None:
    """Raise if inputs are missing, or names are neither inputs nor inputs with a default."""
    missing = [name for name in inputs if name not in batch]
    unknown = [name for name in batch if name not in inputs and name not in defaults]
    if missing or unknown:
        lines = [f"`{name}` is missing" for name in missing] + [f"`{name}` is not an input" for name in unknown]
        hint = suggest(unknown[0], inputs) if unknown else None
        raise UnknownNameError(
            "the batch does not fit the model: " + ", ".join(lines), hint=hint or f"it takes {', '.join(inputs)}"
        )


def fitting_inputs(
    arrays: Any, inputs: Mapping[str, ir.Value], defaults: Mapping[str, ir.Value], takes_tensors: bool
) -> dict[str, Any]:
    """Return the inputs of a graph as arrays, lists of arrays and None. Raise if they do not fit it."""
    if not isinstance(arrays, Mapping):
        raise DataError(
            f"the inputs are {type(arrays).__name__}, not arrays by name", hint=f"it takes {', '.join(inputs)}"
        )
    check_names(arrays, inputs, defaults)
    values = {name: _array(value) for name, value in arrays.items()}
    declared = {**defaults, **inputs}
    _raise_misfits("inputs", (_input_misfit(declared[name], x, takes_tensors) for name, x in values.items()))
    return values


def _widened(array: Any, dtype: ir.DataType | None) -> Any:
    """Cast integers, such as int32 labels, to a type that holds all of them."""
    if not isinstance(array, np.ndarray) or dtype is None or not dtype.is_integer() or array.dtype.kind not in "iu":
        return array
    wide = dtype.numpy()
    return array.astype(wide) if array.dtype != wide and np.can_cast(array.dtype, wide) else array


def _raise_misfits(subject: str, misfits: Iterable[str | None]) -> None:
    if reasons := "; ".join(filter(None, misfits)):
        raise DataError(f"the {subject} {'do' if subject == 'inputs' else 'does'} not fit the model: {reasons}")


def _as_batches(batch: Any) -> Sequence[Arrays]:
    if isinstance(batch, list | tuple) and all(isinstance(arrays, Mapping) for arrays in batch):
        return batch
    raise DataError(
        f"the batch is {type(batch).__name__}, not arrays by name",
        hint='pass a dict: `{"image": images, "labels": labels}`',
    )


def _input_misfit(declared: ir.Value, value: Any, takes_tensors: bool) -> str | None:
    """Return an error text if a tensor or a sequence of tensors does not fit an input, else None."""
    name = declared.name or ""
    if isinstance(declared.type, ir.TensorType):
        return misfit(name, value, declared.dtype, declared.shape, takes_tensors)
    if isinstance(declared.type, ir.SequenceType):
        if not isinstance(value, list):
            return f"`{name}` is {type(value).__name__}, not a list of arrays"
        misfits = (
            misfit(f"{name}[{i}]", _array(item), declared.dtype, None, takes_tensors) for i, item in enumerate(value)
        )
        return next(filter(None, misfits), None)
    return None


def misfit(
    name: str, array: Any, dtype: ir.DataType | None, shape: ir.Shape | None, takes_tensors: bool = False
) -> str | None:
    """Return an error text if an array does not have this type and shape, else None."""
    if not isinstance(array, np.ndarray) and not (takes_tensors and hasattr(array, "__dlpack__")):
        return f"`{name}` is {type(array).__name__}, not an array in CPU memory"
    expected = dtype.numpy() if dtype is not None else None
    if (
        expected is not None
        and isinstance(array, np.ndarray)
        and not (array.dtype == expected or (expected.kind == "O" and array.dtype.kind in "US"))
    ):
        return f"`{name}` is {array.dtype}, not {expected}"  # for a tensor on a device, the framework raises
    if shape is None:
        return None
    fits = len(shape) == len(array.shape) and all(
        not isinstance(size, int) or size == length for size, length in zip(shape, array.shape, strict=True)
    )
    return None if fits else f"`{name}` has the shape {list(array.shape)}, not {_show_shape(shape)}"


_HOST_DEVICES = (1, 3, 11)
"""DLPack device types in host memory: kDLCPU, kDLCUDAHost (pinned) and kDLROCMHost."""


def _array(value: Any) -> Any:
    """Return a value as an array without a copy. A tensor on another device is returned unchanged."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
        return np.asarray(value) if isinstance(value, np.generic) else value
    if value.__dlpack_device__()[0] not in _HOST_DEVICES:
        return value
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # another device, a type that numpy lacks, or a variable
        return value


def _show_shape(shape: ir.Shape) -> str:
    return "[" + ", ".join(str(size) if isinstance(size, int) else str(size.value or "?") for size in shape) + "]"
