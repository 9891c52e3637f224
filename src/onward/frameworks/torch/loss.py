"""Losses of PyTorch as those of a recipe, and back: a loss, or summands on outputs, each with targets."""

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
from onward.frameworks.torch.exact import OwnLoss, Scaled, SumOfLosses, Watching
from onward.model import Model
from onward.recipe.losses import loss as named_loss
from onward.recipe.objective import terms as terms_of
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.vocabulary.torch import LOSSES

_LEGACY = ("size_average", "reduce")
"""Arguments that modules have long since turned into a reduction."""


class TorchLoss(NamedTuple):
    """A loss of a recipe, and its counterparts in PyTorch."""

    name: str
    module: type[nn.Module]
    function: Callable[..., Any]


ROWS = [TorchLoss(row.name, getattr(nn, row.module), getattr(F, row.function)) for row in LOSSES if row.function]
_BY_NAME = {row.name: row for row in ROWS}
_OURS = {getattr(exact, row.module): row.name for row in LOSSES if not row.function}
"""Classes of Onward, and the losses of a recipe that they are."""

# ---- reading ---------------------------------------------------------------------------------------------------------


def read_loss(loss: Any, *, probabilities: bool = False) -> Spec:
    """The loss of a recipe that computes the same as a module, a function of torch.nn.functional or a partial of one.

    `probabilities` says that the targets of a cross entropy are probabilities of classes rather than their indices.
    """
    if isinstance(loss, exact.ClassesLast):
        spec = read_loss(loss.loss, probabilities=probabilities)
        return Spec(spec.name, {**spec.options, "axis": -1})
    if type(loss) in _OURS:
        settings = {key: getattr(loss, key) for key in named_loss(_OURS[type(loss)]).options}
        return Spec(_OURS[type(loss)], {key: _plain(value) for key, value in settings.items() if value is not None})
    function = loss.func if isinstance(loss, functools.partial) else loss
    problems = Problems(f"the loss {getattr(function, '__name__', type(function).__name__)}")
    found = _row_and_settings(loss, problems)
    problems.refuse()
    assert found is not None
    row, settings, defaults = found
    options = _options(row, settings, defaults, problems)
    if row.name == "cross_entropy" and probabilities:
        if options.pop("ignore_index") >= 0:
            problems.add("class probabilities have no ignore_index", "give them rows of zeros")
        options["target"] = "probabilities"
    problems.refuse()
    if row.name == "smooth_l1" and not options["beta"]:
        return Spec("l1", {"reduction": options["reduction"]})
    return Spec(row.name, options)


def _row_and_settings(loss: Any, problems: Problems) -> tuple[TorchLoss, dict[str, Any], dict[str, Any]] | None:
    """The row of a loss, its settings, and what they are unless they are given."""
    for row in ROWS:
        if type(loss) is row.module:
            defaults = _defaults(row.module)
            return row, {name: getattr(loss, name) for name in defaults if name not in _LEGACY}, defaults
        function = loss.func if isinstance(loss, functools.partial) else loss
        if function is row.function:
            defaults = _defaults(row.function)
            given = loss.keywords if isinstance(loss, functools.partial) else {}
            if isinstance(loss, functools.partial) and loss.args:
                problems.add("some arguments have no names", "give the settings by name in `functools.partial`")
            return row, {**defaults, **given}, defaults
    problems.add(
        "what it computes is not known",
        "use a loss of torch.nn, a function of torch.nn.functional or a `functools.partial` of one; "
        "or let the module return its loss, and make that the loss",
    )
    return None


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _options(
    row: TorchLoss, settings: Mapping[str, Any], defaults: Mapping[str, Any], problems: Problems
) -> dict[str, Any]:
    known = named_loss(row.name).options
    options = {}
    for name, value in settings.items():
        if name in known:
            if value is not None:
                options[name] = _plain(value)
        elif value is not defaults[name] and value != defaults[name]:
            problems.add(f"`{name}={value}` has no counterpart", f"leave `{name}` out")
    if options["reduction"] == "none":
        problems.add("it is not one number", 'use `reduction="mean"` or "sum"')
    return {name: float(value) if isinstance(known[name], float) else value for name, value in options.items()}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


# ---- making ----------------------------------------------------------------------------------------------------------


def make_loss(terms: Any, inner: Collection[str] = ()) -> nn.Module:
    """The loss of a `RunState`: a class of PyTorch's own, or a small module with the formula.

    It takes a prediction and its targets; where there are several terms, what the module returns and all targets. A
    value that the model computes itself is picked from what it returns, and so is one that is `inner`.
    """
    made, outputs, targets = [], [], []
    problems = Problems("the loss")
    for term in terms_of(terms):
        if term.custom is not None or term.spec.name == "custom":
            problems.add(
                "it is a graph of its own", "run the training model as it is: `onward.engines.start(model, engine=...)`"
            )
            continue
        is_own = term.spec.name == "value"
        loss = exact.OwnLoss(term.output or "") if is_own else _make(term.spec)
        outputs.append(term.output)
        targets.append(len(inspect.signature(loss.forward).parameters) - 1)
        loss = loss if term.scale == 1 else exact.Scaled(loss, term.scale)
        made.append(exact.Watching(term.output, loss) if term.output and term.output in inner and not is_own else loss)
    problems.refuse()
    return made[0] if len(made) == 1 else exact.SumOfLosses(made, outputs, targets)


def _make(spec: Spec) -> nn.Module:
    kind = named_loss(spec.name)
    options = {**kind.options, **spec.options}
    if kind.name not in _BY_NAME:
        return next(made for made, name in _OURS.items() if name == kind.name)(**options)
    if kind.name == "binary_cross_entropy" and options["clip"]:
        return exact.ClippedBCELoss(options["clip"], _tensor(options["weight"]), options["reduction"])
    if kind.name == "ctc" and (options["logits"] or options["batch_first"]):
        return exact.CTC(**options)
    module = _BY_NAME[kind.name].module
    taken = inspect.signature(module).parameters
    weights = {name: _tensor(options[name]) for name in ("weight", "pos_weight") if name in taken}
    made = module(
        **{name: value for name, value in {**options, **weights}.items() if name in taken and value is not None}
    )
    return exact.ClassesLast(made) if options.get("axis", 1) == -1 else made


def _tensor(weights: Any) -> torch.Tensor | None:
    return None if weights is None else torch.tensor(weights, dtype=torch.get_default_dtype())


# ---- summands --------------------------------------------------------------------------------------------------------


class Summand(NamedTuple):
    """A loss on an output, times a number, and the targets that were given for the example."""

    output: str | None
    """None where there is only one."""
    loss: Any
    scale: float
    targets: tuple[torch.Tensor, ...]

    def value(self, prediction: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.loss(prediction, *targets) * self.scale

    def spec(self) -> Any:
        """The summand in the words of a recipe."""
        is_soft = bool(self.targets) and self.targets[0].is_floating_point()
        is_own = isinstance(self.loss, OwnLoss)
        spec = Spec("value") if is_own else read_loss(self.loss, probabilities=is_soft)
        options = {**spec.options, **({} if self.scale == 1 else {"scale": self.scale})}
        return Spec(spec.name, options) if self.output is None else {self.output: {"name": spec.name, **options}}


def summands(loss: Any, targets: Any) -> list[Summand]:
    """The summands of a loss as `from_torch` takes it, with their targets; none, if the module computes its loss."""
    if isinstance(loss, str | OwnLoss):
        return []
    if not isinstance(loss, Mapping):
        return list(_of_output(None, loss, targets))
    given = targets if targets is not None else {}
    if not isinstance(given, Mapping) or given.keys() - loss.keys():
        raise DataError(
            "the example of targets does not fit the loss",
            hint=f"give a mapping, as the loss is: of {', '.join(map(str, loss))}",
        )
    return [one for output, term in loss.items() for one in _of_output(output, term, given.get(output))]


def _of_output(output: str | None, loss: Any, targets: Any) -> Iterator[Summand]:
    if isinstance(loss, SumOfLosses):
        loss = list(loss.losses)
    if isinstance(loss, list):
        given = targets if targets is not None else [None] * len(loss)
        if len(given) != len(loss):
            raise DataError(
                f"there are {len(loss)} losses, but {len(given)} examples of targets", hint="give targets for each loss"
            )
        for one, its_targets in zip(loss, given, strict=True):
            yield from _of_output(output, one, its_targets)
        return
    if isinstance(loss, Watching):
        yield from _of_output(loss.output, loss.loss, targets)
        return
    scale = 1.0
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], int | float):
        scale, loss = loss
    if isinstance(loss, Scaled):
        scale, loss = scale * loss.scale, loss.loss
    if isinstance(loss, OwnLoss):
        output = loss.output
    given = () if targets is None else (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    yield Summand(output, loss, float(scale), given)


def read_objective(loss: Any, terms: Sequence[Summand]) -> Any:
    """A loss in the words of a recipe."""
    if not terms:
        return f"value:{loss.output if isinstance(loss, OwnLoss) else loss}"
    specs = [term.spec() for term in terms]
    return specs[0] if len(specs) == 1 else specs


def inner_values(loss: Any, model: Model) -> list[str]:
    """The values that the loss of a `RunState` looks at, and that are no outputs of its model."""
    outputs = {value.name for value in model.outputs}
    return list(dict.fromkeys(t.output for t in terms_of(loss) if t.output is not None and t.output not in outputs))
