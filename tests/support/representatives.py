"""What `make test` runs of many: of cases that are alike the first, of random ones a few. `make test-all` runs all."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import settings
from onnx import AttributeProto

Case = tuple[onnx.ModelProto, Mapping[str, Any]]


def chosen(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Values as parameters of a test; those that are not quick are slow."""
    return [pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values]


def examples(quick: int, **options: Any) -> settings:
    """So many examples of a random test in `make test`; ten times as many where `make test-all` searches."""
    return settings(max_examples=quick if settings().derandomize else 10 * quick, **options)


def first_of_each(cases: Mapping[str, Case], kind: Callable[..., Hashable]) -> list[str]:
    """The names of the first case of each kind."""
    first: dict[Hashable, str] = {}
    for name, (proto, inputs, *_) in cases.items():
        first.setdefault(kind(proto, inputs), name)
    return list(first.values())


def by_operators(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> Hashable:
    """The operators alone: for what takes long, and has quick kin that are alike in the ways below."""
    return tuple(node.op_type for node in proto.graph.node)


def by_mode(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> Hashable:
    """The operators, and the words among their attributes: the same rows of a table compute alike cases."""
    return tuple(
        (node.op_type, *sorted((a.name, a.s) for a in node.attribute if a.type == AttributeProto.STRING))
        for node in proto.graph.node
    )


def by_attributes_and_ranks(proto: onnx.ModelProto, inputs: Mapping[str, Any]) -> Hashable:
    """Also which attributes are set and which inputs given, and how many axes these have."""
    given = tuple((*sorted(a.name for a in node.attribute), *map(bool, node.input)) for node in proto.graph.node)
    return by_mode(proto, inputs), given, tuple(_ranks(value) for value in inputs.values())


def _ranks(value: Any) -> Hashable:
    return tuple(map(_ranks, value)) if isinstance(value, list) else np.ndim(value)
