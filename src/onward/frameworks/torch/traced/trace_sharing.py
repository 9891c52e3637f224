"""Traces of optimizers with many parameters: of those that are alike one is traced, and others are written after it.

A trace takes most of a second for each parameter. Whether they are treated alike, which need not be, a trial shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
from torch import Tensor
from torch.optim import Optimizer

from onward.build import twin
from onward.frameworks.torch.traced.optimizer_state import Leaves, Path, leaves_of, parameters_of
from onward.frameworks.torch.traced.trace import Trace, tensor_of, trace
from onward.model.walk import ancestors, descendants, nested_graphs

_FEW = 4
"""So many parameters are traced one by one."""


def traced_alike(optimizer: Optimizer, trained: Sequence[int]) -> Trace | None:
    """The trace of a step, if parameters do not depend on one another and many are alike."""
    leaves = leaves_of(optimizer)
    classes: dict[object, list[int]] = {}
    for i in trained:
        classes.setdefault(_kind(optimizer, leaves, i), []).append(i)
    first = sorted(members[0] for members in classes.values())
    if len(first) == 1:
        first = list(trained[:2])  # two, which might depend on one another
    if len(trained) <= max(_FEW, len(first)):
        return None
    few = trace(optimizer, first, among=trained)
    of = {i: members[0] for members in classes.values() for i in members}
    return _widen(few, trained, {i: i if i in first else of[i] for i in trained}, leaves)


def _kind(optimizer: Optimizer, leaves: Leaves, place: int) -> object:
    """What is equal for parameters that are alike."""
    parameter = parameters_of(optimizer)[place]
    group = next(i for i, group in enumerate(optimizer.param_groups) if any(parameter is p for p in group["params"]))
    state = [(path[2:], _form(leaf)) for path, leaf in leaves.items() if path[:2] == ("state", place)]
    return group, parameter.shape, parameter.dtype, tuple(state)


def _form(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)


def _widen(few: Trace, trained: Sequence[int], example: Mapping[int, int], leaves: Leaves) -> Trace | None:
    """The trace with what it has for an example written for all parameters that are like it; in place."""
    graph = few.model.graph
    inputs = dict(zip(few.places, graph.inputs, strict=True))
    outputs = dict(zip(few.results, graph.outputs, strict=True))
    own = {i: _own_nodes(i, few, inputs, outputs) for i in few.trained}
    if any(nodes is None for nodes in own.values()):
        return None
    names = few.model.names()
    for i in (i for i in trained if i not in few.trained):
        new: dict[ir.Value | None, ir.Value | None] = {None: None}
        for place, value in list(inputs.items()):
            if _owner(place) == example[i]:
                made = ir.Value(name=names.fresh("input"), type=value.type, shape=value.shape)
                inputs[_move_path(place, i)] = new[value] = made
        for node in own[example[i]] or ():
            copy = twin(node, [new.get(value, value) for value in node.inputs], names, "{}")
            graph.append(copy)
            new.update(zip(node.outputs, copy.outputs, strict=True))
        for place, value in list(outputs.items()):
            if _owner(place) == example[i]:
                outputs[_move_path(place, i)] = new.get(value) or value
    state: dict[Path, Tensor] = {}
    for i in trained:
        places = [place for place in few.state if _owner(place) == example[i]]
        state |= {_move_path(place, i): tensor_of(leaves[_move_path(place, i)]) for place in places}
    state |= {place: tensor for place, tensor in few.state.items() if _owner(place) is None}
    wide = Trace(few.model, list(trained), few.rates, state)
    graph.inputs[:] = [inputs[place] for place in wide.places]
    graph.outputs[:] = [outputs[place] for place in wide.results]
    return wide


def _owner(place: Path) -> int | None:
    """The parameter that something belongs to."""
    is_own = place[0] in ("parameter", "gradient") or (place[0] == "state" and isinstance(place[1], int))
    return place[1] if is_own else None


def _move_path(place: Path, parameter: int) -> Path:
    return (place[0], parameter, *place[2:])


def _own_nodes(
    parameter: int, few: Trace, inputs: Mapping[Path, ir.Value], outputs: Mapping[Path, ir.Value]
) -> list[ir.Node] | None:
    """The nodes that depend on a parameter, in order; None if something else depends on them, or they on others."""
    graph = few.model.graph
    touched = descendants(graph, [value for place, value in inputs.items() if _owner(place) == parameter])
    if any(value in touched for place, value in outputs.items() if _owner(place) != parameter):
        return None
    wanted, _ = ancestors([value for place, value in outputs.items() if _owner(place) == parameter])
    nodes = [node for node in graph if node in wanted and any(value in touched for value in node.outputs)]
    return None if any(True for node in nodes for _ in nested_graphs(node)) else nodes
