"""Lightning modules, which compute their loss and configure their optimizer, against the Trainer."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
from marks import needs

import onward
from onward.errors import RecipeError, UnsupportedError

torch = pytest.importorskip("torch")
pl = pytest.importorskip("pytorch_lightning")
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.filterwarnings("ignore")]


class Classifier(pl.LightningModule):
    def __init__(self, interval: str = "step", rate: float = 0.05):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
        self.interval, self.rate = interval, rate

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) + 0.01 * self.net[0].weight.abs().sum()
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.fixture
def batches() -> list[Any]:
    torch.manual_seed(0)
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(10)]


@pytest.mark.parametrize(("interval", "epochs"), [("step", 1), ("epoch", 2)])
def test_ten_steps_are_those_of_the_trainer(interval: str, epochs: int, batches: list[Any]) -> None:
    module = Classifier(interval)
    length = len(batches) // epochs
    options = {} if interval == "step" else {"updates_per_epoch": length}
    training = onward.from_torch(module, batches[0], **options)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=epochs, logger=False, accelerator="cpu", **quiet)
    back = onward.to_torch(training)
    trainer.fit(module, torch.utils.data.DataLoader(batches[:length], batch_size=None))
    with onward.engines.start(training, threads=1) as engine:
        for x, y in batches[:length] * epochs:
            engine.step({"batch_0": x.numpy(), "batch_1": y.numpy()})
            back.optimizer.zero_grad()
            back.loss(back.module(x, y)).backward()
            back.optimizer.step()
            if back.scheduler is not None:
                back.scheduler.step()
        state = engine.state()
    for name, expected in module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        np.testing.assert_allclose(state[name], expected.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
        if interval == "step":
            np.testing.assert_allclose(back.module.state_dict()[name].numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


def test_a_module_that_a_trainer_has_trained_continues(batches: list[Any]) -> None:
    module = Classifier()
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_steps=4, logger=False, accelerator="cpu", **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    (configuration,) = trainer.lr_scheduler_configs
    before = copy.deepcopy(module.state_dict())
    training = onward.from_torch(module, batches[4], optimizer=trainer.optimizers[0], scheduler=configuration.scheduler)
    assert onward.inspect.describe(training).steps[0].schedule[0].name == "step"
    np.testing.assert_array_equal(training.array("net.0.weight"), before["net.0.weight"].numpy())
    assert module.trainer is trainer


class Alternating(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters()), torch.optim.SGD(self.net[4].parameters())]


class Planned(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters())
        return [optimizer], [lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)]


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Classifier("epoch"), RecipeError, "StepLR of `Classifier` steps once per epoch"),
        (Alternating(), UnsupportedError, "`Alternating` configures 2 optimizers and 0 schedulers"),
        (Planned(), UnsupportedError, "`Planned.configure_optimizers` fails: Planned is not attached to a `Trainer`."),
        (nn.Linear(6, 3), RecipeError, "no optimizer given"),
    ],
)
def test_refused(module: Any, error: type[Exception], message: str, batches: list[Any]) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        onward.from_torch(module, batches[0])
    assert caught.value.hint
