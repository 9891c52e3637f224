"""Losses of PyTorch as those of a recipe, and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from onward.frameworks.torch.exact import losses as exact
from onward.recipe.losses import loss as named_loss
from onward.recipe.objective import terms as terms_of
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems

_LEGACY = ("size_average", "reduce")
"""Arguments that modules have long since turned into a reduction."""


class Row(NamedTuple):
    """A loss of a recipe, and what PyTorch has for it."""

    name: str
    module: type[nn.Module]
    function: Callable[..., Any]


ROWS = [
    Row("cross_entropy", nn.CrossEntropyLoss, F.cross_entropy),
    Row("nll", nn.NLLLoss, F.nll_loss),
    Row("mse", nn.MSELoss, F.mse_loss),
    Row("l1", nn.L1Loss, F.l1_loss),
    Row("smooth_l1", nn.SmoothL1Loss, F.smooth_l1_loss),
    Row("huber", nn.HuberLoss, F.huber_loss),
    Row("binary_cross_entropy", nn.BCELoss, F.binary_cross_entropy),
    Row("bce_with_logits", nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits),
    Row("kl_div", nn.KLDivLoss, F.kl_div),
    Row("poisson_nll", nn.PoissonNLLLoss, F.poisson_nll_loss),
    Row("gaussian_nll", nn.GaussianNLLLoss, F.gaussian_nll_loss),
    Row("ctc", nn.CTCLoss, F.ctc_loss),
    Row("triplet", nn.TripletMarginLoss, F.triplet_margin_loss),
]
_BY_NAME = {row.name: row for row in ROWS}

# ---- reading ---------------------------------------------------------------------------------------------------------


def read_loss(loss: Any, *, probabilities: bool = False) -> Spec:
    """The loss of a recipe that computes the same as a module, a function of torch.nn.functional or a partial of one.

    `probabilities` says that the targets of a cross entropy are probabilities of classes rather than their indices.
    """
    if isinstance(loss, exact.ClassesLast):
        spec = read_loss(loss.loss, probabilities=probabilities)
        return Spec(spec.name, {**spec.options, "axis": -1})
    if type(loss) in _OURS:
        return _read_ours(loss)
    problems = Problems(f"the loss {_name_of(loss)}")
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


def _read_ours(loss: nn.Module) -> Spec:
    """A module that `make_loss` made, where PyTorch has none."""
    name = _OURS[type(loss)]
    settings = {key: getattr(loss, key) for key in named_loss(name).options}
    return Spec(name, {key: _plain(value) for key, value in settings.items() if value is not None})


def _name_of(loss: Any) -> str:
    loss = loss.func if isinstance(loss, functools.partial) else loss
    return getattr(loss, "__name__", type(loss).__name__)


def _row_and_settings(loss: Any, problems: Problems) -> tuple[Row, dict[str, Any], dict[str, Any]] | None:
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


def _options(row: Row, settings: Mapping[str, Any], defaults: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
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
    if kind.name in _EXACT:
        return _EXACT[kind.name](**options)
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


_EXACT: dict[str, Callable[..., nn.Module]] = {
    "hinge": exact.Hinge,
    "squared_hinge": exact.SquaredHinge,
    "cosine": exact.CosineDistance,
}
_OURS: dict[type[nn.Module], str] = {
    exact.Hinge: "hinge",
    exact.SquaredHinge: "squared_hinge",
    exact.CosineDistance: "cosine",
    exact.ClippedBCELoss: "binary_cross_entropy",
    exact.CTC: "ctc",
}
