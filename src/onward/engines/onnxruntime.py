"""Training on stock ONNX Runtime, as one plain graph per step.

The state lives in two sets of buffers on the device. A step reads one set and writes the other, and they change places:
a buffer that is bound as input and output at once may be overwritten while other nodes still read it. Where native
kernels make the updates, and come last, one buffer is in both sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onward.differentiate.recompute import Choice
from onward.engines.distributed import copies_of, join_group
from onward.engines.engine import Arrays, Engine, Results
from onward.engines.narrow_types import wide, widen_edges
from onward.engines.step_errors import memory_of
from onward.errors import DataError, UnsupportedError
from onward.kernels import PASSES, library, update_in_place
from onward.lowering.contract import contract_of
from onward.lowering.data_parallel import DataParallel
from onward.lowering.rounds import Steps
from onward.lowering.runtime import for_onnxruntime, widen
from onward.lowering.segments import cut, cut_after_text
from onward.lowering.step import Lowering, LoweringOptions
from onward.model import Model
from onward.model.storage.tensor_places import let_go
from onward.options import Parallel
from onward.runtime.composite_sessions import SegmentedSession, TextSession
from onward.runtime.devices import WITH_MEMORY, has_loops, is_text, providers_of, runner, to_array, write_buffer
from onward.runtime.sessions import contiguous, explain_failures, open_session
from onward.standard import OLDEST_LOADED
from onward.transform.opset import of_one_opset
from onward.transform.types import fill_in_types_before


class OnnxRuntime(Engine):
    def __init__(
        self,
        model: Model,
        step: Steps = None,
        *,
        device: str = "cpu",
        threads: int | None = None,
        recompute: Choice = None,
        strategy: Parallel | None = None,
        sync_batch_norm: bool = True,
        kernels: bool = True,
    ):
        super().__init__(model, step)
        if strategy not in (None, "ddp"):
            raise UnsupportedError(
                f"ONNX Runtime has no strategy `{strategy}`: each process has all of the model",
                hint='take PyTorch: `engine="torch"` (`--engine torch`)',
            )
        self.group = join_group() if strategy is not None else self.group
        self._refuse_state_unless(lambda dtype: dtype != ir.DataType.STRING, "ONNX Runtime")
        self._threads = threads or self.group.threads
        self._library = library().path if kernels and device == "cpu" else None
        share = DataParallel(self.group.rank, self.group.size, sync_batch_norm)
        passes = PASSES if self._library is not None else None
        self._lowering = Lowering(model, step, LoweringOptions(recompute, data_parallel=share, passes=passes))
        self._call = runner(self._one.model)
        self._providers = providers_of(device)
        self._memory = WITH_MEMORY.get(device, "cpu")
        made = self._lowering.part()
        contract = contract_of(made)
        self.inputs = {v.name: v for v in made.graph.inputs if v.name is not None and v.name in contract.batch}
        self._metrics: list[str] = contract.metrics
        self.loss = contract.loss or self.loss
        in_place = self._write_in_place(made)
        self._step = self._session(made)
        self._evaluation: ort.InferenceSession | None = None
        self._gradients: tuple[ort.InferenceSession | None, dict[str, str]] | None = None
        self._read = {name: self._buffer(value, fill=True) for name, value in self._carried.items()}
        let_go()  # of files that state was copied from
        bindings: dict[str, str] = contract.update
        written = {
            s.name: self._buffer(s.value) for s in self.states() if s.name in bindings and s.name not in in_place
        }
        self._write = {**self._read, **written}
        turns = [(self._read, self._write), (self._write, self._read)]
        self._bound = [self._binding(self._step, bindings, *turn) for turn in turns] if self._step else []

    def step(self, batch: Arrays | Sequence[Arrays]) -> dict[str, np.ndarray]:
        given = self._fitting(batch, self.inputs)
        if self._step is None:
            return {}
        self.group.copies = copies_of(batch if isinstance(batch, Mapping) else batch[0], self.group)
        session, binding = self._step, self._bound[0]
        for name, array in given.items():
            if array.dtype.isbuiltin == 1 or is_text(array):
                binding.bind_cpu_input(name, np.ascontiguousarray(array) if array.ndim else array)
            else:
                binding.bind_ortvalue_input(name, self._given(name, array))
        with memory_of("ONNX Runtime"), explain_failures(DataError, "could not make a step with this batch"):
            self._call(lambda options: session.run_with_iobinding(binding, options))
        results = zip(self._metrics, binding.get_outputs(), strict=False)
        metrics = Results({name: np.array(to_array(value)) for name, value in results})  # the next step writes again
        if np.all(np.isfinite(metrics.get(self.loss, 0.0))):  # else what was written is not taken
            self._bound.reverse()
            self._read, self._write = self._write, self._read
        return metrics

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        if self._gradients is None:
            made = self._lowering.part("gradients")
            self._gradients = self._session(made), contract_of(made).gradients
        session, names = self._gradients
        results = self._run(session, batch, list(names))
        return Results({parameter: results[name] for name, parameter in names.items()})

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        if self._evaluation is None:
            self._evaluation = self._session(self._lowering.part("evaluation"))
        session = self._evaluation
        return self._run(session, batch, [value.name for value in session.get_outputs()] if session else [])

    def _run(self, session: ort.InferenceSession | None, batch: Arrays, outputs: list[str]) -> dict[str, np.ndarray]:
        """What a session computes from a batch and the state; it may take less than a step does."""
        if session is None or not outputs:
            return {}
        names = [value.name for value in session.get_inputs()]
        self.group.copies = copies_of(batch, self.group)
        given = self._fitting(batch, [name for name in names if name not in self._read])
        feeds = {name: self._read[name] if name in self._read else self._given(name, given[name]) for name in names}
        with explain_failures(DataError, "could not compute anything from this batch"):
            results = self._call(lambda options: session.run_with_ort_values(outputs, feeds, options))
        return Results({name: np.asarray(to_array(value)) for name, value in zip(outputs, results, strict=True)})

    def _given(self, name: str, array: np.ndarray) -> ort.OrtValue | np.ndarray:
        """An input of a batch; of types that numpy itself does not have, the number is told. Text stays as it is."""
        if is_text(array):
            return array
        if array.dtype.isbuiltin == 1:
            return ort.OrtValue.ortvalue_from_numpy(contiguous(array))
        dtype = (self._declared | self.inputs)[name].dtype
        assert dtype is not None
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous(array), dtype.value)

    def state(self) -> dict[str, np.ndarray]:
        return Results({name: np.array(to_array(value)) for name, value in self._read.items()})

    def load_state(self, state: Arrays) -> None:
        for name, array in self._fitting_state(state).items():
            write_buffer(self._read[name], array)

    def close(self) -> None:
        self._bound.clear()
        self._read.clear()
        self._write.clear()

    def _write_in_place(self, step: Model) -> set[str]:
        """The state that needs no second buffer: none where a step may be stopped in its midst, or is cut."""
        if self._library is None or self.group.size > 1 or has_loops(step):
            return set()
        return update_in_place(step, contract_of(step).update, self.loss)

    def _session(self, model: Model) -> Any:
        """None for what computes nothing, which ONNX Runtime does not load."""
        if not model.graph.outputs:
            return None
        if (parts := cut_after_text(model)) is not None:
            return TextSession(*parts, self._session)
        if self.group.size > 1:
            inputs, outputs = ([value.name or "" for value in values] for values in (model.inputs, model.outputs))
            segments = cut(model)
            sessions = [self._plain_session(part.model) if part.model.graph.outputs else None for part in segments]
            return SegmentedSession(sessions, [part.exchanged for part in segments], inputs, outputs, self.group)
        return self._plain_session(model)

    def _plain_session(self, model: Model) -> ort.InferenceSession:
        if self._memory == "cpu":
            widen(model, ir.DataType.BFLOAT16)
        model = for_onnxruntime(model)
        optimize = not _has_many_small_nodes(model.graph, self._carried.values())
        return open_session(
            model,
            threads=self._threads,
            providers=self._providers,
            optimize=optimize,
            integers=False,  # gradients are of what the file says, in floating-point numbers
            library=self._library,
        )

    def _buffer(self, value: ir.Value, *, fill: bool = False) -> ort.OrtValue:
        """Memory of ONNX Runtime's own: what is backed by numpy would go with the array."""
        tensor = value.const_value
        assert tensor is not None
        shape = list(tensor.shape.numpy())
        buffer = ort.OrtValue.ortvalue_from_shape_and_type(shape, tensor.dtype.value, self._memory)
        if fill:
            write_buffer(buffer, tensor.numpy())
        return buffer

    def _binding(
        self, step: ort.InferenceSession, bindings: dict[str, str], read: dict[str, Any], write: dict[str, Any]
    ) -> ort.IOBinding:
        binding = step.io_binding()
        known = {value.name for value in step.get_inputs()}
        for name, buffer in read.items():
            if name in known:
                binding.bind_ortvalue_input(name, buffer)
        for name in self._metrics:
            binding.bind_output(name, "cpu")
        for name, new in bindings.items():
            binding.bind_ortvalue_output(new, write[name])
        return binding


def array_function(
    model: Model, *, device: str = "cpu", threads: int | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The graph of a model as a function of arrays, lists of arrays and None, by name."""
    providers = providers_of(device)
    call = runner(model)
    model = of_one_opset(model, OLDEST_LOADED).copy(steps=False)
    names = [value.name or "" for value in model.outputs]
    narrow = widen_edges(model)
    if device == "cpu" and _has_bfloat16(model):
        fill_in_types_before(model, model.graph.outputs)
        widen(model, ir.DataType.BFLOAT16)
    session = open_session(for_onnxruntime(model), threads=threads, providers=providers)

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: wide(value) for name, value in inputs.items()}
        with explain_failures(DataError, "could not compute anything from these inputs"):
            results = call(lambda options: session.run(None, given, options))
        typed = (x if dtype is None else x.astype(dtype) for x, dtype in zip(results, narrow, strict=True))
        return Results(zip(names, typed, strict=True))

    return run


def _has_bfloat16(model: Model) -> bool:
    types = ([*node.inputs, *node.outputs] for node in model.graph.all_nodes())
    return any(value.dtype == ir.DataType.BFLOAT16 for values in types for value in values if value is not None)


_MANY_NODES = 5_000
_SMALL = 1_000


def _has_many_small_nodes(graph: ir.Graph, weights: Iterable[ir.Value]) -> bool:
    """Whether ONNX Runtime would take longer to optimize a graph than is ever won.

    The time grows with the square of the nodes: half a minute for 20,000. Lowering has shortened them already; what is
    left to win is in large products and convolutions.
    """
    numbers = sum(value.const_value.size for value in weights if value.const_value is not None)
    return len(graph) > _MANY_NODES and numbers < _SMALL * len(graph)
