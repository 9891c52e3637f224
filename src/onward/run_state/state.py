"""A training run in words that no framework owns: what training objects are read into, and made from.

Objects of a framework are read in three parts: the forward pass becomes an inference model whose initializers have
the names of the framework's parameters; loss, optimizer and schedule become words of a recipe; the optimizer's state
becomes slots. `to_training_model` makes a training model of these, and `from_training_model` finds them in one, whoever
wrote it.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onward.build import DOMAIN
from onward.errors import UnsupportedError, list_names
from onward.inspect import describe
from onward.inspect.summary_fields import Group as Described
from onward.inspect.summary_fields import LossTerm, Training
from onward.model import Model, Step
from onward.model.core import string
from onward.model.state import STEP, states
from onward.options import Variance
from onward.recipe import prepare
from onward.recipe.objective import terms
from onward.recipe.optimizers import FunctionOptimizer, optimizer
from onward.recipe.optimizers.clip import scale_to_norm_optax
from onward.recipe.spec import Spec
from onward.rules.quantization import rounds, rounds_only_in_pairs
from onward.run_state.completeness import differences
from onward.run_state.optimizer_function import function_of
from onward.run_state.problems import Problems
from onward.transform.quantized import RANGE_KEY
from onward.transform.training import without_steps


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one optimizer updates with the same settings."""

    optimizer: Spec | FunctionOptimizer
    """As a recipe has it. All numbers and choices that matter are given, `variant` among them."""
    parameters: Sequence[str]

    @property
    def spec(self) -> Spec:
        """The optimizer by its name, where it has one."""
        if isinstance(self.optimizer, FunctionOptimizer):
            raise UnsupportedError(
                f"the optimizer `{self.optimizer.name}` is a function, and none that has a name in recipes",
                hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
            )
        return self.optimizer

    @property
    def lr(self) -> float:
        if isinstance(self.optimizer, FunctionOptimizer):
            return self.optimizer.lr
        if "lr" not in self.optimizer.options:
            raise UnsupportedError(
                f"the training model has no learning rate for {list_names(self.parameters, 3)}",
                hint="`onward check` names the damage",
            )
        return float(self.optimizer.options["lr"])


@dataclasses.dataclass(frozen=True)
class RunState:
    """A training run at some moment."""

    model: Model
    """The inference model, with its weights as they are now."""
    loss: Any
    """What `prepare` takes: such as `Spec("cross_entropy", {"label_smoothing": 0.1})`, or a list of several."""
    groups: Sequence[Group]
    state: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """What else there is beside the weights, by the names of a training model: slots of optimizers
    (`fc.weight/exp_avg`), averages, random keys. What is missing has not begun yet."""
    step: int = 0
    """Updates made so far."""
    schedule: Sequence[Spec] = ()
    """Of the learning rate, by updates; each but the last says `until` which."""
    clip: Mapping[str, Any] | None = None
    """Such as `{"norm": 1.0, "variant": "torch"}`."""
    statistics: Variance = "population"
    """Which variance BatchNormalization keeps."""
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Whatever else `prepare` is told: accumulate, ema, seed."""

    @property
    def parameters(self) -> list[str]:
        return [name for group in self.groups for name in group.parameters]


def to_training_model(run: RunState) -> Model:
    """The training model that goes on where a run is."""
    if not run.parameters:
        raise nothing_learns()
    model = prepare(
        run.model,
        loss=run.loss,
        optimizer=run.groups[0].optimizer,
        groups=[_group_settings(group) for group in run.groups],
        trainable=[glob.escape(name) for name in run.parameters],
        schedule=list(run.schedule) or None,
        clip=run.clip,
        variance=run.statistics,
        **run.recipe,
    )
    for name, array in run.state.items():
        model.set(name, array)
    model.set(STEP, np.int64(run.step))
    return model


def nothing_learns() -> UnsupportedError:
    return UnsupportedError(
        "no parameter of the optimizer has an effect on the loss", hint="check which loss it is, and what is frozen"
    )


def _group_settings(group: Group) -> dict[str, Any]:
    match = [glob.escape(name) for name in group.parameters]
    return {"match": match, "optimizer": group.optimizer}


def step_of(model: Model, asked: int | None = None) -> int:
    """The step of a training model that a run is made of: the one that was asked for, or the only one."""
    if not model.steps:
        raise UnsupportedError(
            "this is an inference model: it holds no training that could be carried over",
            hint="make it a training model first: `onward prepare`, or `onward.prepare`",
        )
    if asked is None and len(model.steps) > 1:
        names = ", ".join(f"`{step.algorithm.name}`" for step in model.steps)
        raise UnsupportedError(
            f"the training model has {len(model.steps)} steps ({names}), and a run of a framework has one",
            hint="name one with `step=...`, or run them as they are: `onward.engines.start(model, engine=...)`",
        )
    return model.steps.index(model.step(asked or 0))


def only_step_of(model: Model, asked: int | None = None) -> int:
    """The step of a training model that has no other: for frameworks without a place for what others change."""
    index = step_of(model, asked)
    if len(model.steps) > 1:
        raise UnsupportedError(
            f"the training model has {len(model.steps)} steps, and the others would be left behind",
            hint="`onward.to_tensorflow(training, step=...)` keeps them; so does every engine: `onward.engines.start`",
        )
    return index


def refuse_rounding(model: Model, *, in_pairs: bool) -> None:
    """Refuse a model whose gradients go straight through rounding, where a framework's own would be zero.

    `in_pairs`: whether it takes QuantizeLinear and DequantizeLinear, one after the other, for what they stand for.
    """
    if any(RANGE_KEY in node.metadata_props for node in model.graph):
        raise UnsupportedError(
            "the ranges that the model rounds to change in training, which objects of a framework would not do",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )
    if rounds(model) and not (in_pairs and rounds_only_in_pairs(model)):
        raise UnsupportedError(
            "the model rounds numbers to integers: gradients pass straight through that, and the framework's own would "
            "be zero",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )


def from_training_model(model: Model, index: int = 0, *, forward: bool = True) -> RunState:
    """The run that a training model holds, with its numbers as they are now, if it is the whole of it.

    Without `forward` the caller executes the forward pass and the loss as the file has them, and only the update is
    what the run says.
    """
    run = _read_run_state(model, step_of(model, index))
    refuse_rounding(model, in_pairs=forward)
    if not forward:
        _check_differentiated(model.step(index))
    if forward and any(term.spec.name == "custom" for term in terms(run.loss)):
        raise UnsupportedError(
            "the loss is a graph of its own, of which no framework has an object",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )
    if forward and any("constant" in fact for fact in model.step(index).fact("train.loss")):
        raise UnsupportedError(
            "the loss compares an output with a number that is no data, of which no framework has an object",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )
    left_out = differences(model, index, _again(run, forward), forward=forward)
    if left_out:
        words = [_WORDS[key] for key in model.step(index).fact("train.recipe") or {} if key in _WORDS and forward]
        problems = Problems("the training model")
        for what in words or [f"what it does to {' and '.join(left_out[:3])} is not what its recipe says"]:
            problems.add(what, "run it as it is: `onward.engines.start(model, engine=...)`")
        problems.refuse()
    return run


def _check_differentiated(step: Step) -> None:
    """A framework differentiates the loss that is reported."""
    reported = {value.name for value in step.algorithm.outputs} - {*step.update.values()}
    others = [y for node in step.gradients() if (y := string(node, "y")) not in reported]
    if others or len(step.gradients()) != 1:
        is_scaled = "loss_scale" in (step.fact("train.recipe") or {})
        what = (
            "it scales its loss" if is_scaled else f"it differentiates {list_names(others, 3) or 'more than its loss'}"
        )
        problems = Problems("the training model")
        problems.add(what, "run it as it is: `onward.engines.start(model, engine=...)`")
        problems.refuse()


_WORDS = {
    "augment": "it augments its data",
    "prune": "it prunes its weights",
    "teacher": "it learns from a teacher",
    "sample_weight": "it weights its samples",
}
"""Parts of a recipe that no framework has an object for."""


def _again(run: RunState, forward: bool) -> Model:
    """The training model that a run would become, without its state; if its loss is not to be compared, with any."""
    if forward:
        return to_training_model(dataclasses.replace(run, state={}))
    watched = [term.output for term in terms(run.loss) if term.output is not None]
    floating = [value.name or "" for value in run.model.outputs if value.dtype and value.dtype.is_floating_point()]
    anything = [{name: "mse"} for name in dict.fromkeys([*watched, *floating])]
    return to_training_model(dataclasses.replace(run, state={}, loss=anything))


def is_plain(model: Model, index: int, run: RunState) -> bool:
    """Whether a run is the whole of a step, with its forward pass and its loss."""
    named = all(term.spec.name != "custom" for term in terms(run.loss))
    return named and not differences(model, index, _again(run, forward=True), forward=True)


def _read_run_state(model: Model, index: int) -> RunState:
    """What a converter knows to look for."""
    training = describe(model).steps[index]
    unknown = [group.name for group in training.groups if group.optimizer is None]
    if unknown or not training.loss.terms:
        what = f"the updates of {', '.join(unknown)} are" if unknown else "the loss is"
        raise UnsupportedError(
            f"{what} written out in plain operators, of which no framework has an object",
            hint="run the training model as it is: `onward.engines.start(model, engine=...)`",
        )
    own = [state for state in states(model, index) if state.role not in ("parameter", "statistics")]
    recipe = model.step(index).fact("train.recipe") or {}
    return RunState(
        model=without_steps(model),
        loss=[_term(term) for term in training.loss.terms],
        groups=[Group(optimizer_of(model, index, group), group.parameters) for group in training.groups],
        state={state.name: state.array for state in own if state.name != STEP},
        step=int(training.progress.step or 0),
        schedule=[Spec(part.name, {**part.numbers, **part.choices}) for part in training.schedule],
        clip=_clip(training),
        statistics=recipe.get("variance", "population"),
        recipe={key: recipe[key] for key in _KEPT if key in recipe},
    )


_KEPT = ("accumulate", "ema", "seed", "loss_scale", "master_weights")
"""What `prepare` was told beside what a run says in its own words."""


def _term(term: LossTerm) -> Any:
    if term.name == "value" and term.scale == 1:
        return f"value:{term.output}"
    scale = {} if term.scale == 1 else {"scale": term.scale}
    return {term.output: {"name": term.name, **term.options, **scale}}


def optimizer_of(model: Model, index: int, group: Described) -> Spec | FunctionOptimizer:
    """Its settings but for those that this kind has no use for as it is configured; or a graph."""
    if group.is_function:
        return function_of(model, index, group)
    kind = optimizer(str(group.optimizer))
    choices = {key: value for key, value in group.options.items() if key in kind.choices}
    numbers = {key: value for key, value in group.hyper.items() if key in kind.hyper and isinstance(value, int | float)}
    default = kind.configure()  # some choices would be refused without the numbers that go with them
    complete = dataclasses.replace(default, values={**kind.hyper, **numbers}, options={**default.options, **choices})
    used = {key: value for key, value in numbers.items() if key in complete.effective}
    return Spec(kind.name, {**used, **choices})


def _clip(training: Training) -> dict[str, Any] | None:
    clip = training.clip
    if clip is None:
        return None
    return {clip.kind: clip.limit, **({} if clip.kind == "value" else {"variant": _variant_of_clip(clip.operator)})}


def _variant_of_clip(operator: str) -> str:
    return "optax" if operator == f"{DOMAIN}.{scale_to_norm_optax.name}" else "torch"
