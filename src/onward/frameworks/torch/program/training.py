"""Optimizer, scheduler and loss as expressions that make them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onward.errors import UnsupportedError
from onward.frameworks.program.source_text import number, quote
from onward.frameworks.torch.exact import ExactOptimizer, MasterWeights, Together, float32_copies, scale_to_norm
from onward.frameworks.torch.optimizer import clipped_optimizer, clips_of
from onward.frameworks.torch.program.recording import defaults_of
from onward.vocabulary import rate_formulas
from onward.vocabulary.torch_schedules import one_cycle, one_cycle_arguments

_USUAL = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")
"""Settings that only say how PyTorch computes, or are left out unless they are on."""


class Definitions:
    """Texts of functions, and what of our own classes they need."""

    def __init__(self) -> None:
        self.borrowed: list[Any] = []
        self.replaced: dict[str, str] = {}

    def optimizer(self, made: Optimizer, module: nn.Module) -> list[str]:
        """Lines that return the optimizer of a `module`."""
        if isinstance(made, MasterWeights):
            return self._of_copies(made, module)
        names = {id(x): name for name, x in module.named_parameters()}
        *lines, whole = self._made(made, names, _all_of(made, names, module))
        if "named[" in "".join(lines):
            lines.insert(0, "named = dict(module.named_parameters())")
        if not clips_of(made):
            return [*lines, f"return {whole}"]
        return [*lines, f"optimizer = {whole}", "optimizer.register_step_pre_hook(clip)", "return optimizer"]

    def _of_copies(self, made: MasterWeights, module: nn.Module) -> list[str]:
        """The optimizer of copies is made of these, as others are of the parameters."""
        self.borrowed += [float32_copies, MasterWeights]
        made.settle()
        names = {id(made.copies[x]): name for name, x in module.named_parameters() if x in made.copies}
        has_all = _all_of(made.inner, names, module) == "module.parameters()"
        *lines, whole = self._made(made.inner, names, "named.values()" if has_all else None)
        hook = ["optimizer.register_step_pre_hook(clip)"] if clips_of(made.inner) else []
        return [
            "parameters = dict(module.named_parameters())",
            "named = float32_copies(parameters)",
            *lines,
            f"optimizer = {whole}",
            *hook,
            "return MasterWeights(optimizer, parameters, named)",
        ]

    def _made(self, made: Optimizer, names: Mapping[int, str], plain: str | None) -> list[str]:
        """Lines, and the expression that makes the optimizer; `plain` is of all parameters, if one group has them."""
        parts = made.optimizers if isinstance(made, Together) else [made]
        lines = []
        texts: list[str] = []
        for part, groups in zip(parts, _parameter_names(made, names), strict=True):
            common = _settings(part, part.param_groups[0])
            if plain is not None:
                given = plain
            else:
                given = "groups" if len(parts) == 1 else f"groups_{len(texts) + 1}"
                rows = (_group(part, own, group, common) for own, group in zip(groups, part.param_groups, strict=True))
                lines += [f"{given} = [", *(f"    {line}" for row in rows for line in row), "]"]
            texts.append(f"{self._class(type(part))}({given}, {_keywords(common)})")
        if isinstance(made, Together):
            self.borrowed.append(Together)
        return [*lines, f"Together([{', '.join(texts)}])" if isinstance(made, Together) else texts[0]]

    def _class(self, kind: type[Any]) -> str:
        if issubclass(kind, ExactOptimizer):
            self.borrowed.append(kind)
            return kind.__name__
        if not hasattr(torch.optim, kind.__name__):
            raise UnsupportedError(
                f"a program of PyTorch alone cannot have a {kind.__name__}, which executes a graph",
                hint="keep the training model, or use one of torch.optim",
            )
        return f"torch.optim.{kind.__name__}"

    def clip(self, made: Optimizer) -> list[str]:
        """The function that an optimizer calls before it steps, if there is one."""
        hooks = clips_of(clipped_optimizer(made))
        if not hooks:
            return []
        settings = hooks[0].settings
        kind = next(key for key in ("value", "norm", "tensor_norm") if key in settings)
        function = "nn.utils.clip_grad_value_" if kind == "value" else "nn.utils.clip_grad_norm_"
        if kind != "value" and settings.get("variant") == "optax":
            self.borrowed.append(scale_to_norm)
            function = scale_to_norm.__name__
        call = f"{function}(parameters, {number(float(settings[kind]))})"
        each = ["for parameter in parameters:", f"    {call.replace('parameters', '[parameter]')}"]
        return [
            "def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:",
            '    """Clip gradients, before each step of the optimizer."""',
            '    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]',
            *(f"    {line}" for line in (each if kind == "tensor_norm" else [call])),
        ]

    # ---- schedulers --------------------------------------------------------------------------------------------------

    def scheduler(self, made: LRScheduler) -> str:
        kind = type(made)
        if isinstance(made, lr_scheduler.LambdaLR):
            return self._by_formula(made)
        if isinstance(made, lr_scheduler.SequentialLR):
            inner = ", ".join(map(self.scheduler, made._schedulers))
            return f"lr_scheduler.SequentialLR(optimizer, [{inner}], {made._milestones!r})"
        if isinstance(made, lr_scheduler.OneCycleLR):
            groups = made.optimizer.param_groups
            arguments = one_cycle_arguments(one_cycle(vars(made), groups[0])[0][0].options, 0) or {}
            rates = {"max_lr": [group["max_lr"] for group in groups]}
            return f"lr_scheduler.OneCycleLR(optimizer, {_keywords({**rates, **arguments})})"
        names = [name for name in inspect.signature(kind).parameters if name not in ("optimizer", "last_epoch")]
        settings = {name: getattr(made, name) for name in names}
        if isinstance(made, lr_scheduler.MultiStepLR):
            settings["milestones"] = sorted(made.milestones.elements())
        return f"lr_scheduler.{kind.__name__}(optimizer, {_keywords(settings)})"

    def _by_formula(self, made: lr_scheduler.LambdaLR) -> str:
        factors: list[rate_formulas.Factor] = made.lr_lambdas
        schedules = factors[0].schedules
        used = {schedule["name"]: rate_formulas.RATES[schedule["name"]] for schedule in schedules}
        self.borrowed += [*used.values(), rate_formulas.Factor]
        table = ", ".join(f'"{name}": {function.__name__}' for name, function in used.items())
        self.replaced["RATES"] = f"RATES = {{{table}}}"
        listed = ", ".join(f"Factor({number(factor.base)}, schedules)" for factor in factors)
        return f"lr_scheduler.LambdaLR(optimizer, [{listed}])"

    # ---- losses ------------------------------------------------------------------------------------------------------

    def loss(self, made: nn.Module) -> str:
        """What makes a loss again."""
        kind = type(made)
        given = {}
        for name, parameter in inspect.signature(kind).parameters.items():
            value = getattr(made, name, parameter.default)
            if parameter.default is parameter.empty or not _equal(value, parameter.default):
                given[name] = self._argument(value)
        ours = kind.__module__.startswith("onward")
        if ours:
            self.borrowed.append(kind)
        arguments = ", ".join(f"{name}={text}" for name, text in given.items())
        return f"{'' if ours else 'nn.'}{kind.__name__}({arguments})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, nn.ModuleList):
            return f"[{', '.join(map(self.loss, value))}]"
        if isinstance(value, nn.Module):
            return self.loss(value)
        if isinstance(value, torch.Tensor):
            return f"torch.tensor({_text(value.tolist())})"
        return _text(value)


def schedules_of(made: LRScheduler | None) -> list[str]:
    """The line that says what schedules a formula is of."""
    if not isinstance(made, lr_scheduler.LambdaLR):
        return []
    rows = ", ".join(
        "{" + ", ".join(f'"{k}": {_text(v)}' for k, v in row.items()) + "}" for row in made.lr_lambdas[0].schedules
    )
    return [f"schedules = [{rows}]"]


def _parameter_names(made: Optimizer, names: Mapping[int, str]) -> list[list[list[str]]]:
    """The names of parameters, by groups of each part."""
    parts = made.optimizers if isinstance(made, Together) else [made]
    return [[[names[id(p)] for p in group["params"]] for group in part.param_groups] for part in parts]


def _all_of(made: Optimizer, by_id: Mapping[int, str], module: nn.Module) -> str | None:
    """What all parameters are called, where one group has them in their order."""
    listed = _parameter_names(made, by_id)
    if len(listed) > 1 or len(listed[0]) > 1:
        return None
    names = listed[0][0]
    if names == [name for name, _ in module.named_parameters()]:
        return "module.parameters()"
    if names == [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
        return "[p for p in module.parameters() if p.requires_grad]"
    return None


def _settings(part: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group was told, at the beginning of its schedule."""
    kind = type(part)
    known = {**kind.COMMON, **kind.SETTINGS} if issubclass(kind, ExactOptimizer) else inspect.signature(kind).parameters
    told = {key: value for key, value in group.items() if key in known and (key not in _USUAL or value is True)}
    if issubclass(kind, ExactOptimizer):
        told = {key: value for key, value in told.items() if key not in kind.COMMON or value != kind.COMMON[key]}
    usual = defaults_of(kind)
    plain = {key: value for key, value in told.items() if value is not False or key == "decoupled_weight_decay"}
    plain = {key: value for key, value in plain.items() if value != 0 or usual.get(key, value) != 0}
    if not issubclass(kind, ExactOptimizer) and not plain.get("decoupled_weight_decay"):
        plain.pop("decoupled_weight_decay", None)
    return {**plain, "lr": group.get("initial_lr", group["lr"])}


def _group(part: Optimizer, names: list[str], group: Mapping[str, Any], common: Mapping[str, Any]) -> list[str]:
    """A group as a dictionary, with the settings that are its own."""
    own = {**{key: group[key] for key in common}, **_settings(part, group)}
    different = {key: value for key, value in own.items() if key not in common or not _equal(value, common[key])}
    other = "".join(f', "{key}": {_text(value)}' for key, value in different.items())
    rows = [""]
    for text in map(quote, names):  # side by side, in as many lines as they need
        rows += [""] if rows[-1] and len(rows[-1]) + len(text) > _WIDTH else []
        rows[-1] += f"{text}, "
    rows = [row.rstrip() for row in rows[:-1]] + [rows[-1].removesuffix(", ")]
    if len(rows) == 1 and len(rows[0]) + len(other) < 60:
        return [f'{{"params": [named[name] for name in [{rows[0]}]]{other}}},']
    return ["{", '    "params": [', "        named[name]", "        for name in [",
            *(f"            {row}" for row in rows), "        ]", f"    ]{other}", "},"]  # fmt: skip


_WIDTH = 80


def _keywords(settings: Mapping[str, Any]) -> str:
    first = {"lr": settings["lr"]} if "lr" in settings else {}
    return ", ".join(f"{key}={_text(value)}" for key, value in {**first, **settings}.items())


def _equal(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and not isinstance(value, torch.Tensor) and value == other)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_text, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, str):
        return quote(value)
    return number(value) if isinstance(value, float) and not math.isfinite(value) else repr(value)
