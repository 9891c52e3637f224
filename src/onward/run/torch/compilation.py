"""A training step compiled as a whole: forward, derivative and update, for TorchInductor.

The interpreter runs once for each set of batch shapes, with tensors that have only shapes, and what it does is
recorded as one graph. That is parted in two where the derivative begins, as PyTorch's own compiler does it: what is
cheap is computed again for the derivative, rather than kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from onward.errors import UnsupportedError
from onward.run.torch.types import SAME_BITS

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, dict[str, Any]]]
Report = Callable[[str], None]

_seed: contextvars.ContextVar[torch.Tensor | None] = contextvars.ContextVar("_seed", default=None)


def seed(y: torch.Tensor) -> torch.Tensor:
    """Ones, of which derivatives are made. While a step is traced they are an input, to know what comes of them."""
    one = _seed.get()
    return torch.ones_like(y) if one is None else one.to(y.dtype).expand_as(y)


class Compiled:
    """A step that is compiled when it is first called with tensors of some shapes."""

    def __init__(self, step: Step, report: Report | None):
        self._step = step
        self._report = report or (lambda text: None)
        self._versions: dict[Any, Step] = {}

    def __call__(self, state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
        batch = {name: tensor.contiguous() for name, tensor in batch.items()}
        shapes = tuple((name, tensor.shape) for name, tensor in batch.items())
        if shapes not in self._versions:
            self._versions[shapes] = self._compiled(state, constants, batch)
        return self._versions[shapes](state, constants, batch)

    def _compiled(self, state: Tensors, constants: Tensors, batch: Tensors) -> Step:
        shown = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
        self._report(f"torch compiles the step for {shown}" if shown else "torch compiles the step")
        try:
            traced = _Traced(self._step, state, constants, batch)
        except UnsupportedError as error:
            warnings.warn(f"the step runs without being compiled: {error}", stacklevel=3)
            return self._step
        return traced.compiled()


class _Traced:
    """What a step does, as a graph of PyTorch's operators."""

    def __init__(self, step: Step, state: Tensors, constants: Tensors, batch: Tensors):
        self._inputs = _signed(*state.values(), *constants.values(), *batch.values())
        self._inputs.append(torch.ones((), device=self._inputs[0].device))

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = iter(tensors)
            parts = [
                {name: next(given).view(x.dtype) for name, x in part.items()} for part in (state, constants, batch)
            ]
            with _seeding(next(given)):
                new, results = step(*parts)
            self._known = {name: value for name, value in results.items() if not torch.is_tensor(value)}
            made = {("new", name): _plain(value) for name, value in new.items() if value is not parts[0].get(name)}
            made |= {("result", name): value for name, value in results.items() if name not in self._known}
            self._made = [(kind, name, value.dtype) for (kind, name), value in made.items()]
            return _signed(*made.values())

        table = dict(select_decomp_table())
        if self._inputs[0].device.type == "cpu":  # where pools are slow to compute again
            table.pop(torch.ops.aten.max_pool2d_with_indices.default, None)
        trace = make_fx(run, table, tracing_mode="fake", _allow_non_fake_inputs=True)
        self._graph = trace(*self._inputs)
        _merge_views(self._graph)

    def compiled(self) -> Step:
        call, order = self._parted()
        made, known, one = [self._made[i] for i in order], self._known, self._inputs[-1]

        def run(state: Tensors, constants: Tensors, batch: Tensors) -> tuple[Tensors, dict[str, Any]]:
            outputs = call(*_signed(*state.values(), *constants.values(), *batch.values()), one)
            new: Tensors = {}
            results = dict(known)
            for (kind, name, dtype), tensor in zip(made, outputs, strict=True):
                (new if kind == "new" else results)[name] = tensor.view(dtype)
            return new, results

        return run

    def _parted(self) -> tuple[Callable[..., list[torch.Tensor]], list[int]]:
        """A compiled function, and which of the outputs are those that it returns, in their order."""
        *others, one = (node for node in self._graph.graph.nodes if node.op == "placeholder")
        output = self._graph.graph.output_node()
        outputs = output.args[0]
        later = _reached(one)
        order = sorted(range(len(outputs)), key=lambda i: outputs[i] in later)
        early = sum(node not in later for node in outputs)
        if early == len(outputs):
            return compile_fx(self._graph, self._inputs), order
        output.args = ([outputs[i] for i in order],)
        one.name = one.target = "tangents_1"  # names by which the parts are found
        for i, node in enumerate(others, 1):
            node.name = node.target = f"primals_{i}"
        self._graph.recompile()
        forward, backward = min_cut_rematerialization_partition(self._graph, self._inputs, num_fwd_outputs=early)
        for part, count in (forward, early), (backward, len(outputs) - early):  # what else they hand on has any layout
            part.graph.output_node().meta["user_visible_output_idxs"] = range(count)
        first, second = _lazily(forward), _lazily(backward)

        def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
            made = list(first([*inputs[:-1]]))
            kept = [*made[early:], inputs[-1]]
            del made[early:]  # the second part lets go of what it has read
            return made + list(second(kept))

        return call, order


def _lazily(graph: fx.GraphModule) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Compiled for the inputs that come, whose layout is a matter of the compiler."""
    compiled: list[Callable[[list[torch.Tensor]], list[torch.Tensor]]] = []

    def call(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not compiled:
            compiled.append(compile_fx_inner(graph, list(inputs)))
        return compiled[0](inputs)

    return call


@contextlib.contextmanager
def _seeding(one: torch.Tensor) -> Iterator[None]:
    token = _seed.set(one)
    try:
        yield
    finally:
        _seed.reset(token)


def _signed(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As types that the compiler has: int32 in place of uint32, and the like."""
    return [tensor.view(SAME_BITS[tensor.dtype]) if tensor.dtype in SAME_BITS else tensor for tensor in tensors]


def _merge_views(graph: fx.GraphModule) -> None:
    """Let tensors that are taken as another type and back again be what they are, and constants what they are taken as.

    There is nothing but such views of types that the compiler lacks.
    """
    as_type, alias = torch.ops.aten.view.dtype, torch.ops.aten.alias.default
    types: dict[fx.Node, torch.dtype] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            (constant,) = _signed(getattr(graph, node.target))
            setattr(graph, node.target, constant)
            types[node] = constant.dtype
        elif node.target is as_type:
            source = node.args[0]
            while source.target in (as_type, alias):
                source = source.args[0]
            node.args = (source, node.args[1])
            if (types.get(source) or source.meta["val"].dtype) == node.args[1]:
                node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """In rows, whatever layout the compiler chooses: the next step takes no other."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.ndim > 2 else tensor


def _reached(node: fx.Node) -> set[fx.Node]:
    """All that is computed from a node."""
    found, pending = {node}, [node]
    while pending:
        fresh = [user for user in pending.pop().users if user not in found]
        found.update(fresh)
        pending += fresh
    return found
