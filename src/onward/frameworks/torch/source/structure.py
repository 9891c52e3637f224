"""Where a module holds its parts, and how they are made and reached in Python."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from onward.frameworks.program.names import is_identifier, quote
from onward.frameworks.torch.source.layers import Layer, own_state

ROOT = "self"
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
        for owner in self._owners(layer):
            holds = own_state(self._modules[owner])
            fits = owner and owner not in self.layers and holds == names and not any(self._modules[owner].children())
            same = all(
                self._aliases[f"{owner}.{name}"] == self._aliases.get(value.path)
                for name, value in layer.state.items()
                if fits
            )
            if fits and same:
                self.layers[owner] = layer
                return owner
        return None

    def _owners(self, layer: Layer) -> Iterator[str]:
        first = next(iter(layer.state.values()))
        main = self._aliases.get(first.path)
        for path, other in self._aliases.items():
            owner, _, name = path.rpartition(".")
            if other == main and name == next(iter(layer.state)):
                yield owner

    # ---- access ------------------------------------------------------------------------------------------------------

    def access(self, path: str) -> str:
        """How a module, a parameter or a buffer is reached."""
        owner, _, name = path.rpartition(".")
        if not path:
            return ROOT
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
        yield from self._ties()
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

    def _ties(self) -> Iterator[str]:
        for path, main in self._aliases.items():
            if path != main:
                owner, _, name = path.rpartition(".")
                kind = "parameter" if name in self._modules[owner]._parameters else "buffer"
                yield _assignment(self.access(owner), name, self.access(main), f"register_{kind}")

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
