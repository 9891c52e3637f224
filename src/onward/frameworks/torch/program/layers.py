"""Layers of torch.nn in place of calls with parameters, and where a module holds its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from onward.frameworks.program.calls import ProgramStep, Value, values_in
from onward.frameworks.program.source_text import is_identifier, number, quote
from onward.frameworks.torch.program.recording import is_always_zero

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


_NAMES = {
    **dict.fromkeys(("linear", *(f"{of}conv{n}d" for n in (1, 2, 3) for of in ("", "torch."))), ("weight", "bias")),
    "embedding": ("weight",),
    "layer_norm": ("shape", "weight", "bias", "eps"),
    "rms_norm": ("shape", "weight", "eps"),
    "group_norm": ("groups", "weight", "bias", "eps"),
    **dict.fromkeys(("nn.BatchNorm:sample", "nn.BatchNorm:population"), ("mean", "variance", "weight", "bias")),
}
"""Functions, and the names of their arguments after the first."""
_RECURRENT = {"torch.lstm": "nn.LSTM", "torch.gru": "nn.GRU", "torch.rnn_tanh": "nn.RNN", "torch.rnn_relu": "nn.RNN"}


def layer_of(step: ProgramStep) -> Layer | None:
    """Return the layer that a call could be of."""
    if step.function in _RECURRENT:
        return _recurrent(step)
    kind = step.function.removeprefix(F_)
    if (names := _NAMES.get(kind)) is None:
        return None
    given = {**dict.fromkeys(names), **dict(zip(names, step.arguments[1:], strict=False)), **step.named}
    weight, bias = given["weight"], given.get("bias")
    if weight is None or (kind == "group_norm" and bias is None):
        return None
    state = {"weight": weight, **({} if bias is None else {"bias": bias})}
    shape, eps = tuple(weight.tensor.shape), float(number(given["eps"])) if "eps" in given else None
    arguments: list[Any] = [shape[0] if len(shape) == 1 else shape]
    named: dict[str, tuple[Any, Any]] = {"eps": (eps, 1e-5)}
    match kind:
        case "linear":
            name, arguments, named = "nn.Linear", [shape[1], shape[0]], {"bias": (bias is not None, True)}
        case "embedding":
            name, arguments, named = "nn.Embedding", [*shape], {}
        case "layer_norm":
            name, named = "nn.LayerNorm", {**named, "bias": (bias is not None, True)}
        case "rms_norm":
            name, named = "nn.RMSNorm", {"eps": (eps, None)}
        case "group_norm":
            name, arguments = "nn.GroupNorm", [given["groups"], shape[0]]
        case "nn.BatchNorm:sample" | "nn.BatchNorm:population":
            rank = max(1, step.arguments[0].tensor.ndim - 2)
            name = f"nn.BatchNorm{rank}d" if kind.endswith("sample") else "PopulationBatchNorm"
            named |= {"momentum": (given["momentum"], 0.1)}
            state |= {"running_mean": given["mean"], "running_var": given["variance"]}
        case _:
            name, groups, kernel = f"nn.Conv{len(shape) - 2}d", given.get("groups", 1), shape[2:]
            arguments = [shape[1] * groups, shape[0], kernel[0] if len(set(kernel)) == 1 else kernel]
            usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
            named = {key: (given.get(key, default), default) for key, default in usual.items()}
            named["bias"] = (bias is not None, True)
    made = argument_list(*arguments, dtype=weight.tensor.dtype, **named)
    return Layer(f"{name}({made})", state, step.arguments[:1])


def argument_list(*given: Any, dtype: torch.dtype = torch.float32, **named: tuple[Any, Any]) -> str:
    """Arguments of a layer. Named ones come with their defaults, and are left out where they are the same."""
    other = {key: value for key, (value, default) in named.items() if value != default}
    texts = [*map(_text, given), *(f"{key}={_text(value)}" for key, value in other.items())]
    return ", ".join([*texts, *([f"dtype={dtype}"] if dtype != torch.float32 else [])])


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else repr(value)


def _recurrent(step: ProgramStep) -> Layer | None:
    """Of one layer, in one direction or two."""
    x, first, weights, has_biases, *_, both, _ = step.arguments
    kind = _RECURRENT[step.function]
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
    given = [x] if all(map(is_always_zero, states)) else [x, first]
    pattern = "{}, ({}, {})" if kind == "nn.LSTM" else ""
    return Layer(f"{kind}({made})", dict(zip(names, weights, strict=True)), given, pattern)


_METHODS = frozenset(dir(nn.ModuleDict)) - frozenset(dir(nn.Module))


class Structure:
    """The modules within a live module. Some of them will be layers, the others only hold parts."""

    def __init__(self, live: nn.Module):
        self.live = live
        self.layers: dict[str, Layer] = {}
        """By path."""
        self._modules = dict(live.named_modules())
        self.paths: dict[int, list[str]] = {}
        """All paths of a tensor, by its `id`: tied weights have several."""
        for path, tensor in (
            *live.named_parameters(remove_duplicate=False),
            *live.named_buffers(remove_duplicate=False),
        ):
            self.paths.setdefault(id(tensor), []).append(path)
        self._aliases = {path: paths[0] for paths in self.paths.values() for path in paths}

    # ---- layers ------------------------------------------------------------------------------------------------------

    def claim(self, layer: Layer) -> str | None:
        """The path of the module that is this layer, by the names of what it holds; it belongs to nobody else then."""
        names = [*layer.state, *(["num_batches_tracked"] if "running_mean" in layer.state else [])]
        first, value = next(iter(layer.state.items()))
        main = self._aliases.get(value.path)
        owners = [path.rpartition(".") for path, other in self._aliases.items() if other == main]
        for owner in [owner for owner, _, name in owners if name == first]:
            module = self._modules[owner]
            holds = [*module._parameters, *(x for x in module._buffers if x not in module._non_persistent_buffers_set)]
            fits = owner and owner not in self.layers and holds == names and not any(module.children())
            same = all(
                self._aliases[f"{owner}.{name}"] == self._aliases.get(value.path)
                for name, value in layer.state.items()
                if fits
            )
            if fits and same:
                self.layers[owner] = layer
                return owner
        return None

    # ---- access ------------------------------------------------------------------------------------------------------

    def access(self, path: str) -> str:
        """How a module, a parameter or a buffer is reached."""
        owner, _, name = path.rpartition(".")
        if not path:
            return "self"
        held = self._modules[owner]
        where = self.access(owner)
        if path in self._modules:
            if self.kind(owner) == "nn.ModuleList":
                return f"{where}[{name}]"
            if is_identifier(name):
                return f"{where}.{name}"
            return f"{where}[{quote(name)}]" if self._is_dict(owner) else f"{where}.get_submodule({quote(name)})"
        if is_identifier(name):
            return f"{where}.{name}"
        return f"{where}.get_{'parameter' if name in held._parameters else 'buffer'}({quote(name)})"

    def kind(self, path: str) -> str:
        """The class of what only holds parts."""
        module = self._modules[path]
        names = [name for name, _ in module.named_children()]
        if path and names == [str(i) for i in range(len(names))] and not module._parameters and not module._buffers:
            return "nn.ModuleList"
        return "nn.ModuleDict" if self._is_dict(path) else "nn.Module"

    def _is_dict(self, path: str) -> bool:
        """Whether parts have names that no attributes have, and none that methods of dictionaries have."""
        module = self._modules[path]
        names = [name for name, _ in module.named_children()]
        methods = _METHODS.isdisjoint([*names, *module._parameters, *module._buffers])
        return methods and not all(map(is_identifier, names))

    # ---- making ------------------------------------------------------------------------------------------------------

    def lines(self, values: dict[str, str]) -> Iterator[str]:
        """What makes all parts; `values` are those of buffers that are given in full."""
        yield from self._lines("", values)
        for path, main in self._aliases.items():
            if path != main:
                owner, _, name = path.rpartition(".")
                kind = "parameter" if name in self._modules[owner]._parameters else "buffer"
                yield _assignment(self.access(owner), name, self.access(main), f"register_{kind}")
        yield from self._frozen()

    def _lines(self, path: str, values: dict[str, str]) -> Iterator[str]:
        module, where = self._modules[path], self.access(path)
        for name, parameter in module._parameters.items():
            if self._aliases[_join_path(path, name)] == _join_path(path, name):
                yield _assignment(where, name, f"nn.Parameter({_empty(parameter)})", "register_parameter")
        for name, buffer in module._buffers.items():
            kept = name not in module._non_persistent_buffers_set
            made = values.get(_join_path(path, name), _empty(buffer, "zeros"))
            yield f"{where}.register_buffer({quote(name)}, {made}{'' if kept else ', persistent=False'})"
        for name, _ in module.named_children():
            inner = _join_path(path, name)
            made = self.layers[inner].made if inner in self.layers else f"{self.kind(inner)}()"
            if self.kind(path) == "nn.ModuleList":
                yield f"{where}.append({made})"
            elif self._is_dict(path):
                yield f"{self.access(inner)} = {made}"
            else:
                yield _assignment(where, name, made, "add_module")
            if inner not in self.layers:
                yield from self._lines(inner, values)

    def _frozen(self) -> Iterator[str]:
        """Whole modules, if nothing in them learns, else single parameters."""
        done: set[str] = set()
        for path, module in self._modules.items():
            parameters = dict(module.named_parameters())
            if parameters and not any(p.requires_grad for p in parameters.values()) and not _is_within(path, done):
                done.add(path)
                yield f"{self.access(path)}.requires_grad_(False)"
            elif not _is_within(path, done):
                for name, parameter in module._parameters.items():
                    inner = _join_path(path, name)
                    if parameter is not None and not parameter.requires_grad and self._aliases[inner] == inner:
                        yield f"{self.access(inner)}.requires_grad_(False)"


def _is_within(path: str, others: set[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") or not other for other in others)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _assignment(where: str, name: str, made: str, otherwise: str) -> str:
    return f"{where}.{name} = {made}" if is_identifier(name) else f"{where}.{otherwise}({quote(name)}, {made})"


def _empty(tensor: torch.Tensor, function: str = "empty") -> str:
    sizes = ", ".join(map(str, tensor.shape)) or "()"
    return f"torch.{function}({sizes}{f', dtype={tensor.dtype}' if tensor.dtype != torch.float32 else ''})"
