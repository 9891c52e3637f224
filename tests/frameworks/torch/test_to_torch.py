"""Training models whose optimizers and schedules PyTorch does not have go on in PyTorch, and back on ONNX Runtime."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import pytest
from marks import needs

import onward
from onward.engines import start
from onward.run_state.training_models import from_training_model

torch = pytest.importorskip("torch")
from onward.frameworks.torch.schedule import updates_per_step  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]

RNG = np.random.default_rng(0)
BATCH = {"image": RNG.standard_normal((8, 64)).astype("f"), "labels": RNG.integers(0, 10, 8)}
RECIPES: list[dict[str, Any]] = [
    {"optimizer": "lion:lr=1e-3", "schedule": "cosine:steps=40,warmup=5"},
    {"optimizer": "rmsprop:variant=keras,momentum=0.9", "schedule": "step:size=2,gamma=0.5,every=3"},
    {"optimizer": "adamw:eps=1e-3", "schedule": "linear:steps=30,warmup=4", "groups": ["*bias:weight_decay=0"]},
    {
        "optimizer": "sgd:variant=keras,lr=0.1,momentum=0.9",
        "schedule": "exponential:gamma=0.9",
        "groups": [{"match": "fc1*", "optimizer": "adam:eps=1e-3"}],
    },
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["optimizer"])
def test_there_and_back(recipe: dict[str, Any]) -> None:
    training = onward.prepare(models.digits_mlp(), loss="cross_entropy:label_smoothing=0.1", **recipe)
    with start(training, threads=1) as engine:
        for _ in range(6):
            engine.step(BATCH)
        training = engine.updated()
        expected = [float(engine.step(BATCH)["loss"]) for _ in range(10)]

    every, losses = updates_per_step(from_training_model(training)), []
    module, optimizer, scheduler, loss = onward.to_torch(training)
    image, labels = torch.tensor(BATCH["image"]), torch.tensor(BATCH["labels"])
    for step in range(6, 11):
        optimizer.zero_grad()
        value = loss(module(image), labels)
        value.backward()
        optimizer.step()
        if (step + 1) % every == 0:
            scheduler.step()
        losses.append(value.item())
    given = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "steps_per_epoch": every}
    with start(onward.from_torch(module, image, **given), threads=1) as engine:
        losses += [float(engine.step(BATCH)["loss"]) for _ in range(5)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
