"""Losses of PyTorch as losses of a recipe and back: one loss, or a sum of losses on outputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from onward.errors import DataError
from onward.frameworks.torch import exact
from onward.frameworks.torch.arguments import defaults_of
from onward.frameworks.torch.exact import OwnLoss, Scaled, SumOfLosses, Watching
from onward.model import Model
from onward.recipe.losses import loss as named_loss
from onward.recipe.losses.definitions import LENGTHS
from onward.recipe.objective import terms as terms_of
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.vocabulary.torch import LOSSES

_LEGACY = ("size_average", "reduce")
"""Arguments that modules convert to a reduction."""


class TorchLoss(NamedTuple):
    """Loss of a recipe, and its PyTorch module and function."""

    name: str
    module: type[nn.Module]
    function: Callable[..., Any]


ROWS = [TorchLoss(row.name, getattr(nn, row.module), getattr(F, row.function)) for row in LOSSES if row.function]
_BY_NAME = {row.name: row for row in ROWS}
_OURS = {getattr(exact, row.module): row.name for row in LOSSES if not row.function}
"""Classes of Onward -> losses of a recipe."""

# ---- reading ---------------------------------------------------------------------------------------------------------


def read_loss(loss: Any, *, probabilities: bool = False) -> Spec:
    """Return the loss of a recipe for a module, a function of torch.nn.functional or a partial of one.

    `probabilities` is True if the targets of a cross entropy are class probabilities.
    """
    if isinstance(loss, exact.ClassesLast):
        spec = read_loss(loss.loss, probabilities=probabilities)
        return Spec(spec.name, {**spec.options, "axis": -1})
    if type(loss) in _OURS:
        settings = {key: getattr(loss, key) for key in named_loss(_OURS[type(loss)]).options}
        return Spec(_OURS[type(loss)], {key: _plain(value) for key, value in settings.items() if value is not None})
    is_partial = isinstance(loss, functools.partial)
    function = loss.func if is_partial else loss
    problems = Problems(f"the loss {getattr(function, '__name__', type(function).__name__)}")
    row = next((row for row in ROWS if type(loss) is row.module or function is row.function), None)
    if row is None:
        problems.add(
            "its formula is unknown",
            "use a loss of torch.nn, a function of torch.nn.functional or a `functools.partial` of one; "
            "or return the loss from the module, and name that output",
        )
    problems.refuse()
    assert row is not None
    is_module = type(loss) is row.module
    settings = defaults = defaults_of(row.module if is_module else row.function)
    if is_module:
        settings = {name: getattr(loss, name) for name in defaults if name not in _LEGACY}
    elif is_partial:
        if loss.args:
            problems.add("some arguments have no names", "pass the settings by name in `functools.partial`")
        settings = {**defaults, **loss.keywords}
    options = _options(row, settings, defaults, problems)
    if row.name == "cross_entropy" and probabilities:
        if options.pop("ignore_index") >= 0:
            problems.add("class probabilities have no ignore_index", "use rows of zeros")
        options["target"] = "probabilities"
    problems.refuse()
    if row.name == "smooth_l1" and not options["beta"]:
        return Spec("l1", {"reduction": options["reduction"]})
    return Spec(row.name, options)


def _options(
    row: TorchLoss, settings: Mapping[str, Any], defaults: Mapping[str, Any], problems: Problems
) -> dict[str, Any]:
    defaults_of_recipe = named_loss(row.name).options
    options = {}
    for name, value in settings.items():
        if name in defaults_of_recipe:
            if value is not None:
                options[name] = float(value) if isinstance(defaults_of_recipe[name], float) else _plain(value)
        elif value is not defaults[name] and value != defaults[name]:
            problems.add(f"`{name}={value}` has no counterpart", f"leave `{name}` out")
    if options["reduction"] == "none":
        problems.add('it has reduction="none"', 'use `reduction="mean"` or "sum"')
    return options


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


# ---- making ----------------------------------------------------------------------------------------------------------


def make_loss(terms: Any, inner: Collection[str] = ()) -> nn.Module:
    """Return the loss of a `RunState`: a PyTorch class, or a small module with the formula.

    It takes a prediction and its targets; for several terms, the results of the module and all
    targets. A loss that the model computes, and `inner` values, come from the results of the module.
    """
    losses, outputs, targets = [], [], []
    problems = Problems("the loss")
    for term in terms_of(terms):
        if term.custom is not None or term.spec.name == "custom":
            problems.add(
                "it is a custom graph", "run the training model itself: `onward.engines.start(model, engine=...)`"
            )
            continue
        is_own = term.spec.name == "value"
        loss = OwnLoss(term.output or "") if is_own else _make(term.spec)
        outputs.append(term.output)
        lengths = LENGTHS.get(loss.lengths, ()) if isinstance(loss, exact.CTC) else None
        count = len(inspect.signature(loss.forward).parameters) - 1
        targets.append(count if lengths is None else 1 + len(lengths))
        loss = loss if term.scale == 1 else Scaled(loss, term.scale)
        losses.append(Watching(term.output, loss) if term.output and term.output in inner and not is_own else loss)
    problems.refuse()
    return losses[0] if len(losses) == 1 else SumOfLosses(losses, outputs, targets)


def _make(spec: Spec) -> nn.Module:
    definition = named_loss(spec.name)
    options = {**definition.options, **spec.options}
    if definition.name not in _BY_NAME:
        return next(loss for loss, name in _OURS.items() if name == definition.name)(**options)
    if definition.name == "binary_cross_entropy" and options["clip"]:
        return exact.ClippedBCELoss(options["clip"], _tensor(options["weight"]), options["reduction"])
    if definition.name == "ctc" and (options["logits"] or options["batch_first"] or options["lengths"] != "both"):
        return exact.CTC(**options)
    module = _BY_NAME[definition.name].module
    parameters = inspect.signature(module).parameters
    weights = {name: _tensor(options[name]) for name in ("weight", "pos_weight") if name in parameters}
    loss = module(
        **{name: value for name, value in {**options, **weights}.items() if name in parameters and value is not None}
    )
    return exact.ClassesLast(loss) if options.get("axis", 1) == -1 else loss


def _tensor(weights: Any) -> torch.Tensor | None:
    return None if weights is None else torch.tensor(weights, dtype=torch.get_default_dtype())


# ---- summands --------------------------------------------------------------------------------------------------------


class Summand(NamedTuple):
    """Loss on an output, with its factor and its example targets."""

    output: str | None
    """Name of the output, or None for the only one."""
    loss: Any
    scale: float
    targets: tuple[torch.Tensor, ...]

    def spec(self) -> Any:
        """Return the summand as an entry of a recipe."""
        is_soft = bool(self.targets) and self.targets[0].is_floating_point()
        is_own = isinstance(self.loss, OwnLoss)
        spec = Spec("value") if is_own else read_loss(self.loss, probabilities=is_soft)
        options = {**spec.options, **({} if self.scale == 1 else {"scale": self.scale})}
        return Spec(spec.name, options) if self.output is None else {self.output: {"name": spec.name, **options}}


def summands(loss: Any, targets: Any) -> list[Summand]:
    """Return the summands of a loss with their targets; none if the module computes its loss."""
    if isinstance(loss, str | OwnLoss):
        return []
    if not isinstance(loss, Mapping):
        return list(_of_output(None, loss, targets))
    targets_by_output = targets if targets is not None else {}
    if not isinstance(targets_by_output, Mapping) or targets_by_output.keys() - loss.keys():
        raise DataError("`example_targets` do not fit the loss", hint=f"pass a mapping of {', '.join(map(str, loss))}")
    return [
        summand for output, term in loss.items() for summand in _of_output(output, term, targets_by_output.get(output))
    ]


def _of_output(output: str | None, loss: Any, targets: Any) -> Iterator[Summand]:
    if isinstance(loss, Watching):
        output, loss = loss.output, loss.loss
    if isinstance(loss, SumOfLosses):
        loss = list(loss.losses)
    if isinstance(loss, list):
        example_targets = targets if targets is not None else [None] * len(loss)
        if len(example_targets) != len(loss):
            raise DataError(
                f"there are {len(loss)} losses, but targets for {len(example_targets)}",
                hint="pass targets for each loss",
            )
        for term, targets_of_term in zip(loss, example_targets, strict=True):
            yield from _of_output(output, term, targets_of_term)
        return
    scale = 1.0
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], int | float):
        scale, loss = loss
    if isinstance(loss, Scaled):
        scale, loss = scale * loss.scale, loss.loss
    if isinstance(loss, OwnLoss):
        output = loss.output
    example_targets = () if targets is None else (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    yield Summand(output, loss, float(scale), example_targets)


def read_objective(loss: Any, terms: Sequence[Summand]) -> Any:
    """Return a loss as an entry of a recipe."""
    if not terms:
        return f"value:{loss.output if isinstance(loss, OwnLoss) else loss}"
    specs = [term.spec() for term in terms]
    return specs[0] if len(specs) == 1 else specs


def inner_values(loss: Any, model: Model) -> list[str]:
    """Return the values that the loss of a `RunState` reads and its model does not return."""
    outputs = {value.name for value in model.outputs}
    return list(dict.fromkeys(t.output for t in terms_of(loss) if t.output is not None and t.output not in outputs))
