"""Losses of PyTorch as losses of a recipe or as graphs, and back: one loss, or a sum of losses on outputs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from onward.build import Names
from onward.errors import DataError, UnsupportedError, list_names
from onward.frameworks.torch import exact
from onward.frameworks.torch.arguments import Flat, defaults_of, named_tensors
from onward.frameworks.torch.exact import OwnLoss, Scaled, SumOfLosses, Watching
from onward.frameworks.torch.exporter import export
from onward.frameworks.torch.module import to_module
from onward.model import Model
from onward.recipe.losses import loss as named_loss
from onward.recipe.losses.definitions import LENGTHS
from onward.recipe.objective import terms as terms_of
from onward.recipe.spec import Spec
from onward.run_state.problems import Problems
from onward.run_state.reading import LossTerm
from onward.run_state.state import RUN_ITSELF
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


def make_loss(terms: Any, inner: Collection[str] = (), outputs: Collection[str] = ()) -> nn.Module:
    """Return the loss of a `RunState`: a PyTorch class, or a small module with the formula.

    It takes a prediction and its targets; for several terms, the results of the module and all
    targets. A loss that the model computes, and `inner` values, come from the results of the module.
    A graph reads `outputs` of the model and targets.
    """
    if isinstance(terms, Model):
        return GraphLoss(terms, outputs)
    losses, predictions, targets = [], [], []
    for term in terms_of(terms):
        if term.custom is not None or term.spec.name == "custom":
            raise UnsupportedError("the loss is a custom graph among others", hint=RUN_ITSELF)
        is_own = term.spec.name == "value"
        loss = OwnLoss(term.output or "") if is_own else _make(term.spec)
        predictions.append(term.output)
        lengths = LENGTHS.get(loss.lengths, ()) if isinstance(loss, exact.CTC) else None
        count = len(inspect.signature(loss.forward).parameters) - 1
        targets.append(count if lengths is None else 1 + len(lengths))
        loss = loss if term.scale == 1 else Scaled(loss, term.scale)
        losses.append(Watching(term.output, loss) if term.output and term.output in inner and not is_own else loss)
    return losses[0] if len(losses) == 1 else SumOfLosses(losses, predictions, targets)


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

    def known(self) -> Spec:
        """Return the loss of a recipe."""
        is_soft = bool(self.targets) and self.targets[0].is_floating_point()
        return Spec("value") if isinstance(self.loss, OwnLoss) else read_loss(self.loss, probabilities=is_soft)

    @property
    def is_function(self) -> bool:
        """True for a loss that is not in torch.nn, which gets all that the module returns, or its output."""
        try:
            self.known()
        except UnsupportedError:
            return True
        return False

    def spec(self, trace: Callable[[Summand], Any] | None = None) -> Any:
        """Return the summand as an entry of a recipe; `trace` returns the graph of a function."""
        if trace is not None and self.is_function:
            return trace(self)
        spec = self.known()
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


def read_objective(loss: Any, terms: Sequence[Summand], trace: Callable[[Summand], Any] | None = None) -> Any:
    """Return a loss as an entry of a recipe; `trace` returns the graph of a function."""
    if not terms:
        return f"value:{loss.output if isinstance(loss, OwnLoss) else loss}"
    specs = [term.spec(trace) for term in terms]
    return specs[0] if len(specs) == 1 else specs


def inner_values(loss: Any, model: Model) -> list[str]:
    """Return the values that the loss of a `RunState` reads and its model does not return."""
    if isinstance(loss, Model):
        return []
    outputs = {value.name for value in model.outputs}
    return list(dict.fromkeys(t.output for t in terms_of(loss) if t.output is not None and t.output not in outputs))


# ---- functions -------------------------------------------------------------------------------------------------------


def takes_all(terms: Sequence[LossTerm]) -> bool:
    """True if the loss of `make_loss` takes all that the module returns, and all targets."""
    is_graph = any(term.name == "custom" or (term.name != "value" and not term.inputs) for term in terms)
    return is_graph or (len(terms) == 1 and terms[0].name == "value")


class GraphLoss(nn.Module):  # type: ignore[misc]
    """Loss that is a graph, of what a module returns and of targets."""

    def __init__(self, graph: Model, outputs: Collection[str]):
        super().__init__()
        self.graph = to_module(graph, trainable=())
        self.outputs = [value.name or "" for value in graph.inputs if value.name in outputs]

    def forward(self, result: torch.Tensor | Mapping[str, torch.Tensor], *targets: torch.Tensor) -> torch.Tensor:
        outputs = [result[name] if isinstance(result, Mapping) else result for name in self.outputs]
        return self.graph(*outputs, *targets)


class _Loss(nn.Module):  # type: ignore[misc]
    def __init__(self, summand: Summand):
        super().__init__()
        self.loss, self.scale = summand.loss, summand.scale

    def forward(self, result: Any, *targets: torch.Tensor) -> torch.Tensor:
        loss = self.loss(result, *targets)
        return loss if self.scale == 1 else loss * self.scale


def trace_loss(summand: Summand, module: nn.Module, example_inputs: Any, model: Model, *, fixed: bool = False) -> Model:
    """Return the graph of a loss that is a function of what a module returns, or of its output, and of targets.

    - `model`: captured module, whose outputs name inputs of the graph
    - `fixed`: the user has said which axes are dynamic, so the first axis of a target may be none
    """
    name = getattr(summand.loss, "__name__", type(summand.loss).__name__)
    if isinstance(summand.loss, GraphLoss):
        return summand.loss.graph.to_model()
    if not callable(summand.loss):
        raise UnsupportedError(f"the loss {name} is not a function", hint="pass `nn.MSELoss()`, or a function")
    layers = summand.loss.modules() if isinstance(summand.loss, nn.Module) else ()
    if switched := [layer for layer in layers if isinstance(layer, _BatchNorm) and layer.training]:
        raise UnsupportedError(
            f"the loss {name} has a {type(switched[0]).__name__}, whose statistics a loss cannot hold",
            hint="return the loss from the module, and name that output: `loss='output'`",
        )
    forward = Flat(copy.deepcopy(module), example_inputs)
    with torch.no_grad(), torch.random.fork_rng():
        result = forward.result(*forward.inputs.values())
    outputs = dict(zip((value.name or "" for value in model.outputs), named_tensors(result).values(), strict=True))
    if summand.output is not None:
        outputs = {summand.output: outputs[summand.output]}
        result = outputs[summand.output]
    names = [*outputs, *_target_names(summand, name, model.names())]
    flat = Flat(_Loss(summand), (result, *summand.targets))
    flat.inputs = dict(zip(names, flat.inputs.values(), strict=True))
    axes: dict[str, dict[int, str]] = {
        value.name or "": {axis: str(size) for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)}
        for value in model.outputs
        if value.name in outputs
    }
    sizes = {outputs[output].shape[axis]: size for output in axes for axis, size in reversed(axes[output].items())}
    for target, tensor in zip(names[len(outputs) :], summand.targets, strict=True):
        own = enumerate(tensor.shape if fixed else tensor.shape[:1])
        axes[target] = {axis: sizes[size] for axis, size in own if size in sizes}
    graph, _ = export(flat, axes, f"the loss {name}", may_be_fixed=names[len(outputs) :])
    shapes = [value.shape for value in graph.outputs]
    if len(shapes) != 1 or shapes[0] is None or any(size != 1 for size in shapes[0]):
        raise UnsupportedError(
            f"the loss {name} returns {list_names([str(shape) for shape in shapes], 3)}, not one number",
            hint="return a mean or a sum: `loss.mean()`",
        )
    graph.graph.name = name
    return graph


def _target_names(summand: Summand, name: str, taken: Names) -> list[str]:
    """Return the names of the targets of a function: its own, unless the model has them."""
    function = summand.loss.forward if isinstance(summand.loss, nn.Module) else summand.loss
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind <= p.VAR_POSITIONAL][1:]
    except (TypeError, ValueError):  # written in C
        parameters = []
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if len(required) > len(summand.targets):
        raise DataError(
            f"the loss {name} takes targets: {list_names(required, 3)}",
            hint="pass an example of each: `example_targets=...`",
        )
    if len(summand.targets) == 1:
        names = ["target"]
    else:
        own = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        names = [own[i] if i < len(own) else f"target_{i}" for i in range(len(summand.targets))]
    return [taken.fresh(name) for name in names]
