"""Compilation of a whole training step by TorchInductor: forward pass, derivative and update.

The interpreter runs once per set of batch shapes, with fake tensors. It is traced as one graph,
which overwrites the state. On a GPU, a CUDA graph launches all kernels at once.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import clear_caches
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onward.engines.torch.repeated_updates import RepeatedUpdates, is_view, split_off_updates
from onward.engines.torch.types import SAME_BITS
from onward.errors import UnsupportedError, first_line

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, dict[str, Any]]]
Report = Callable[[str], None]


class CompiledStep:
    """A step that is compiled at the first call with each set of shapes."""

    def __init__(self, step: Step, report: Report | None):
        self._step = step
        self._report = report or (lambda text: None)
        self._versions: dict[Any, Step] = {}
        self._pool: list[Any] = []

    def __call__(self, state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        if not (state or constants or batch):  # nothing to trace
            return self._step(state, constants, batch)
        batch = {name: tensor.contiguous() for name, tensor in batch.items()}
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        if shapes not in self._versions:
            self._versions[shapes] = self._compiled(state, constants, batch)
        return self._versions[shapes](state, constants, batch)

    def _compiled(self, state: Tensors, constants: Tensors, batch: Tensors) -> Step:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        subject = f"the step for {shown}" if shown else "the step"
        self._report(f"torch compiles {subject}: up to minutes the first time, then seconds")
        try:
            compiled, device = self._built(state, constants, batch)
        except (UnsupportedError, ImportError, OSError, InductorError) as error:
            warnings.warn(f"the step is not compiled: {first_line(error)}", stacklevel=3)
            return self._step
        return _Replayed(compiled, self._pool) if device.type == "cuda" else compiled

    def _built(self, *tensors: Tensors) -> tuple[Step, torch.device]:
        while True:
            try:
                traced = _Traced(self._step, *tensors)
                return traced.compiled(), traced.device
            except (ImportError, OSError, InductorError) as error:
                if not _is_torn_library(error):
                    raise


def _is_torn_library(error: Exception) -> bool:
    """Delete a compiled library that cannot be loaded, and return True. A killed compiler leaves empty files."""
    match = re.search(r"(\S+\.(?:so|dylib|pyd)): ", str(error))
    library = Path(match[1]) if match else None
    if library is None or not library.is_relative_to(cache_dir()) or not library.exists():
        return False
    library.unlink()
    clear_caches()
    return True


class _Traced:
    """A step as a graph of PyTorch's operators."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors):
        self._inputs = _as_signed(*state.values(), *constants.values(), *batch.values())
        self.device = self._inputs[0].device
        self._in_half = _updates_in_half(state)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            remaining = iter(tensors)
            arguments = [
                {name: next(remaining).view(x.dtype) for name, x in group.items()}
                for group in (state, constants, batch)
            ]
            new, results = step(*arguments)
            self._static = {name: value for name, value in results.items() if not torch.is_tensor(value)}
            shown = {name: value.clone() for name, value in results.items() if name not in self._static}
            self._shown = [(name, value.dtype) for name, value in shown.items()]
            for name, old in zip(state, tensors, strict=False):
                if name in new and new[name] is not arguments[0][name]:
                    old.copy_(*_as_signed(new[name]))
            return _as_signed(*shown.values())

        with enable_python_dispatcher():  # decomposes operators for the compiler
            self._graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._inputs)
        _merge_views(self._graph)
        _return_copies(self._graph)

    def compiled(self) -> Step:
        numbers = _split_off_numbers(self._graph)
        updates = split_off_updates(self._graph) if self.device.type == "cpu" else RepeatedUpdates([], [], 0)
        with config.patch(emulate_precision_casts=self._in_half):
            first = _compiled(numbers)
            call = _compiled(self._graph)
            groups = [(_compiled(group.graph), group.calls) for group in updates.groups]
        shown, static = self._shown, self._static

        def run(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
            inputs = _as_signed(*state.values(), *constants.values(), *batch.values())
            inputs += first(*inputs)
            outputs = call(*inputs)
            if groups:
                tensors = [*inputs, *updates.constants, *outputs[len(outputs) - updates.extra_outputs :]]
                for update, calls in groups:
                    for indices in calls:
                        update(*[tensors[i] for i in indices])
            return {}, static | {name: x.view(dtype) for (name, dtype), x in zip(shown, outputs, strict=False)}

        return run


def _compiled(graph: fx.GraphModule) -> Callable[..., list[torch.Tensor]]:
    """Compile a graph, or load it from the disk cache of the compiler."""
    # The compiler uses its disk cache only with a ShapeEnv, although all sizes are static here.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = (node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
    with mode:
        examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
    with tracing(TracingContext(mode)):
        compiled: Callable[..., list[torch.Tensor]] = compile_fx(graph, examples, ignore_shape_env=True)
    return compiled


def _updates_in_half(state: Tensors) -> bool:
    """True if an optimizer has state in 16 bits. Its casts round, and the compiler must not drop them."""
    halves = (name for name, tensor in state.items() if tensor.dtype in (torch.float16, torch.bfloat16))
    return any(name.rpartition("/")[0] in state for name in halves)


class _Replayed:
    """A compiled step that is recorded as a CUDA graph after a few calls. The first calls do
    one-time setup.

    Steps with the same memory pool share memory for intermediate results.
    """

    def __init__(self, step: Step, pool: list[Any]):
        self._step = step
        self._pool = pool
        self._calls = 0
        self._recording: _Recording | None = None

    def __call__(self, state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        if self._recording is None and self._calls == _PLAIN_CALLS:
            self._recording = self._record(state, constants, batch)
        self._calls += 1
        if self._recording is None:
            return self._step(state, constants, batch)
        return self._recording(state, batch)

    def _record(self, state: Tensors, constants: Tensors, batch: Tensors) -> _Recording | None:
        torch.cuda.empty_cache()  # the graph has its own memory, so free the memory of earlier calls
        try:
            recording = _Recording(self._step, state, constants, batch, self._pool[0] if self._pool else None)
        except RuntimeError as error:
            warnings.warn(f"the step runs without a CUDA graph: {error}", stacklevel=5)
            return None
        self._pool[:] = [recording.pool]
        return recording


_PLAIN_CALLS = 2
"""Calls before the recording."""


class _Recording:
    """A CUDA graph of a step, which reads and writes the memory of one state and one batch."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors, pool: Any):
        self._state = dict(state)
        self._constants = constants  # keeps memory alive that the graph reads
        self._batch = {name: tensor.clone() for name, tensor in batch.items()}
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            _, self._results = step(self._state, constants, self._batch)
        self.pool = self._graph.pool()

    def __call__(self, state: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        for name, tensor in batch.items():
            self._batch[name].copy_(tensor)
        moved = {name: self._state[name].copy_(x) for name, x in state.items() if x is not self._state[name]}
        self._graph.replay()
        return moved, {name: x.clone() if torch.is_tensor(x) else x for name, x in self._results.items()}


def _as_signed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors as types that the compiler supports: uint32 as int32, float8 as int8."""
    return [tensor.view(SAME_BITS[tensor.dtype]) if tensor.dtype in SAME_BITS else tensor for tensor in tensors]


def _merge_views(graph: fx.GraphModule) -> None:
    """Remove aliases and pairs of type views that cancel: the compiler lacks their types."""
    as_type, names = torch.ops.aten.view.dtype, (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
    types: dict[fx.Node, torch.dtype] = {}
    for node in graph.graph.nodes:
        if node.target in names:
            node.replace_all_uses_with(node.args[0])
        elif node.op == "get_attr":
            (constant,) = _as_signed(getattr(graph, node.target))
            setattr(graph, node.target, constant)
            types[node] = constant.dtype
        elif node.target is as_type:
            source = node.args[0]
            while source.target is as_type:
                source = source.args[0]
            node.args = (source, node.args[1])
            if (types.get(source) or source.meta["val"].dtype) == node.args[1]:
                node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _return_copies(graph: fx.GraphModule) -> None:
    """Return copies of state, too. The compiler would drop a copy of a written input and keep an alias."""
    writes = [node for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {node.args[0] for node in writes}
    copies = [node.args[1] for node in writes if _source(node.args[1]) in written]
    *_, last = graph.graph.nodes
    last.args = ([*last.args[0], *copies],)
    graph.recompile()


def _source(node: fx.Node) -> fx.Node:
    """Return the node that a node is a clone or a view of."""
    while node.target is torch.ops.aten.clone.default or is_view(node):
        node = node.args[0]
    return node


def _split_off_numbers(graph: fx.GraphModule) -> fx.GraphModule:
    """Move the computation of scalars (learning rates, corrections of moments) to a separate graph.

    The original graph takes them as extra inputs. Its kernels would compute them again for every
    element.
    """
    numbers: list[fx.Node] = []
    of_numbers: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _is_number(graph, node) and all(source in of_numbers for source in node.all_input_nodes):
            of_numbers.add(node)
            if node.op == "call_function" and not is_view(node):
                numbers.append(node)
    read = [node for node in numbers if any(user not in of_numbers or is_view(user) for user in node.users)]
    first = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in of_numbers:
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output([copies[node] for node in read])
    *_, last = (node for node in graph.graph.nodes if node.op == "placeholder")
    for i, node in enumerate(read):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"number_{i}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    scalars = fx.GraphModule(graph, first)
    scalars.graph.eliminate_dead_code()
    scalars.recompile()
    return scalars


def _is_number(graph: fx.GraphModule, node: fx.Node) -> bool:
    value = getattr(graph, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not mutable


# ---- recordings of the operators that a function calls ---------------------------------------------------------------

# The interpreter chooses device and function for every value. For inputs of the same sizes the
# choices are the same, so one recording, traced before autograd (`pre_dispatch`), replaces the
# later calls.

Run = Callable[[Sequence[Any]], Sequence[Any]]
_MOST = 16
"""Limit of recordings per function, for inputs whose sizes always change."""


class Recording:
    """A function as a graph of PyTorch's operators, which may be compiled; arrays are constants of the graph."""

    def __init__(self, run: Run, values: Sequence[Any], compile: Callable[[fx.GraphModule], Any] = lambda graph: graph):
        self._static: dict[int, Any] = {}
        self._indices = [i for i, value in enumerate(values) if torch.is_tensor(value)]

        def recorded(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = run(list({**dict(enumerate(values)), **dict(zip(self._indices, tensors, strict=True))}.values()))
            if any(isinstance(result, list) for result in results):
                raise UnsupportedError("sequences of tensors are not recorded", hint="run without compiling")
            self._count = len(results)
            self._static = {i: result for i, result in enumerate(results) if not torch.is_tensor(result)}
            return [result for result in results if torch.is_tensor(result)]

        examples = [values[i].detach().requires_grad_(values[i].requires_grad) for i in self._indices]
        record = make_fx(recorded, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        # Hides the tensors saved by tracing from outer hooks, which may count saved memory.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            self._call = compile(record(*examples))

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        results = iter(self._call(*(values[i] for i in self._indices)))
        return [self._static[i] if i in self._static else next(results) for i in range(self._count)]


class Recorded:
    """A function that is recorded for each set of sizes, if it depends only on them."""

    def __init__(self, run: Run):
        self._run = run
        self._versions: dict[Any, Run] = {}

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        if not all(map(_is_plain, values)):
            return self._run(values)
        key = torch.is_grad_enabled(), *kinds_of(values)
        if key not in self._versions:
            if len(self._versions) == _MOST:
                return self._run(values)
            self._versions[key] = self._recorded(values)
        return self._versions[key](values)

    def _recorded(self, values: Sequence[Any]) -> Run:
        try:
            return Recording(self._run, values)
        except RuntimeError:  # it depends on values, or it fails: then a plain call raises the better error
            return self._run


def _is_plain(value: Any) -> bool:
    """True for a plain tensor or array. Not for tensor subclasses, sequences and string arrays (pointers)."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray) and value.dtype != object


def kinds_of(values: Iterable[Any]) -> list[Any]:
    """Return the cache key of a recording: sizes and types of tensors, and the content of arrays."""
    return [(x.shape, x.dtype, x.device) if torch.is_tensor(x) else (x.shape, x.dtype.str, x.tobytes()) for x in values]
