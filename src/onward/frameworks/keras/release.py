"""From a training model to a compiled Keras model."""

from __future__ import annotations

from onward.arguments import checked
from onward.differentiate.gradients import has_gradients
from onward.frameworks.keras.live import GraphOptimizer, TrainingModel
from onward.frameworks.keras.native import native_losses, native_optimizer
from onward.frameworks.keras.ops import no_gradient_inside
from onward.model import Source, load
from onward.run_state.standard_steps import adopt
from onward.run_state.training_models import from_training_model, is_plain, only_step_of
from onward.transform.opset import of_one_opset


@checked(types=False)
def to_keras(training: Source, *, step: int | None = None) -> TrainingModel:
    """A compiled Keras model that goes on where a training model is: `fit` continues the run.

    Its variables have the names of the training model's tensors, its optimizer is Keras's own where that computes the
    same, else the update of the training model, and so is its loss.

        model = onward.to_keras("training.onnx")
        model.fit(images, labels)

    - `training`: a training model
    - `step`: which one; a training model with several is refused, since a Keras model has no place for the others
    """
    model = adopt(of_one_opset(load(training)))
    index = only_step_of(model, step)
    if has_gradients(model):
        raise no_gradient_inside()
    run = from_training_model(model, index, forward=False)
    made = TrainingModel(model)
    held = made.variables_by_name
    optimizer = native_optimizer(run, held)
    if optimizer is None:
        optimizer = GraphOptimizer(model, held, run.groups[0].lr)
        optimizer.build(made.trainable_variables)
    made.compile_as(optimizer, **(native_losses(run, model) or {} if is_plain(model, index, run) else {}))
    return made
