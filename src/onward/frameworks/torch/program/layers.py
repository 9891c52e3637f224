"""Layers of torch.nn in place of calls with parameters, and the containers that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from onward.frameworks.program.calls import ProgramStep, Value, values_in
from onward.frameworks.program.source_text import is_identifier, number, quote
from onward.frameworks.torch.program.recording import is_always_zero

F_ = "torch.nn.functional."


class TorchLayer(NamedTuple):
    """Layer of torch.nn that computes a call."""

    expression: str
    """Expression that creates the layer."""
    state: dict[str, Value]
    """Parameters and buffers, in the order of the class."""
    inputs: list[Any]
    pattern: str = ""
    """Nesting of the results (default: flat)."""


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


def layer_of(step: ProgramStep) -> TorchLayer | None:
    """Return the layer that a call could be of."""
    if step.function in _RECURRENT:
        return _recurrent(step)
    function = step.function.removeprefix(F_)
    if (names := _NAMES.get(function)) is None:
        return None
    arguments = {**dict.fromkeys(names), **dict(zip(names, step.arguments[1:], strict=False)), **step.named}
    weight, bias = arguments["weight"], arguments.get("bias")
    if weight is None or (function == "group_norm" and bias is None):
        return None
    state = {"weight": weight, **({} if bias is None else {"bias": bias})}
    shape, eps = tuple(weight.tensor.shape), float(number(arguments["eps"])) if "eps" in arguments else None
    positional: list[Any] = [shape[0] if len(shape) == 1 else shape]
    named: dict[str, tuple[Any, Any]] = {"eps": (eps, 1e-5)}
    has_bias = (bias is not None, True)
    match function:
        case "linear":
            name, positional, named = "nn.Linear", [shape[1], shape[0]], {"bias": has_bias}
        case "embedding":
            name, positional, named = "nn.Embedding", [*shape], {}
        case "layer_norm":
            name, named = "nn.LayerNorm", {**named, "bias": has_bias}
        case "rms_norm":
            name, named = "nn.RMSNorm", {"eps": (eps, None)}
        case "group_norm":
            name, positional = "nn.GroupNorm", [arguments["groups"], shape[0]]
        case "nn.BatchNorm:sample" | "nn.BatchNorm:population":
            rank = max(1, step.arguments[0].tensor.ndim - 2)
            name = f"nn.BatchNorm{rank}d" if function.endswith("sample") else "PopulationBatchNorm"
            named |= {"momentum": (arguments["momentum"], 0.1)}
            state |= {"running_mean": arguments["mean"], "running_var": arguments["variance"]}
        case _:
            name, groups, kernel = f"nn.Conv{len(shape) - 2}d", arguments.get("groups", 1), shape[2:]
            positional = [shape[1] * groups, shape[0], kernel[0] if len(set(kernel)) == 1 else kernel]
            defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
            named = {key: (arguments.get(key, default), default) for key, default in defaults.items()}
            named["bias"] = has_bias
    texts = _arguments(*positional, dtype=weight.tensor.dtype, **named)
    return TorchLayer(f"{name}({texts})", state, step.arguments[:1])


def _arguments(*positional: Any, dtype: torch.dtype, **named: tuple[Any, Any]) -> str:
    """Return arguments of a layer as text. Named ones are pairs of a value and its default."""
    keywords = [f"{key}={_text(value)}" for key, (value, default) in named.items() if value != default]
    return ", ".join([*map(_text, positional), *keywords, *([f"dtype={dtype}"] if dtype != torch.float32 else [])])


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else repr(value)


def _recurrent(step: ProgramStep) -> TorchLayer:
    """Return the layer of a call with one layer, in one direction or two."""
    x, first, weights, has_biases, *_, is_bidirectional, _ = step.arguments
    name = _RECURRENT[step.function]
    tensors = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if has_biases else ()))
    names = [f"{tensor}_l0{end}" for end in (("", "_reverse") if is_bidirectional else ("",)) for tensor in tensors]
    texts = _arguments(
        weights[0].tensor.shape[1],
        weights[1].tensor.shape[1],
        nonlinearity=("relu" if step.function == "torch.rnn_relu" else "tanh", "tanh"),
        bias=(has_biases, True),
        bidirectional=(is_bidirectional, False),
        dtype=weights[0].tensor.dtype,
    )
    inputs = [x] if all(map(is_always_zero, values_in(first))) else [x, first]
    pattern = "{}, ({}, {})" if name == "nn.LSTM" else ""
    return TorchLayer(f"{name}({texts})", dict(zip(names, weights, strict=True)), inputs, pattern)


_METHODS = frozenset(dir(nn.ModuleDict)) - frozenset(dir(nn.Module))


class Structure:
    """Modules inside of a live module. Some become layers, the others are containers."""

    def __init__(self, live: nn.Module):
        self._layers: dict[str, TorchLayer] = {}
        """Layers by path."""
        self._modules = dict(live.named_modules())
        self.lists: dict[str, str] = {}
        """Lists of equal modules by path -> expressions that create them."""
        main: dict[int, str] = {}
        tensors = (*live.named_parameters(remove_duplicate=False), *live.named_buffers(remove_duplicate=False))
        self._aliases = {path: main.setdefault(id(tensor), path) for path, tensor in tensors}
        """Path of a tensor -> its main path. Tied weights have several paths."""

    def claim(self, layer: TorchLayer) -> str | None:
        """Replace the module that has the state of a layer by the layer. Return its path, or None."""
        names = [*layer.state, *(["num_batches_tracked"] if "running_mean" in layer.state else [])]
        first, value = next(iter(layer.state.items()))
        main = self._aliases.get(value.path)
        owners = [path.rpartition(".") for path, other in self._aliases.items() if other == main]
        for owner in [owner for owner, _, name in owners if name == first and owner and owner not in self._layers]:
            module = self._modules[owner]
            persistent = [x for x in module._buffers if x not in module._non_persistent_buffers_set]
            if (
                [*module._parameters, *persistent] == names
                and not any(module.children())
                and all(self._aliases[f"{owner}.{n}"] == self._aliases.get(v.path) for n, v in layer.state.items())
            ):
                self._layers[owner] = layer
                return owner
        return None

    def access(self, path: str) -> str:
        """Return the expression for a module, a parameter or a buffer."""
        owner, _, name = path.rpartition(".")
        if not path:
            return "self"
        owner_text = self.access(owner)
        if path in self._modules:
            container = self.container(owner)
            if container == "nn.ModuleList":
                return f"{owner_text}[{name}]"
            if container == "nn.ModuleDict" and not is_identifier(name):
                return f"{owner_text}[{quote(name)}]"
            role = "submodule"
        else:
            role = "parameter" if name in self._modules[owner]._parameters else "buffer"
        return f"{owner_text}.{name}" if is_identifier(name) else f"{owner_text}.get_{role}({quote(name)})"

    def container(self, path: str) -> str:
        """Return the class of a module that only holds others."""
        module = self._modules[path]
        names = [name for name, _ in module.named_children()]
        if path and names == [str(i) for i in range(len(names))] and not module._parameters and not module._buffers:
            return "nn.ModuleList"
        # A ModuleDict takes any names, except those of its methods.
        is_free = _METHODS.isdisjoint([*names, *module._parameters, *module._buffers])
        return "nn.ModuleDict" if is_free and not all(map(is_identifier, names)) else "nn.Module"

    def length(self, path: str) -> int:
        """Return the number of modules of a list; 0 for others."""
        return len(self._modules[path]._modules) if self.container(path) == "nn.ModuleList" else 0

    def lines_of(self, path: str, values: dict[str, str]) -> list[str]:
        """Return lines that create what is in a module, which is `self` there."""
        return [line.replace(self.access(path), "self") for line in self._lines(path, values)]

    def lines(self, values: dict[str, str]) -> Iterator[str]:
        """Yield lines that create all modules and tensors. `values` has expressions for buffers."""
        yield from self._lines("", values)
        for path, main in self._aliases.items():
            if path != main:
                owner, _, name = path.rpartition(".")
                method = f"register_{'parameter' if name in self._modules[owner]._parameters else 'buffer'}"
                yield _assignment(self.access(owner), name, self.access(main), method)
        yield from self._frozen()

    def _lines(self, path: str, values: dict[str, str]) -> Iterator[str]:
        module, owner, container = self._modules[path], self.access(path), self.container(path)
        for name, parameter in module._parameters.items():
            if self._aliases[_join_path(path, name)] == _join_path(path, name):
                yield _assignment(owner, name, f"nn.Parameter({_empty(parameter)})", "register_parameter")
        for name, buffer in module._buffers.items():
            value = values.get(_join_path(path, name), _empty(buffer, "zeros"))
            options = ", persistent=False" if name in module._non_persistent_buffers_set else ""
            yield f"{owner}.register_buffer({quote(name)}, {value}{options})"
        for name, _ in module.named_children():
            inner = _join_path(path, name)
            layer = self._layers.get(inner)
            value = layer.expression if layer is not None else self.lists.get(inner, f"{self.container(inner)}()")
            if container == "nn.ModuleList":
                yield f"{owner}.append({value})"
            elif container == "nn.ModuleDict":
                yield f"{self.access(inner)} = {value}"
            else:
                yield _assignment(owner, name, value, "add_module")
            if layer is None and inner not in self.lists:
                yield from self._lines(inner, values)

    def _frozen(self) -> Iterator[str]:
        """Yield lines that freeze whole modules, or single parameters where others are trainable."""
        frozen: set[str] = set()
        for path, module in self._modules.items():
            if any(path == other or path.startswith(f"{other}.") or not other for other in frozen):
                continue
            parameters = dict(module.named_parameters())
            if parameters and not any(p.requires_grad for p in parameters.values()):
                frozen.add(path)
                yield f"{self.access(path)}.requires_grad_(False)"
                continue
            for name, parameter in module._parameters.items():
                inner = _join_path(path, name)
                if parameter is not None and not parameter.requires_grad and self._aliases[inner] == inner:
                    yield f"{self.access(inner)}.requires_grad_(False)"


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _assignment(owner: str, name: str, value: str, method: str) -> str:
    """Return a line that sets an attribute, by a method if the name is not an identifier."""
    return f"{owner}.{name} = {value}" if is_identifier(name) else f"{owner}.{method}({quote(name)}, {value})"


def _empty(tensor: torch.Tensor, function: str = "empty") -> str:
    sizes = ", ".join(map(str, tensor.shape)) or "()"
    return f"torch.{function}({sizes}{f', dtype={tensor.dtype}' if tensor.dtype != torch.float32 else ''})"
