"""Checkpoints as training scripts write them: tied weights, groups by weight decay, frozen parameters, wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_export import by_dynamo, quiet

import onward
from onward.errors import UnsupportedError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

TOKENS, WIDTH, LENGTH = 50, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=False)
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        parts = self.attn(self.ln_1(x)).split(WIDTH, 2)
        q, k, v = (part.view(batch, length, 2, WIDTH // 2).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(attended.reshape(batch, length, WIDTH))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class Language(nn.Module):
    """A GPT whose embedding and head share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(TOKENS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batches(seed: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(TOKENS, (2, 4, LENGTH), generator=generator)) for _ in range(4)]


def train(module: Any, optimizer: Any, seed: int) -> list[float]:
    losses = []
    for tokens, labels in batches(seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def like() -> onward.Model:
    with quiet():
        return onward.load(by_dynamo(Language().eval(), {"tokens": batches(0)[0][0]}, {"tokens": "bt"}, "logits"))


def _decayed_first(module: Any) -> list[dict[str, Any]]:
    """Return the groups of nanoGPT: matrices decay, vectors do not."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _decayed_last(module: Any) -> list[dict[str, Any]]:
    """Return the groups of timm, which has those without decay first."""
    return _decayed_first(module)[::-1]


def _head_and_last_block(module: Any) -> list[Any]:
    """Freeze all but the last block and the final normalization."""
    module.requires_grad_(False)
    trained = [*module.h[1].parameters(), *module.ln_f.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    return trained


def _embeddings(module: Any) -> list[Any]:
    module.requires_grad_(False)
    return [module.wpe.weight.requires_grad_(True), module.lm_head.weight.requires_grad_(True)]


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tied weights are stored twice, as `.clone()` on each makes them."""
    return {name: tensor.clone() for name, tensor in state.items()}


LAYOUTS: dict[str, tuple[Callable[[Any], Any], Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]] = {
    "one group": (lambda module: module.parameters(), dict, {}),
    "nanogpt": (_decayed_first, dict, {}),
    "timm": (_decayed_last, dict, {}),
    "compiled": (_decayed_first, lambda state: {f"_orig_mod.{name}": tensor for name, tensor in state.items()}, {}),
    "copies of tied weights": (_decayed_first, _copied, {}),
    "frozen, told by shapes": (_embeddings, dict, {}),
    "frozen, named": (_head_and_last_block, dict, {"trainable": ["h.1.*", "ln_f.*"]}),
}


def _saved(path: Path, layout: str) -> list[float]:
    """Train, save as a layout, train on, and return the losses since then."""
    groups, form, _ = LAYOUTS[layout]
    module = Language()
    optimizer = torch.optim.AdamW(groups(module), lr=1e-2)
    train(module, optimizer, 1)
    torch.save({"model": form(module.state_dict()), "optimizer": optimizer.state_dict(), "iter_num": 4}, path)
    return train(module, optimizer, 2)


def _losses(training: onward.Model) -> list[float]:
    with onward.engines.start(training) as engine:
        steps = ({"tokens": tokens.numpy(), "labels": labels.numpy()} for tokens, labels in batches(2))
        return [float(engine.step(batch)["loss"]) for batch in steps]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_continues(layout: str, like: onward.Model, tmp_path: Path) -> None:
    losses = _saved(tmp_path / "ckpt.pt", layout)
    training = onward.from_checkpoint(tmp_path / "ckpt.pt", like, loss="cross_entropy:axis=-1", **LAYOUTS[layout][2])
    np.testing.assert_allclose(_losses(training), losses, rtol=1e-5)


def test_blocks_of_the_same_shapes_are_not_guessed(like: onward.Model, tmp_path: Path) -> None:
    _saved(tmp_path / "ckpt.pt", "frozen, named")
    with pytest.raises(UnsupportedError) as refusal:
        onward.from_checkpoint(tmp_path / "ckpt.pt", like, loss="cross_entropy:axis=-1")
    assert "`--freeze PATTERN`" in (refusal.value.hint or "")


@pytest.mark.parametrize("form", ["state dict", "half precision", "training checkpoint"])
def test_weights_alone_start_a_run(form: str, like: onward.Model, tmp_path: Path) -> None:
    module, path = Language(), tmp_path / "weights.pt"
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter.requires_grad_(False), std=0.1)
    module.load_state_dict({name: tensor.half().float() for name, tensor in module.state_dict().items()})
    state = module.state_dict()
    state = {name: tensor.half() for name, tensor in state.items()} if form == "half precision" else state
    torch.save({"model": state, "best_loss": 1.5} if form == "training checkpoint" else state, path)
    tokens, labels = batches(3)[0]
    data = {"tokens": tokens.numpy(), "labels": labels.numpy()}
    run = onward.train(
        like, data, loss="cross_entropy:axis=-1", weights=path, run=tmp_path / "run", batch_size=4, quiet=True
    )
    expected = F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
    np.testing.assert_allclose(next(row["loss"] for row in run.read_log() if "loss" in row), float(expected), rtol=1e-6)


def test_weights_of_another_model_are_refused(like: onward.Model, tmp_path: Path) -> None:
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "other.pt")
    with pytest.raises(UnsupportedError, match="cannot be carried over: `weight` is"):
        onward.train(like, {}, loss="cross_entropy:axis=-1", weights=tmp_path / "other.pt")
