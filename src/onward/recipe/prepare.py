"""Training models from inference models and recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from onward.arguments import is_empty
from onward.build import Builder, Expr
from onward.errors import RecipeError, list_names, warn
from onward.model import TRAINING_DOMAIN, Model, Source, load
from onward.model.checks import check_signatures
from onward.model.core import link_gradients, unlink_gradients, values
from onward.model.serde import stamp
from onward.model.walk import ancestors
from onward.options import Fields, StepOptions, documented, with_options
from onward.recipe import lora, objective, prune, quantize
from onward.recipe.distill import Distillation
from onward.recipe.exporter_notes import restore
from onward.recipe.head import replace_head
from onward.recipe.initialize import bind_initial_value, by_pattern, check_patterns
from onward.recipe.interface import with_samples_first
from onward.recipe.objective import unsuitable
from onward.recipe.optimizers.graph_optimizer import FunctionOptimizer
from onward.recipe.optimizers.groups import (
    OptimizerGroup,
    divide_by_depth,
    given_optimizer,
    groups,
    opset_of,
    patterns,
    with_rate,
)
from onward.recipe.preprocessing import join
from onward.recipe.preprocessing.augment import Augmentation
from onward.recipe.preprocessing.pipeline import by_input
from onward.recipe.quantize import ranges
from onward.recipe.spec import Spec, arguments
from onward.recipe.step_builder import StepBuilder
from onward.recipe.trainable import Selection, as_patterns, roles, select
from onward.recipe.training_mode import (
    NEXT_KEY,
    bind_statistics,
    fix_statistics,
    functions_to_inline,
    open_linear,
    training_forward,
)
from onward.recipe.update import UpdateBuilder
from onward.standard import OLDEST_OPSET
from onward.transform.bodies import lift_from_bodies, return_to_bodies
from onward.transform.inline import inline
from onward.transform.opset import convert_opset, of_one_opset
from onward.transform.padding import write_padding
from onward.transform.quantized import RANGE_KEY


@documented
@dataclasses.dataclass(frozen=True, repr=False)
class Recipe(Fields, StepOptions):
    """A recipe: everything that turns an inference model into a training model.

        recipe = onward.Recipe(loss="cross_entropy", optimizer="adamw:lr=1e-3", clip="norm:1")
        training = recipe.apply(onward.load("digits.onnx"))

    `dataclasses.replace(recipe, seed=1)` returns a changed copy.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolved()  # raises if fields contradict one another

    def _resolved(self) -> dict[str, Any]:
        """Return the recipe with fields that have several spellings in one form."""
        optimizer = self.optimizer if self.lr is None else with_rate(self.optimizer, self.lr)
        return {"init": by_pattern(self.init), "optimizer": optimizer, "lr": None}

    def apply(self, model: Model) -> Model:
        """Return the training model; `model` is not changed."""
        if model.steps and not self.append:
            raise RecipeError(
                "the model already carries its training",
                hint="strip it first (`onward strip`), or add a step with `append=True` (`--append`)",
            )
        model = quantize.dequantize(of_one_opset(model, OLDEST_OPSET)) if self.dequantize else model
        model = with_samples_first(model, self.batch_axis, self.constants).copy()
        lifted = lift_from_bodies(model)
        restored = restore(model)
        model, teaching = self._adapt(model), self._distillation()
        lifted |= lift_from_bodies(model)  # a new head or adapters may have put some back
        before = None if self.preprocess is None else join.open_preprocessing(self.preprocess)
        resolved = self._resolved()
        optimizer = given_optimizer(resolved["optimizer"])
        needed = 0 if before is None else join.opset_of(before)
        needed = max(needed, opset_of(optimizer, self.groups), teaching.opset if teaching else 0)
        model = of_one_opset(model, OLDEST_OPSET)
        model = convert_opset(model, max(model.opset, needed))
        if hidden := functions_to_inline(model):
            model = inline(model, hidden)
        if written := write_padding(model):
            warn(f"SAME padding of {list_names(written, 3)} is written out: ONNX Runtime computes it differently")
        link_gradients(model.graph)  # so that a loss of a gradient depends on what the gradient is of
        open_linear(model)
        summands = objective.terms(self.loss) if self.loss is not None else []
        predictions = objective.predictions(model, summands)
        summands = [objective.with_samples_first(*pair) for pair in zip(summands, predictions, strict=True)]
        for warning in unsuitable(summands, predictions):
            warn(warning)
        students = teaching.students(model, predictions) if teaching else []
        watched = list(dict.fromkeys([*objective.read_values(model, summands), *students]))
        trainable, freeze = as_patterns(self.trainable), as_patterns(self.freeze) or ()
        patterns_of_roles = roles(model, watched, [*(trainable or ()), *freeze, *patterns(self.groups)])
        if trainable is None and self.lora is None and (stored := quantize.integer_weights(model.graph)):
            operators = list_names(sorted({node.op_type for node in stored}), 4)
            raise RecipeError(
                f"the weights of {len(stored)} operators are integers: {operators}",
                hint="train it as a float model: `dequantize=True` (`--dequantize`); `trainable` names others to train",
            )
        selection = select(model, watched, trainable, freeze, patterns_of_roles)
        return_to_bodies(model, lifted - {value.name or "" for value in selection.parameters})
        is_quantized = any(RANGE_KEY in node.metadata_props for node in model.graph)
        learned = ranges.learned_scales(model, selection.parameters) if is_quantized else []
        masks = self._prune(model, selection.parameters)
        varied = {} if is_empty(self.augment) else by_input(model, self.augment)
        inputs = [value.name or "" for value in model.inputs]
        # After the selection, so that no constant of the preprocessing is trained.
        entries = {} if before is None else join.put_before(model, before)
        builder = StepBuilder(model, self.seed, name=self.name or f"training{len(model.steps) or ''}")
        augmentation = None
        if varied or self.move_with_image is not None:
            augmentation = Augmentation(builder, entries, inputs, varied, self.move_with_image)
        changed = augmentation.changed if augmentation else {}
        if self.batch_norm == "frozen":
            fix_statistics(model.graph)
        replacing = [value for value in model.outputs if NEXT_KEY in value.metadata_props]
        trained = training_forward(builder, [*watched, *replacing], selection.choices, self.variance, changed)
        loss: Expr | None = None
        if summands:
            loss = objective.scalar(objective.build(builder, summands, predictions, trained, self.sample_weight))
        if teaching:
            loss = teaching.add(builder, loss, students, trained, _inputs_in_training(model, entries, trained))
        assert loss is not None
        if augmentation:
            trained |= augmentation.move_targets()
        loss = builder.metric("loss", loss)
        init: str | Mapping[str, Any] = resolved["init"]
        check_patterns(init, selection.parameters)
        for value in selection.parameters:
            bind_initial_value(builder, value, init)
        chosen = groups(selection.parameters, optimizer, self.groups, patterns_of_roles)
        if learned:
            ranges.bind_learned(builder, learned, init)
            chosen += ranges.groups_of_scales(learned, model, chosen[-1], len(chosen))
        self._train(builder, [*selection.parameters, *learned], loss, chosen, trained, masks)
        if is_quantized:
            ranges.follow(builder, trained, init)
        for value in bind_statistics(builder, trained):
            bind_initial_value(builder, value, "file")
        builder.fact("selection", _selection_fact(selection.with_parameters(learned, "a scale that is learned")))
        if any(vars(restored).values()):
            builder.fact("exporter", dataclasses.asdict(restored))
        builder.fact("forward", {new.name: old.name for old, new in trained.items() if not old.is_initializer()})
        if self.times > 1:
            builder.fact("times", self.times)
        builder.fact("recipe", self.fact())
        builder.fact("progress", {"step": 0, "epoch": 0, "samples": 0})
        builder.finish()
        for graph in (model.graph, builder.step.algorithm):
            unlink_gradients(graph)
        return stamp(model)

    def _adapt(self, model: Model) -> Model:
        if self.new_head is not None:
            model = replace_head(model, **{"seed": self.seed, **arguments(replace_head, self.new_head, "new_head")})
        if self.lora is not None:
            model = lora.add(model, **{"seed": self.seed, **arguments(lora.add, self.lora, "lora")})
        if self.quantize is not None:
            model = quantize.add(model, self.quantize)
        return model

    def _prune(self, model: Model, parameters: Sequence[ir.Value]) -> prune.Masks:
        if self.prune is None:
            return {}
        if self.init != "file":
            raise RecipeError(
                "`prune` cannot rank the weights that `init` draws", hint="train first, and prune the trained model"
            )
        return prune.prune(model, parameters, self.prune)

    def _distillation(self) -> Distillation | None:
        if self.teacher is not None and self.sample_weight is not None:
            raise RecipeError("`sample_weight` does not work with `teacher`", hint="leave one of them out")
        if self.teacher is not None:
            distill = "kl" if is_empty(self.distill) else self.distill
            return Distillation(cast(Source, self.teacher), distill, alone=self.loss is None)
        if self.distill is not None:
            raise RecipeError("`distill` needs a `teacher`", hint='write `teacher="large.onnx"`')
        if self.loss is None:
            raise RecipeError("nothing to learn from", hint='write `loss="mse"`, or `teacher="large.onnx"`')
        return None

    def _train(
        self,
        builder: StepBuilder,
        parameters: Sequence[ir.Value],
        loss: Expr,
        chosen: list[OptimizerGroup],
        trained: Mapping[ir.Value, ir.Value],
        masks: prune.Masks,
    ) -> None:
        if self.lr_decay is not None:
            chosen = divide_by_depth(chosen, builder.model.graph, self.lr_decay)
        update = UpdateBuilder(
            builder,
            chosen,
            schedule=self.schedule,
            clip=self.clip,
            accumulate=self.accumulate,
            ema=self.ema,
            loss_scale=self.loss_scale,
            master_weights=self.master_weights,
        )
        gradients = _gradients(builder, update.scale_loss(loss), parameters)
        if masks:
            gradients = prune.mask_gradients(builder, gradients, masks)
        if any(RANGE_KEY in node.metadata_props for node in builder.model.graph):
            gradients = ranges.scale_gradients(builder, gradients, trained)
        update.apply(gradients)
        if masks:
            prune.mask_updates(builder, masks)
        builder.fact("optimizer", [group.fact() for group in chosen])

    def fact(self) -> dict[str, Any]:
        """Return the recipe as JSON; a loss object is only named."""
        recipe = self.changed() | self._resolved()
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {name: recipe[name] for name in usual if name in recipe and recipe[name] != usual[name]}
        return {name: _plain(value) for name, value in changed.items() if name not in ("append", "name", "times")}


@dataclasses.dataclass(frozen=True)
class _Arguments(StepOptions):
    model: Source


@with_options(_Arguments)
def prepare(model: Source, **recipe: Any) -> Model:
    """Make a training model: the same inference graph, and a step that improves it.

        training = onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw:lr=1e-3")
        training.save("training.onnx")

    - `model`: any model; a training model with `append`
    """
    return Recipe(**recipe).apply(check_signatures(load(model)))


def _inputs_in_training(
    model: Model, entries: Mapping[str, join.ModelInput], trained: Mapping[ir.Value, ir.Value]
) -> dict[str, ir.Value]:
    """Return the inputs that preprocessing or augmentation changes, with their values in training."""
    read = {value.name or "": value for value in model.inputs} | {name: e.value for name, e in entries.items()}
    return {name: trained.get(value, value) for name, value in read.items() if name in entries or value in trained}


def _gradients(builder: StepBuilder, loss: Expr, parameters: Sequence[ir.Value]) -> dict[ir.Value, Expr]:
    """Add one Gradient node: the loss by every parameter, given all else it depends on."""
    others = [value for value in _independent(loss.value, builder) if value not in parameters]
    op: Builder = builder.op
    op.imports.setdefault(TRAINING_DOMAIN, 1)
    results = op.node(
        TRAINING_DOMAIN,
        "Gradient",
        *parameters,
        *others,
        outputs=len(parameters),
        xs=[value.name for value in parameters],
        y=loss.name,
        zs=[value.name for value in others] or None,
    )
    results = results if isinstance(results, tuple) else (results,)
    return {v: g.named(f"{v.name}/grad").like(v) for v, g in zip(parameters, results, strict=True)}


def _independent(loss: ir.Value, builder: StepBuilder) -> list[ir.Value]:
    """Return the inputs and state variables that `loss` depends on, in order."""
    state = {builder.values[name] for name in (*builder.step.update, *builder.step.reset) if name in builder.values}
    graphs = (builder.model.graph, builder.step.algorithm)
    leaves = [v for g in graphs for v in values(g) if v.producer() is None]
    _, reached = ancestors([loss])
    return [v for v in leaves if v in reached and (not v.is_initializer() or v in state)]


def _selection_fact(selection: Selection) -> dict[str, Any]:
    names: dict[str, dict[str, list[str]]] = {}
    for choice in selection.choices:
        names.setdefault(choice.role, {}).setdefault(choice.reason, []).append(choice.name)
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Spec | FunctionOptimizer):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"
