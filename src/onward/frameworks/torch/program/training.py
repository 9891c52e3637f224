"""Expressions that create an optimizer, a scheduler and a loss."""

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
from onward.frameworks.torch.arguments import defaults_of
from onward.frameworks.torch.exact import ExactOptimizer, MasterWeights, Together, float32_copies, scale_to_norm
from onward.frameworks.torch.loss import GraphLoss
from onward.frameworks.torch.optimizer import clipped_optimizer, clips_of
from onward.vocabulary import rate_formulas
from onward.vocabulary.torch_schedules import one_cycle, one_cycle_arguments

_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")
"""Settings that select an implementation, written only where they are on."""
_WIDTH = 80


class Definitions:
    """Functions of a program, and what they need of Onward's own classes."""

    def __init__(self) -> None:
        self.borrowed: list[Any] = []
        """Classes and functions whose source the program must contain."""
        self.replaced: dict[str, str] = {}
        """Name -> text of definitions that differ from Onward's own."""

    def optimizer(self, optimizer: Optimizer, module: nn.Module) -> list[str]:
        """Return lines that create and return the optimizer of a `module`."""
        named, inner = dict(module.named_parameters()), clipped_optimizer(optimizer)
        hook = ["optimizer.register_step_pre_hook(clip)"] if clips_of(inner) else []
        if isinstance(optimizer, MasterWeights):
            self.borrowed += [float32_copies, MasterWeights]
            optimizer.settle()
            names = {id(optimizer.copies[x]): name for name, x in named.items() if x in optimizer.copies}
            has_all = _all_parameters(inner, names, module) == "module.parameters()"
            *lines, expression = self._optimizer(inner, names, "named.values()" if has_all else None)
            start = ["parameters = dict(module.named_parameters())", "named = float32_copies(parameters)"]
            end = [f"optimizer = {expression}", *hook, "return MasterWeights(optimizer, parameters, named)"]
        else:
            names = {id(x): name for name, x in named.items()}
            *lines, expression = self._optimizer(optimizer, names, _all_parameters(optimizer, names, module))
            start = ["named = dict(module.named_parameters())"] if "named[" in "".join(lines) else []
            end = [f"optimizer = {expression}", *hook, "return optimizer"] if hook else [f"return {expression}"]
        return [*start, *lines, *end]

    def _optimizer(self, optimizer: Optimizer, names: Mapping[int, str], parameters: str | None) -> list[str]:
        """Return lines, and the expression of the optimizer, of all `parameters` or of groups."""
        members = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
        lines = []
        texts: list[str] = []
        for member, groups in zip(members, _parameter_names(optimizer, names), strict=True):
            common = _settings(member, member.param_groups[0])
            argument = parameters or ("groups" if len(members) == 1 else f"groups_{len(texts) + 1}")
            if parameters is None:
                rows = [_group(member, *row, common) for row in zip(groups, member.param_groups, strict=True)]
                lines += [f"{argument} = [", *(f"    {line}" for row in rows for line in row), "]"]
            texts.append(f"{self._class(type(member))}({argument}, {_keywords(common)})")
        if not isinstance(optimizer, Together):
            return [*lines, *texts]
        self.borrowed.append(Together)
        return [*lines, f"Together([{', '.join(texts)}])"]

    def _class(self, optimizer_class: type[Any]) -> str:
        name = optimizer_class.__name__
        if issubclass(optimizer_class, ExactOptimizer):
            self.borrowed.append(optimizer_class)
            return name
        if not hasattr(torch.optim, name):
            raise UnsupportedError(
                f"a program of PyTorch alone cannot contain a {name}, which executes a graph",
                hint="keep the training model, or use an optimizer of torch.optim",
            )
        return f"torch.optim.{name}"

    def clip(self, optimizer: Optimizer) -> list[str]:
        """Return the function that clips before a step, or nothing."""
        hooks = clips_of(clipped_optimizer(optimizer))
        if not hooks:
            return []
        settings = hooks[0].settings
        key = next(key for key in ("value", "norm", "tensor_norm") if key in settings)
        function = "nn.utils.clip_grad_value_" if key == "value" else "nn.utils.clip_grad_norm_"
        if key != "value" and settings.get("variant") == "optax":
            self.borrowed.append(scale_to_norm)
            function = scale_to_norm.__name__
        limit = number(float(settings[key]))
        calls = [f"{function}(parameters, {limit})"]
        if key == "tensor_norm":
            calls = ["for parameter in parameters:", f"    {function}([parameter], {limit})"]
        return [
            "def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:",
            '    """Clip gradients before each step of the optimizer."""',
            '    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]',
            *(f"    {line}" for line in calls),
        ]

    # ---- schedulers --------------------------------------------------------------------------------------------------

    def scheduler(self, scheduler: LRScheduler) -> str:
        """Return the expression of a scheduler."""
        scheduler_class = type(scheduler)
        if isinstance(scheduler, lr_scheduler.LambdaLR):
            return self._factors(scheduler.lr_lambdas)
        if isinstance(scheduler, lr_scheduler.SequentialLR):
            inner = ", ".join(map(self.scheduler, scheduler._schedulers))
            return f"lr_scheduler.SequentialLR(optimizer, [{inner}], {scheduler._milestones!r})"
        if isinstance(scheduler, lr_scheduler.OneCycleLR):
            groups = scheduler.optimizer.param_groups
            arguments = one_cycle_arguments(one_cycle(vars(scheduler), groups[0])[0][0].options, 0) or {}
            rates = {"max_lr": [group["max_lr"] for group in groups]}
            return f"lr_scheduler.OneCycleLR(optimizer, {_keywords({**rates, **arguments})})"
        names = inspect.signature(scheduler_class).parameters
        settings = {name: getattr(scheduler, name) for name in names if name not in ("optimizer", "last_epoch")}
        if isinstance(scheduler, lr_scheduler.MultiStepLR):
            settings["milestones"] = sorted(scheduler.milestones.elements())
        return f"lr_scheduler.{scheduler_class.__name__}(optimizer, {_keywords(settings)})"

    def _factors(self, factors: list[rate_formulas.Factor]) -> str:
        used = {schedule["name"]: rate_formulas.RATES[schedule["name"]] for schedule in factors[0].schedules}
        self.borrowed += [*used.values(), rate_formulas.Factor]
        table = ", ".join(f'"{name}": {function.__name__}' for name, function in used.items())
        self.replaced["RATES"] = f"RATES = {{{table}}}"
        listed = ", ".join(f"Factor({number(factor.base)}, schedules)" for factor in factors)
        return f"lr_scheduler.LambdaLR(optimizer, [{listed}])"

    # ---- losses ------------------------------------------------------------------------------------------------------

    def loss(self, loss: nn.Module) -> str:
        """Return the expression of a loss."""
        if isinstance(loss, GraphLoss):
            return "Loss()"
        loss_class = type(loss)
        arguments = []
        for name, parameter in inspect.signature(loss_class).parameters.items():
            value = getattr(loss, name, parameter.default)
            if parameter.default is parameter.empty or not _equal(value, parameter.default):
                arguments.append(f"{name}={self._argument(value)}")
        is_ours = loss_class.__module__.startswith("onward")
        if is_ours:
            self.borrowed.append(loss_class)
        return f"{'' if is_ours else 'nn.'}{loss_class.__name__}({', '.join(arguments)})"

    def _argument(self, value: Any) -> str:
        if isinstance(value, nn.ModuleList):
            return f"[{', '.join(map(self.loss, value))}]"
        if isinstance(value, nn.Module):
            return self.loss(value)
        if isinstance(value, torch.Tensor):
            return f"torch.tensor({_text(value.tolist())})"
        return _text(value)


def schedules_of(scheduler: LRScheduler) -> list[str]:
    """Return the line that defines the schedules of a `Factor`, or nothing."""
    if not isinstance(scheduler, lr_scheduler.LambdaLR):
        return []
    schedules = scheduler.lr_lambdas[0].schedules
    rows = ("{" + ", ".join(f'"{k}": {_text(v)}' for k, v in row.items()) + "}" for row in schedules)
    return [f"schedules = [{', '.join(rows)}]"]


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[list[str]]]:
    """Return parameter names by optimizer and group."""
    members = optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]
    return [[[names[id(p)] for p in group["params"]] for group in member.param_groups] for member in members]


def _all_parameters(optimizer: Optimizer, by_id: Mapping[int, str], module: nn.Module) -> str | None:
    """Return an expression for all parameters, if one group has them in order."""
    listed = _parameter_names(optimizer, by_id)
    if len(listed) > 1 or len(listed[0]) > 1:
        return None
    names = listed[0][0]
    if names == [name for name, _ in module.named_parameters()]:
        return "module.parameters()"
    if names == [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
        return "[p for p in module.parameters() if p.requires_grad]"
    return None


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group at the start of its schedule, without those off by default."""
    optimizer_class = type(optimizer)
    common: dict[str, Any] = {}
    names, defaults = inspect.signature(optimizer_class).parameters.keys(), defaults_of(optimizer_class)
    if issubclass(optimizer_class, ExactOptimizer):
        common = optimizer_class.COMMON
        defaults = {**common, **optimizer_class.SETTINGS}
        names = defaults.keys()
    settings = {
        key: value
        for key, value in group.items()
        if key in names
        and (key not in _IMPLEMENTATION or value is True)
        and (key not in common or value != defaults[key])
        and (value != 0 or defaults.get(key, value) != 0)
    }
    return {**settings, "lr": group.get("initial_lr", group["lr"])}


def _group(optimizer: Optimizer, names: list[str], group: Mapping[str, Any], common: Mapping[str, Any]) -> list[str]:
    """Return a group as a dictionary, with the settings that differ from the common ones."""
    settings = {**{key: group[key] for key in common}, **_settings(optimizer, group)}
    different = {key: value for key, value in settings.items() if key not in common or not _equal(value, common[key])}
    other = "".join(f', "{key}": {_text(value)}' for key, value in different.items())
    rows = [""]
    for text in map(quote, names):
        rows += [""] if rows[-1] and len(rows[-1]) + len(text) > _WIDTH else []
        rows[-1] += f"{text}, "
    rows = [row.rstrip() for row in rows[:-1]] + [rows[-1].removesuffix(", ")]
    if len(rows) == 1 and len(rows[0]) + len(other) < 60:
        return [f'{{"params": [named[name] for name in [{rows[0]}]]{other}}},']
    return ["{", '    "params": [', "        named[name]", "        for name in [",
            *(f"            {row}" for row in rows), "        ]", f"    ]{other}", "},"]  # fmt: skip


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
