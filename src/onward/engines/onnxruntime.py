"""Training on stock ONNX Runtime: one plain graph per step.

The state has two sets of buffers on the device. A step reads one set and writes the other, then the
sets are swapped: a buffer that is bound as input and output may be overwritten while other nodes
still read it. State that native kernels update in place, as the last nodes, has one buffer in both
sets.
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
from onward.model.storage.tensor_sites import let_go
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
                f"ONNX Runtime has no strategy `{strategy}`: each process has the full model",
                hint='use PyTorch: `engine="torch"` (`--engine torch`)',
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
        lowered = self._lowering.part()
        contract = contract_of(lowered)
        self.inputs = {v.name: v for v in lowered.graph.inputs if v.name is not None and v.name in contract.batch}
        self._metrics: list[str] = contract.metrics
        self.loss = contract.loss or self.loss
        self._skips = contract.skips_overflows
        in_place: set[str] = set()  # state without a second buffer
        # A step with loops may stop in its midst, and a step of several processes is cut into
        # segments.
        if self._library is not None and self.group.size == 1 and not has_loops(lowered) and not self._skips:
            in_place = update_in_place(lowered, contract.update, self.loss)
        self._step = self._session(lowered)
        self._evaluation: ort.InferenceSession | None = None
        self._gradients: tuple[ort.InferenceSession | None, dict[str, str]] | None = None
        self._read = {name: self._buffer(value, fill=True) for name, value in self._carried.items()}
        let_go()  # close the files that state was copied from
        bindings: dict[str, str] = contract.update
        written = {
            s.name: self._buffer(s.value) for s in self.states() if s.name in bindings and s.name not in in_place
        }
        self._write = {**self._read, **written}
        turns = [(self._read, self._write), (self._write, self._read)]
        self._bound = [self._binding(self._step, bindings, *turn) for turn in turns] if self._step else []

    def step(self, batch: Arrays | Sequence[Arrays]) -> dict[str, np.ndarray]:
        arrays = self._fitting(batch, self.inputs)
        if self._step is None:
            return {}
        self.group.copies = copies_of(batch if isinstance(batch, Mapping) else batch[0], self.group)
        session, binding = self._step, self._bound[0]
        for name, array in arrays.items():
            if array.dtype.isbuiltin == 1 or is_text(array):
                binding.bind_cpu_input(name, np.ascontiguousarray(array) if array.ndim else array)
            else:
                binding.bind_ortvalue_input(name, self._input(name, array))
        with memory_of("ONNX Runtime"), explain_failures(DataError, "could not make a step with this batch"):
            self._call(lambda options: session.run_with_iobinding(binding, options))
        results = zip(self._metrics, binding.get_outputs(), strict=False)
        metrics = Results({name: np.array(to_array(value)) for name, value in results})  # the next step overwrites them
        if self._skips or np.all(np.isfinite(metrics.get(self.loss, 0.0))):  # else the old state stays
            self._bound.reverse()
            self._read, self._write = self._write, self._read
        return metrics

    def gradients(self, batch: Arrays) -> dict[str, np.ndarray]:
        if self._gradients is None:
            lowered = self._lowering.part("gradients")
            self._gradients = self._session(lowered), contract_of(lowered).gradients
        session, names = self._gradients
        results = self._run(session, batch, list(names))
        return Results({parameter: results[name] for name, parameter in names.items()})

    def evaluate(self, batch: Arrays) -> dict[str, np.ndarray]:
        if self._evaluation is None:
            self._evaluation = self._session(self._lowering.part("evaluation"))
        session = self._evaluation
        return self._run(session, batch, [value.name for value in session.get_outputs()] if session else [])

    def _run(self, session: ort.InferenceSession | None, batch: Arrays, outputs: list[str]) -> dict[str, np.ndarray]:
        """Run a session with a batch and the state. It may need fewer inputs than a step."""
        if session is None or not outputs:
            return {}
        names = [value.name for value in session.get_inputs()]
        self.group.copies = copies_of(batch, self.group)
        arrays = self._fitting(batch, [name for name in names if name not in self._read])
        feeds = {name: self._read[name] if name in self._read else self._input(name, arrays[name]) for name in names}
        with explain_failures(DataError, "could not compute anything from this batch"):
            results = self._call(lambda options: session.run_with_ort_values(outputs, feeds, options))
        return Results({name: np.asarray(to_array(value)) for name, value in zip(outputs, results, strict=True)})

    def _input(self, name: str, array: np.ndarray) -> ort.OrtValue | np.ndarray:
        """Return an input for ONNX Runtime. A type that numpy lacks is passed by its number."""
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

    def _session(self, model: Model) -> Any:
        """Return a session, or None if the model has no outputs, which ONNX Runtime does not load."""
        if not model.graph.outputs:
            return None
        if (models := cut_after_text(model)) is not None:
            return TextSession(*models, self._session)
        if self.group.size > 1:
            inputs, outputs = ([value.name or "" for value in values] for values in (model.inputs, model.outputs))
            segments = cut(model)
            sessions = [self._plain_session(x.model) if x.model.graph.outputs else None for x in segments]
            return SegmentedSession(sessions, [x.exchanged for x in segments], inputs, outputs, self.group)
        return self._plain_session(model)

    def _plain_session(self, model: Model) -> ort.InferenceSession:
        if self._memory == "cpu":
            widen(model, ir.DataType.BFLOAT16)
        model = for_onnxruntime(model)
        optimize = not _has_many_small_nodes(model.graph, self._carried.values())
        try:
            return open_session(
                model,
                threads=self._threads,
                providers=self._providers,
                optimize=optimize,
                integers=False,  # as in the file: gradients need floats
                library=self._library,
            )
        except UnsupportedError as error:
            array_function(self._one.model)  # raises if the cause is in the model itself
            raise UnsupportedError(
                error.message.replace("does not run this model", "runs the model, but not the step that Onward made"),
                hint='choose another engine, such as `engine="torch"` (`--engine torch`), and report this bug',
            ) from error

    def _buffer(self, value: ir.Value, *, fill: bool = False) -> ort.OrtValue:
        """Allocate memory in ONNX Runtime. Memory of a numpy array would be freed with the array."""
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
        inputs = {value.name for value in step.get_inputs()}
        for name, buffer in read.items():
            if name in inputs:
                binding.bind_ortvalue_input(name, buffer)
        for name in self._metrics:
            binding.bind_output(name, "cpu")
        for name, new in bindings.items():
            binding.bind_ortvalue_output(new, write[name])
        return binding


def array_function(
    model: Model, *, device: str = "cpu", threads: int | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the graph of a model as a function of arrays, lists of arrays and None, by name."""
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
        feeds = {name: wide(value) for name, value in inputs.items()}
        with explain_failures(DataError, "could not compute anything from these inputs"):
            results = call(lambda options: session.run(None, feeds, options))
        typed = (x if dtype is None else x.astype(dtype) for x, dtype in zip(results, narrow, strict=True))
        return Results(zip(names, typed, strict=True))

    return run


def _has_bfloat16(model: Model) -> bool:
    types = ([*node.inputs, *node.outputs] for node in model.graph.all_nodes())
    return any(value.dtype == ir.DataType.BFLOAT16 for values in types for value in values if value is not None)


_MANY_NODES = 5_000
_SMALL = 1_000
"""Elements of the weights per node, on average."""


def _has_many_small_nodes(graph: ir.Graph, weights: Iterable[ir.Value]) -> bool:
    """True if ONNX Runtime would take longer to optimize a graph than it saves.

    The time grows with the square of the nodes: half a minute for 20,000. Lowering has simplified
    the graph already; the remaining gain is in large matmuls and convolutions.
    """
    numbers = sum(value.const_value.size for value in weights if value.const_value is not None)
    return len(graph) > _MANY_NODES and numbers < _SMALL * len(graph)
