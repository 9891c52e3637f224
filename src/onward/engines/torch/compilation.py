"""A training step compiled as a whole: forward, derivative and update, for TorchInductor.

The interpreter runs once for each set of batch shapes, with tensors that have only shapes, and what it does is
recorded as one graph, which writes the new state over the old. On a GPU its kernels are launched at once, by a CUDA
graph.
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

from onward.engines.torch.alike import Updates, is_view, split_off_updates
from onward.engines.torch.types import SAME_BITS
from onward.errors import UnsupportedError, first_line

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, dict[str, Any]]]
Report = Callable[[str], None]


class CompiledStep:
    """A step that is compiled when it is first called with tensors of some shapes."""

    def __init__(self, step: Step, report: Report | None):
        self._step = step
        self._report = report or (lambda text: None)
        self._versions: dict[Any, Step] = {}
        self._pool: list[Any] = []

    def __call__(self, state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        if not (state or constants or batch):  # there is nothing to compute with
            return self._step(state, constants, batch)
        batch = {name: tensor.contiguous() for name, tensor in batch.items()}
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        if shapes not in self._versions:
            self._versions[shapes] = self._compiled(state, constants, batch)
        return self._versions[shapes](state, constants, batch)

    def _compiled(self, state: Tensors, constants: Tensors, batch: Tensors) -> Step:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        what = f"the step for {shown}" if shown else "the step"
        self._report(f"torch compiles {what}: up to minutes the first time, then seconds")
        try:
            compiled, device = self._built(state, constants, batch)
        except (UnsupportedError, ImportError, OSError, InductorError) as error:
            warnings.warn(f"the step runs without being compiled: {first_line(error)}", stacklevel=3)
            return self._step
        return _Replayed(compiled, self._pool) if device.type == "cuda" else compiled

    def _built(self, *given: Tensors) -> tuple[Step, torch.device]:
        while True:
            try:
                traced = _Traced(self._step, *given)
                return traced.compiled(), traced.device
            except (ImportError, OSError, InductorError) as error:
                if not _is_torn_library(error):
                    raise


def _is_torn_library(error: Exception) -> bool:
    """Whether a library could not be loaded and is there no more: a compiler that was killed leaves empty ones."""
    found = re.search(r"(\S+\.(?:so|dylib|pyd)): ", str(error))
    library = Path(found[1]) if found else None
    if library is None or not library.is_relative_to(cache_dir()) or not library.exists():
        return False
    library.unlink()
    clear_caches()
    return True


class _Traced:
    """What a step does, as a graph of PyTorch's operators."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors):
        self._inputs = _as_signed(*state.values(), *constants.values(), *batch.values())
        self.device = self._inputs[0].device
        self._in_half = _updates_in_half(state)

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = iter(tensors)
            parts = [
                {name: next(given).view(x.dtype) for name, x in part.items()} for part in (state, constants, batch)
            ]
            new, results = step(*parts)
            self._known = {name: value for name, value in results.items() if not torch.is_tensor(value)}
            shown = {name: value.clone() for name, value in results.items() if name not in self._known}
            self._shown = [(name, value.dtype) for name, value in shown.items()]
            for name, old in zip(state, tensors, strict=False):
                if name in new and new[name] is not parts[0][name]:
                    old.copy_(*_as_signed(new[name]))
            return _as_signed(*shown.values())

        with enable_python_dispatcher():  # which takes operators apart as the compiler wants them
            self._graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._inputs)
        _merge_views(self._graph)
        _return_copies(self._graph)

    def compiled(self) -> Step:
        numbers = _split_off_numbers(self._graph)
        updates = split_off_updates(self._graph) if self.device.type == "cpu" else Updates([], [], 0)
        with config.patch(emulate_precision_casts=self._in_half):
            first = _compiled(numbers)
            call = _compiled(self._graph)
            alike = [(_compiled(kind.graph), kind.calls) for kind in updates.alike]
        shown, known = self._shown, self._known

        def run(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
            inputs = _as_signed(*state.values(), *constants.values(), *batch.values())
            inputs += first(*inputs)
            outputs = call(*inputs)
            if alike:
                at_hand = [*inputs, *updates.constants, *outputs[len(outputs) - updates.handed_over :]]
                for update, calls in alike:
                    for places in calls:
                        update(*[at_hand[place] for place in places])
            return {}, known | {name: x.view(dtype) for (name, dtype), x in zip(shown, outputs, strict=False)}

        return run


def _compiled(graph: fx.GraphModule) -> Callable[..., list[torch.Tensor]]:
    """What the compiler makes of a graph, from disk if it has compiled the same before, in whatever process.

    It looks there only where sizes could be unknown, as they may be for `torch.compile`. Here none is.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    given = (node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
    with mode:
        examples = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given]
    with tracing(TracingContext(mode)):
        made: Callable[..., list[torch.Tensor]] = compile_fx(graph, examples, ignore_shape_env=True)
    return made


def _updates_in_half(state: Tensors) -> bool:
    """Whether an optimizer keeps its state in 16 bits: it says where it rounds, and none of that is to be left out."""
    halves = (name for name, tensor in state.items() if tensor.dtype in (torch.float16, torch.bfloat16))
    return any(name.rpartition("/")[0] in state for name in halves)


class _Replayed:
    """A compiled step, recorded as a CUDA graph once it has run a few times, which sets up what may not be recorded.

    All that share a pool of memory use the same for what they compute on the way.
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
        torch.cuda.empty_cache()  # the graph has memory of its own, and what was used before it is free
        try:
            made = _Recording(self._step, state, constants, batch, self._pool[0] if self._pool else None)
        except RuntimeError as error:
            warnings.warn(f"the step runs without a CUDA graph: {error}", stacklevel=5)
            return None
        self._pool[:] = [made.pool]
        return made


_PLAIN_CALLS = 2


class _Recording:
    """A CUDA graph of a step, that reads and writes the memory of one state and one batch."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors, pool: Any):
        self._state = dict(state)
        self._constants = constants  # memory that is read must not be given back
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
    """As types that the compiler has: int32 in place of uint32, and the like."""
    return [tensor.view(SAME_BITS[tensor.dtype]) if tensor.dtype in SAME_BITS else tensor for tensor in tensors]


def _merge_views(graph: fx.GraphModule) -> None:
    """Let tensors that are taken as another type and back again be what they are, and constants what they are taken as.

    There is nothing but such views of types that the compiler lacks. What is only another name is left out.
    """
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
    """Return copies of what the step writes, too: the compiler leaves out others, and what is assigned would be new."""
    writes = [node for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {node.args[0] for node in writes}
    copies = [node.args[1] for node in writes if _source(node.args[1]) in written]
    *_, last = graph.graph.nodes
    last.args = ([*last.args[0], *copies],)
    graph.recompile()


def _source(node: fx.Node) -> fx.Node:
    """What a node is the same numbers as."""
    while node.target is torch.ops.aten.clone.default or is_view(node):
        node = node.args[0]
    return node


def _split_off_numbers(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of what is computed of single numbers alone: rates, corrections of moments, schedules.

    The given graph takes them as further inputs. Within a kernel they would be computed again for every element.
    """
    numbers: list[fx.Node] = []
    of_numbers: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _is_number(graph, node) and all(source in of_numbers for source in node.all_input_nodes):
            of_numbers.add(node)
            if node.op == "call_function" and not is_view(node):
                numbers.append(node)
    handed = [node for node in numbers if any(user not in of_numbers or is_view(user) for user in node.users)]
    first = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in of_numbers:
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output([copies[node] for node in handed])
    *_, last = (node for node in graph.graph.nodes if node.op == "placeholder")
    for i, node in enumerate(handed):
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"number_{i}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    made = fx.GraphModule(graph, first)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def _is_number(graph: fx.GraphModule, node: fx.Node) -> bool:
    value = getattr(graph, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not mutable


# ---- recordings of what a function calls -----------------------------------------------------------------------------

# The interpreter looks at every value to see where it is to be computed, and by what. For tensors of the same sizes
# that comes to the same each time, so that a recording of one time, made above the derivative, does for the others.

Run = Callable[[Sequence[Any]], Sequence[Any]]
_MOST = 16
"""Recordings of a function: where sizes are always others, these are enough."""


class Recording:
    """A function of tensors and arrays as a graph of PyTorch's operators, which may be compiled.

    The arrays are a part of it, and so are those among its results.
    """

    def __init__(self, run: Run, values: Sequence[Any], compile: Callable[[fx.GraphModule], Any] = lambda graph: graph):
        self._known: dict[int, Any] = {}
        self._places = [i for i, value in enumerate(values) if torch.is_tensor(value)]

        def recorded(*tensors: torch.Tensor) -> list[torch.Tensor]:
            results = run(list({**dict(enumerate(values)), **dict(zip(self._places, tensors, strict=True))}.values()))
            if any(isinstance(result, list) for result in results):
                raise UnsupportedError("sequences of tensors are not recorded", hint="run without compiling")
            self._count = len(results)
            self._known = {i: result for i, result in enumerate(results) if not torch.is_tensor(result)}
            return [result for result in results if torch.is_tensor(result)]

        given = [values[i].detach().requires_grad_(values[i].requires_grad) for i in self._places]
        record = make_fx(recorded, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        with saved_tensors_hooks(_same, _same):  # whoever counts what is kept for the derivative is not to count this
            self._call = compile(record(*given))

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        results = iter(self._call(*(values[i] for i in self._places)))
        return [self._known[i] if i in self._known else next(results) for i in range(self._count)]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Recorded:
    """A function that is recorded for each set of sizes, if it depends on no more than these."""

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
        except RuntimeError:  # it depends on values, too, or fails, which is better said by itself
            return self._run


def _is_plain(value: Any) -> bool:
    """Whether a value is no subclass of a tensor, no sequence, no array of texts, whose bytes are only addresses."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, np.ndarray) and value.dtype != object


def kinds_of(values: Iterable[Any]) -> list[Any]:
    """What a recording is for: tensors of these sizes and types, and these arrays."""
    return [(x.shape, x.dtype, x.device) if torch.is_tensor(x) else (x.shape, x.dtype.str, x.tobytes()) for x in values]
