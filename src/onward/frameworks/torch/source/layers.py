"""Calls with parameters as layers of torch.nn, where the module's names say that they are such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from onward.frameworks.program.calls import Step, Value, values_in
from onward.frameworks.program.literals import number
from onward.frameworks.torch.source.program import is_zero

F_ = "torch.nn.functional."


class Layer(NamedTuple):
    """A call as a layer."""

    made: str
    """How the layer is made."""
    state: dict[str, Value]
    """What the layer holds, in the order of its class."""
    inputs: list[Any]
    """What is left to call it with."""
    pattern: str = ""
    """How its results lie in one another, if not side by side."""


def layer_of(step: Step) -> Layer | None:
    """The layer that a call could be of."""
    rule = _RULES.get(step.function)
    return rule(step) if rule is not None else None


def argument_list(*given: Any, dtype: torch.dtype = torch.float32, **named: tuple[Any, Any]) -> str:
    """Arguments of a layer. Named ones come with their defaults, and are left out where they are the same."""
    other = {key: value for key, (value, default) in named.items() if value != default}
    texts = [*map(_text, given), *(f"{key}={_text(value)}" for key, value in other.items())]
    return ", ".join([*texts, *([f"dtype={dtype}"] if dtype != torch.float32 else [])])


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else repr(value)


def _arguments_of(step: Step, *names: str) -> dict[str, Any]:
    """The arguments after the first, by these names, however they were given."""
    return {**dict.fromkeys(names), **dict(zip(names, step.arguments[1:], strict=False)), **step.named}


def _present(**state: Value | None) -> dict[str, Value]:
    return {name: value for name, value in state.items() if value is not None}


def _linear(step: Step) -> Layer:
    given = _arguments_of(step, "weight", "bias")
    weight, bias = given["weight"], given["bias"]
    rows, columns = weight.tensor.shape
    made = argument_list(columns, rows, bias=(bias is not None, True), dtype=weight.tensor.dtype)
    return Layer(f"nn.Linear({made})", _present(weight=weight, bias=bias), step.arguments[:1])


def _embedding(step: Step) -> Layer:
    weight = _arguments_of(step, "weight")["weight"]
    made = argument_list(*weight.tensor.shape, dtype=weight.tensor.dtype)
    return Layer(f"nn.Embedding({made})", {"weight": weight}, step.arguments[:1])


def _convolution(step: Step) -> Layer:
    given = _arguments_of(step, "weight", "bias")
    weight, bias, groups = given["weight"], given["bias"], step.named.get("groups", 1)
    rows, columns, *kernel = weight.tensor.shape
    made = argument_list(
        columns * groups,
        rows,
        kernel[0] if len(set(kernel)) == 1 else tuple(kernel),
        stride=(step.named.get("stride", 1), 1),
        padding=(step.named.get("padding", 0), 0),
        dilation=(step.named.get("dilation", 1), 1),
        groups=(groups, 1),
        bias=(bias is not None, True),
        dtype=weight.tensor.dtype,
    )
    return Layer(f"nn.Conv{len(kernel)}d({made})", _present(weight=weight, bias=bias), step.arguments[:1])


def _layer_norm(step: Step) -> Layer | None:
    given = _arguments_of(step, "shape", "weight", "bias", "eps")
    weight, bias = given["weight"], given["bias"]
    if weight is None:
        return None
    shape = tuple(weight.tensor.shape)
    made = argument_list(
        shape[0] if len(shape) == 1 else shape,
        eps=(_short(given["eps"]), 1e-5),
        bias=(bias is not None, True),
        dtype=weight.tensor.dtype,
    )
    return Layer(f"nn.LayerNorm({made})", _present(weight=weight, bias=bias), step.arguments[:1])


def _rms_norm(step: Step) -> Layer | None:
    given = _arguments_of(step, "shape", "weight", "eps")
    weight = given["weight"]
    if weight is None:
        return None
    shape = tuple(weight.tensor.shape)
    made = argument_list(
        shape[0] if len(shape) == 1 else shape, eps=(_short(given["eps"]), None), dtype=weight.tensor.dtype
    )
    return Layer(f"nn.RMSNorm({made})", {"weight": weight}, step.arguments[:1])


def _group_norm(step: Step) -> Layer | None:
    given = _arguments_of(step, "groups", "weight", "bias", "eps")
    weight, bias = given["weight"], given["bias"]
    if weight is None or bias is None:
        return None
    made = argument_list(
        given["groups"], weight.tensor.shape[0], eps=(_short(given["eps"]), 1e-5), dtype=weight.tensor.dtype
    )
    return Layer(f"nn.GroupNorm({made})", {"weight": weight, "bias": bias}, step.arguments[:1])


def _batch_norm(kind: Callable[[Value], str]) -> Callable[[Step], Layer]:
    def rule(step: Step) -> Layer:
        x, mean, variance, weight, bias = step.arguments
        made = argument_list(
            weight.tensor.shape[0],
            eps=(_short(step.named["eps"]), 1e-5),
            momentum=(step.named["momentum"], 0.1),
            dtype=weight.tensor.dtype,
        )
        state = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}
        return Layer(f"{kind(x)}({made})", state, [x])

    return rule


def _recurrent(step: Step) -> Layer | None:
    """Of one layer, in one direction or two."""
    x, first, weights, has_biases, *_, both, _ = step.arguments
    kind = {"torch.lstm": "nn.LSTM", "torch.gru": "nn.GRU"}.get(step.function, "nn.RNN")
    parts = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_biases else ()))
    names = [f"{part}_l0{end}" for end in (("", "_reverse") if both else ("",)) for part in parts]
    states = list(values_in(first))
    made = argument_list(
        weights[0].tensor.shape[1],
        weights[1].tensor.shape[1],
        nonlinearity=("relu" if step.function == "torch.rnn_relu" else "tanh", "tanh"),
        bias=(has_biases, True),
        bidirectional=(both, False),
        dtype=weights[0].tensor.dtype,
    )
    given = [x] if all(map(is_zero, states)) else [x, first]
    pattern = "{}, ({}, {})" if kind == "nn.LSTM" else ""
    return Layer(f"{kind}({made})", dict(zip(names, weights, strict=True)), given, pattern)


def _short(eps: float) -> float:
    return float(number(eps))


_RULES: Mapping[str, Callable[[Step], Layer | None]] = {
    f"{F_}linear": _linear,
    f"{F_}embedding": _embedding,
    **{f"{F_}conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"torch.conv{n}d": _convolution for n in (1, 2, 3)},
    f"{F_}layer_norm": _layer_norm,
    f"{F_}rms_norm": _rms_norm,
    f"{F_}group_norm": _group_norm,
    **dict.fromkeys(("torch.lstm", "torch.gru", "torch.rnn_tanh", "torch.rnn_relu"), _recurrent),
    "nn.BatchNorm:sample": _batch_norm(lambda x: f"nn.BatchNorm{max(1, x.tensor.ndim - 2)}d"),
    "nn.BatchNorm:population": _batch_norm(lambda x: "PopulationBatchNorm"),
}


def own_state(module: nn.Module) -> list[str]:
    """The names of what a module itself holds, in the order of its `state_dict`."""
    kept = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    return [*module._parameters, *kept]
