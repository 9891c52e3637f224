"""What goes on with a training model, and with which losses."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lowered
import numpy as np
from grid.side import Arrays

import onward
from onward.engines import start
from onward.frameworks.run_files import write
from onward.model import Model
from onward.run_state.training_models import from_training_model

Target = Callable[[Model, Sequence[Arrays]], list[float]]


def on_engine(name: str, index: int = 0, **options: Any) -> Target:
    def run(model: Model, batches: Sequence[Arrays]) -> list[float]:
        with start(model, engine=name, steps=index, **options) as engine:
            return [float(engine.step(batch)[engine.loss]) for batch in batches]

    return run


def lowered_step(model: Model, batches: Sequence[Arrays]) -> list[float]:
    """The plain step, on stock ONNX Runtime, driven by what its file says."""
    step, state, losses = lowered.Part(onward.lower(model, 0)), lowered.stored(model), []
    for batch in batches:
        results = step({**batch, **state})
        state |= step.new_state(results)
        losses.append(float(results[step.contract["loss"]]))
    return losses


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch_objects(live: bool) -> Target:
    """Dropout is left out there: PyTorch draws numbers of its own."""

    def run(model: Model, batches: Sequence[Arrays], step: int = 0) -> list[float]:
        import torch
        from torch import nn

        from onward.frameworks.torch.schedule import updates_per_step

        module, optimizer, scheduler, loss = onward.to_torch(model, step=step, live=live)
        if has_dropout(model):
            dropouts = [layer for layer in module.modules() if isinstance(layer, nn.Dropout)]
            assert live or dropouts
            for layer in dropouts:
                layer.p = 0.0
            if live:
                module.leave_out_dropout()
        description = onward.describe(model).steps[step].loss
        every, losses = 1 if scheduler is None else updates_per_step(from_training_model(model)), []
        for number, batch in enumerate(batches, 1):
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}
            optimizer.zero_grad()
            outputs = module(*(tensors[value.name or ""] for value in model.inputs))
            pairs = [(term.output, [tensors[name] for name in term.inputs]) for term in description.terms]
            if len(pairs) == 1:
                is_mapping = isinstance(outputs, dict) and pairs[0][0] in {v.name for v in model.outputs}
                found = loss(outputs[pairs[0][0]] if is_mapping else outputs, *pairs[0][1])
            else:
                picked = [(outputs[name] if isinstance(outputs, dict) else outputs, *rest) for name, rest in pairs]
                found = loss(*picked)
            found.backward()
            optimizer.step()
            if scheduler is not None and number % every == 0:
                scheduler.step()
            losses.append(found.item())
        return losses

    return run


def has_dropout(model: Model) -> bool:
    return any(node.op_type == "Dropout" for node in model.graph)


# ---- Keras, JAX, TensorFlow ------------------------------------------------------------------------------------------


def keras_model(model: Model, batches: Sequence[Arrays]) -> list[float]:
    return _fitted(onward.to_keras(model), model, batches)


def keras_program(model: Model, batches: Sequence[Arrays]) -> list[float]:
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path, program = write(model, "keras", Path(folder) / "arrived.keras")
        _imported(program)
        return _fitted(keras.models.load_model(path), model, batches)


def _fitted(made: Any, model: Model, batches: Sequence[Arrays]) -> list[float]:
    names, losses = {value.name for value in model.inputs}, []
    for batch in batches:
        inputs = [array for name, array in batch.items() if name in names]
        targets = [array for name, array in batch.items() if name not in names]
        made.reset_metrics()
        x, given = (arrays[0] if len(arrays) == 1 else arrays for arrays in (inputs, targets))
        losses.append(float(made.train_on_batch(x, None if not targets else given, return_dict=True)["loss"]))
    return losses


def jax_functions(model: Model, batches: Sequence[Arrays], step: int = 0) -> list[float]:
    import jax

    carried = onward.to_jax(model, step=step)
    return _stepped(jax.jit(carried.step), carried.state, batches)


def jax_program(model: Model, batches: Sequence[Arrays]) -> list[float]:
    import jax

    with tempfile.TemporaryDirectory() as folder:
        write(model, "jax", Path(folder))
        run = _imported(Path(folder) / "run.py")
        return _stepped(jax.jit(run.step), run.load(), batches)


def _stepped(step: Any, state: Any, batches: Sequence[Arrays]) -> list[float]:
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensorflow_module(model: Model, batches: Sequence[Arrays], step: int = 0) -> list[float]:
    module = onward.to_tensorflow(model, step=step)
    return [float(module.train_step(**batch)["loss"]) for batch in batches]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def through_checkpoint(format: str) -> Target:
    """Two steps, a checkpoint, and further steps of what is made of it: the recipe is that of the model, as `like`."""

    def run(model: Model, batches: Sequence[Arrays]) -> list[float]:
        with start(model, threads=1) as engine, tempfile.TemporaryDirectory() as folder:
            losses = [float(engine.step(batch)[engine.loss]) for batch in batches[:2]]
            path = onward.to_checkpoint(engine.updated(), Path(folder) / "run", format=format)
            return losses + on_engine("onnxruntime", threads=1)(onward.from_checkpoint(path, model), batches[2:])

    return run


TARGETS: dict[str, tuple[str, Target]] = {
    "lowered": ("onnxruntime", lowered_step),
    "numpy engine": ("numpy", on_engine("numpy")),
    "torch engine": ("torch", on_engine("torch", compile=False)),
    "jax engine": ("jax", on_engine("jax", compile=False)),
    "tensorflow engine": ("tensorflow", on_engine("tensorflow", compile=False)),
    "keras engine": ("keras", on_engine("keras")),
    "torch objects": ("torch", torch_objects(live=True)),
    "torch program": ("torch", torch_objects(live=False)),
    "keras model": ("keras", keras_model),
    "keras program": ("keras", keras_program),
    "jax functions": ("jax", jax_functions),
    "jax program": ("jax", jax_program),
    "tensorflow module": ("tensorflow", tensorflow_module),
    "checkpoint of torch": ("torch", through_checkpoint("torch")),
    "checkpoint of orbax": ("tensorstore", through_checkpoint("orbax")),
}
"""With the framework that each needs."""
