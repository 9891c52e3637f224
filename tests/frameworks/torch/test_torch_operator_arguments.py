"""Arguments of PyTorch's operators in forward passes: values and gradients are those of PyTorch, or it is refused.

An exporter that leaves out an argument says nothing, and an argument that is only about gradients does not show in a
forward pass: the probe compares both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from representatives import chosen

import onward
from onward.engines import start
from onward.errors import Error, MismatchError, UnsupportedError

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch_nets import Net, step  # noqa: E402

from onward.frameworks.torch import from_torch  # noqa: E402

pytestmark = [needs("torch", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]

N, WIDTH, STEPS = 6, 4, 2
partial = functools.partial


class Operators(nn.Module):
    """A layer, and operators of its output: functions, or classes of layers. Each makes a number, and all the loss."""

    def __init__(self, shape: tuple[int, ...], operators: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, torch.Size(shape).numel())
        self.shape = shape
        self.made = {name: make() if is_layer(make) else make for name, make in operators.items()}
        self.layers = nn.ModuleList(made for made in self.made.values() if isinstance(made, nn.Module))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x).unflatten(1, self.shape)
        values = {}
        for name, operator in self.made.items():
            result = operator(y)
            values[name] = (result[0] if isinstance(result, tuple) else result).float().sin().mean()
        return {"loss": torch.stack(list(values.values())).sum(), **values}


def is_layer(make: Any) -> bool:
    return isinstance(make, partial) and isinstance(make.func, type)


LOW, HIGH = torch.linspace(-0.5, 0, 5), torch.linspace(0.1, 0.5, 5)
MASK = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]]).bool()
GRID = torch.rand(1, 4, 5, 2, generator=torch.Generator().manual_seed(0)) * 2.6 - 1.3


def attention(heads: int = 4, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda y: F.scaled_dot_product_attention(y, y[:, :heads].sin(), y[:, :heads].cos(), **options)


def sampled(mode: str, padding: str, corners: bool) -> Callable[[Tensor], Tensor]:
    return lambda y: F.grid_sample(y, GRID.expand(y.shape[0], -1, -1, -1), mode, padding, corners)


EXACT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "elements": ((5,), {
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "softplus": lambda y: F.softplus(y, beta=2.0, threshold=0.5),
        "hardtanh": lambda y: F.hardtanh(y, -0.3, 0.2),
        "celu": lambda y: F.celu(y, alpha=0.3),
        "elu": lambda y: F.elu(y, alpha=0.3),
        "leaky": lambda y: F.leaky_relu(y, 0.3),
        "threshold": lambda y: F.threshold(y, 0.1, -0.4),
        "hardshrink": lambda y: F.hardshrink(y, 0.2),
        "softshrink": lambda y: F.softshrink(y, 0.2),
        "softmax": lambda y: F.softmax(y, 0, dtype=torch.float64),
        "clamp": lambda y: torch.clamp(y, LOW, HIGH),
        "clamp_crossed": lambda y: y.clamp(min=0.2, max=-0.2),
        "logit": lambda y: torch.logit(y.sigmoid(), eps=0.4),
        "nan_to_num": lambda y: torch.nan_to_num(y.log(), nan=0.3, posinf=1.0, neginf=-1.0),
        "div_trunc": lambda y: torch.div(y, 0.3, rounding_mode="trunc") + y,
        "div_floor": lambda y: torch.div(y, 0.3, rounding_mode="floor") + y,
        "add_alpha": lambda y: torch.add(y, y.sin(), alpha=0.3),
        "addcmul": lambda y: torch.addcmul(y, y, y, value=0.3),
        "addcdiv": lambda y: torch.addcdiv(y, y, y.exp(), value=0.3),
        "round_decimals": lambda y: torch.round(y, decimals=1) + y,
        "log1p": lambda y: torch.log1p(y.exp() * 1e-8) * 1e8,
        "expm1": lambda y: torch.expm1(y * 1e-6) * 1e6,
        "log1p_large": lambda y: torch.log1p(y.exp() * 1e30),
        "lgamma": lambda y: torch.lgamma(y.exp() * torch.tensor([0.01, 0.5, 1.0, 3.0, 9.0])) * 0.1,
        "lgamma_of_negative_numbers": lambda y: torch.lgamma(-0.2 - 0.6 * y.sigmoid()),
        "added_to_a_number": lambda y: torch.add(0.3, (y > 0).long(), alpha=0.7) * y,
        "subtracted_from_a_number": lambda y: (1.0 - (y > 0).long()) * y,
    }),
    "reductions": ((3, 4), {
        **{f"norm_{p}": partial(torch.norm, p=p, dim=1, keepdim=True) for p in (0, 1, 2, 3, 0.5, float("inf"), "fro")},
        **{f"std_{n}": partial(torch.std, dim=1, correction=n) for n in (0, 1, 2)},
        **{f"var_{n}": partial(torch.var, dim=(1, 2), correction=n, keepdim=True) for n in (0, 1, 2)},
        "cumsum": lambda y: torch.cumsum(y, 1, dtype=torch.float64),
        "mean": lambda y: y.mean((0, 1), keepdim=True, dtype=torch.float64),
        "normalize": lambda y: F.normalize(y, p=3.0, dim=1, eps=0.5),
        "cosine": lambda y: F.cosine_similarity(y, y.sin().detach(), dim=1),
        "smallest": lambda y: y.topk(2, 1, largest=False)[0],
        "sorted": lambda y: torch.sort(y, stable=True, dim=1, descending=True)[0],
        "selected": lambda y: y.masked_select(y > 0),
        "counted": lambda y: torch.histc(y.detach().sigmoid(), 4, 0.2, 0.8) * y.mean(),
        "strided": lambda y: y.transpose(1, 2).as_strided((y.shape[0], 2, 3), (12, 1, 4)),
        "complex": lambda y: torch.view_as_real(torch.view_as_complex(y.unflatten(2, (2, 2))).unsqueeze(-1)),
        "layer_norm": lambda y: F.layer_norm(y, (3, 4), eps=0.1),
        "rms_norm": lambda y: F.rms_norm(y, (4,), eps=0.1),
        "batch_norm": lambda y: F.batch_norm(y, None, None, training=True, eps=0.1),
        "batch_norm_layer": partial(nn.BatchNorm1d, 3, affine=False, eps=0.1, momentum=0.3),
        "prelu": partial(nn.PReLU, 3),
        "lstm": partial(nn.LSTM, 4, 3, batch_first=True),
        "heads": lambda y: F.multi_head_attention_forward(
            *(y.transpose(0, 1),) * 3, 4, 2, torch.linspace(-1, 1, 48).view(12, 4), None, None, None, False, 0.0,
            torch.eye(4), None, need_weights=False, attn_mask=torch.zeros(3, 3).masked_fill(~MASK, -1.0),
        ),
    }),
    "attention": ((4, 3, 2), {
        "causal": attention(is_causal=True),
        "scale": attention(scale=0.3),
        "grouped": attention(2, enable_gqa=True),
        "mask": attention(attn_mask=MASK),
        "mask_and_scale": attention(attn_mask=MASK, scale=0.3),
        "nothing_to_attend_to": attention(attn_mask=MASK.tril(-1)),
        "minus_infinity": attention(attn_mask=torch.zeros(3, 3).masked_fill(~MASK.tril(-1), -torch.inf)),
        "masked_groups": attention(2, attn_mask=MASK.tril(-1), enable_gqa=True),
    }),
    "images": ((2, 9, 7), {
        "average": lambda y: F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        "average_padded": lambda y: F.avg_pool2d(y, 3, 2, 1, ceil_mode=True),
        "largest": lambda y: F.max_pool2d(y, 2, 2, 1, dilation=2, ceil_mode=True),
        "indices": lambda y: F.max_pool2d(y, 2, return_indices=True),
        "power": lambda y: F.lp_pool2d(y.exp(), 3.0, 2, 2, ceil_mode=True),
        **{
            f"{mode}_{i}": partial(F.interpolate, mode=mode, **size)
            for mode in ("nearest", "bilinear", "bicubic")
            for i, size in enumerate([{"size": (5, 12)}, {"scale_factor": 1.7}, {"scale_factor": (0.45, 1.3)}])
        },
        "corners": partial(F.interpolate, mode="bilinear", scale_factor=1.7, align_corners=True),
        "antialias": partial(F.interpolate, mode="bilinear", size=(5, 4), antialias=True),
        "antialias_twice": partial(F.interpolate, mode="bicubic", scale_factor=2.0, antialias=True),
        **{
            f"sampled_{mode}_{padding}_{corners}": sampled(mode, padding, corners)
            for mode in ("bilinear", "nearest", "bicubic")
            for padding in ("zeros", "border", "reflection")
            for corners in (True, False)
        },
        **{f"pad_{mode}": partial(F.pad, pad=(1, 2, 2, 0), mode=mode) for mode in ("reflect", "replicate", "circular")},
        "unfold": lambda y: F.unfold(y, (2, 3), dilation=(1, 2), padding=(1, 2), stride=(2, 1)),
        "local_response": lambda y: F.local_response_norm(y, 3, alpha=0.1, beta=0.6, k=2.0),
        **{
            f"conv_{mode}": partial(nn.Conv2d, 2, 3, 3, (2, 1), (1, 2), (1, 2), padding_mode=mode)
            for mode in ("zeros", "reflect", "replicate", "circular")
        },
        "conv_same": partial(nn.Conv2d, 2, 3, (2, 4), padding="same", dilation=(1, 2)),
        "transposed": partial(nn.ConvTranspose2d, 2, 4, 3, (2, 3), (1, 0), (1, 2), groups=2, dilation=(2, 1)),
    }),
    "volumes": ((2, 4, 3, 3), {
        "conv_groups": partial(nn.Conv3d, 2, 4, 3, padding=1, groups=2, bias=False),
        "conv_plain": lambda y: F.conv3d(y, y[:3].detach().sin(), None, 1, 1),
        "conv_one_sample": lambda y: F.conv3d(y[0], y[1:3].detach().sin(), None, 1, 1),
    }),
    "places": ((5,), {
        "index_put": lambda y: torch.zeros(4, 5).index_put((torch.tensor([0, 1, 1]),), y[:3], accumulate=True),
        **{
            f"scatter_{kind}_{own}": lambda y, kind=kind, own=own: torch.full((3, 3), 0.7).scatter_reduce(
                1, torch.tensor([[0, 1, 2, 0, 1]] * 3), y[:3], kind, include_self=own
            )
            for kind in ("sum", "prod", "amax", "amin")
            for own in (True, False)
        },
        "roll": lambda y: y.roll((1, 2), (0, 1)),
        "gather": lambda y: y.gather(1, y.argsort(1, descending=True)),
        "triangle": lambda y: y.tril(-1) + y.triu(2),
    }),
}  # fmt: skip
"""Kinds -> the shape of a sample, and operators by name."""


@pytest.mark.parametrize("kind", chosen(EXACT, ["elements"]))
def test_exact(kind: str) -> None:
    """Each value of all operators, and the parameters after some steps with the sum of all."""
    x = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
    module = Operators(*EXACT[kind])
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    model = from_torch(module, x, loss="loss", optimizer=optimizer)
    batch = {"x": x.numpy()}
    with start(model, threads=1) as engine:
        values = engine.evaluate(batch) if kind != "reductions" else {}  # BatchNorm is another one there
        for name, expected in (module(x) if values else {}).items():
            np.testing.assert_allclose(values[name], expected.item(), rtol=1e-4, atol=1e-6, err_msg=name)
        losses = [float(engine.step(batch)[engine.loss]) for _ in range(STEPS)]
        state = engine.state()
    for loss in losses:
        np.testing.assert_allclose(loss, step(module(x)["loss"], optimizer), rtol=1e-5)
    for name, parameter in module.named_parameters():
        array = parameter.detach().numpy()
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max(), err_msg=name)


@pytest.mark.parametrize("is_bool", [True, False])
def test_samples_without_a_token(is_bool: bool) -> None:
    """PyTorch's attention is 0 where all keys are masked: also where no row of the example is."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
            y = self.layer(x).unflatten(-1, (2, 2)).transpose(1, 2)
            seen = mask[:, None, None, :]
            seen = seen if is_bool else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            return {"loss": F.scaled_dot_product_attention(y, y.sin(), y.cos(), seen).sin().sum()}

    module, x = Attends(), torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True, True, False], [False, False, False]])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = from_torch(module, (x, torch.ones_like(mask)), loss="loss", optimizer=optimizer)
    loss = module(x, mask)["loss"]
    loss.backward()
    with start(model, threads=1) as engine:
        batch = {"x": x.numpy(), "mask": mask.numpy()}
        np.testing.assert_allclose(engine.evaluate(batch)["loss"], loss.item(), rtol=1e-5)
        for name, gradient in engine.gradients(batch).items():
            np.testing.assert_allclose(gradient, module.get_parameter(name).grad, rtol=1e-4, atol=1e-5, err_msg=name)


# ---- what the exporter drops -----------------------------------------------------------------------------------------


def embedding(function: Callable[..., Tensor], **options: Any) -> Net:
    table, head = nn.Embedding(7, 3), nn.Linear(3, 2)
    return Net(lambda s, tokens: s.head(function(tokens, s.table.weight, **options)), table=table, head=head)


def convolved(function: Callable[[Tensor], Tensor]) -> Net:
    return Net(lambda s, x: function(s.layer(x)), layer=nn.Conv2d(2, 2, 1))


TOKENS = torch.tensor([[0, 1, 1], [2, 0, 3], [1, 1, 1], [4, 5, 6]])
IMAGES = torch.randn(4, 2, 9, 7, generator=torch.Generator().manual_seed(0))
SCATTERED = torch.tensor([[0, 0, 1]] * 4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "`embedding` has scale_grad_by_freq=True": (lambda: embedding(F.embedding, scale_grad_by_freq=True), TOKENS),
    "`embedding` has max_norm=0.5": (lambda: embedding(F.embedding, max_norm=0.5), TOKENS),
    "`embedding` has sparse=True": (lambda: embedding(F.embedding, sparse=True), TOKENS),
    "`embedding_bag` has scale_grad_by_freq=True": (
        lambda: embedding(F.embedding_bag, mode="sum", scale_grad_by_freq=True), TOKENS),
    "`avg_pool2d` has divisor_override=5": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.AvgPool2d(3, divisor_override=5)), IMAGES),
    "antialias=True and a scale_factor": (
        lambda: convolved(partial(F.interpolate, scale_factor=1.7, mode="bilinear", antialias=True)), IMAGES),
}  # fmt: skip
"""What is said -> a module, and what it takes."""


@pytest.mark.parametrize("said", chosen(REFUSED, [*REFUSED][:1]))
def test_refused_without_a_probe(said: str) -> None:
    make, example = REFUSED[said]
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(UnsupportedError, match=re.escape(said)) as caught:
        from_torch(module, example, loss=nn.MSELoss(), optimizer=optimizer, probe=False)
    assert caught.value.hint


class Adapted(nn.Module):
    """A gradient that is not that of the forward pass, as in domain adaptation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: -gradient)
        return self.last(y)


@pytest.mark.parametrize("rate", [1e-7, 0.1])
def test_gradients_are_compared_whatever_the_learning_rate(rate: float, tmp_path: Path) -> None:
    module, x = Adapted(), torch.randn(N, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), rate)
    with pytest.raises(MismatchError, match=r"first\.weight"):
        from_torch(module, x, loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    given = {"module": module, "example_inputs": x, "loss": "cross_entropy"}
    with pytest.raises(Error, match=r"first\.weight"):
        onward.from_checkpoint(tmp_path / "x.pt", **given)
    assert onward.from_checkpoint(tmp_path / "x.pt", **given, probe=False).steps


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ctc_of_selected_labels(reduction: str) -> None:
    """The loss inside of a forward pass takes the labels of all sequences in a row, as transformers write it."""

    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            mask = labels >= 0
            lengths, times = mask.sum(-1), torch.full((len(x),), x.shape[1])
            scores = F.log_softmax(self.layer(x), -1).transpose(0, 1)
            loss = F.ctc_loss(scores, labels.masked_select(mask), times, lengths, reduction=reduction)
            return {"loss": loss, "same": loss}

    torch.manual_seed(0)
    module = Speech()
    inputs = {"x": torch.randn(3, 6, WIDTH), "labels": torch.tensor([[1, 2, 2], [3, -1, -1], [4, 1, -1]])}
    training = from_torch(module, inputs, loss="loss", optimizer=torch.optim.SGD(module.parameters(), 0.1))
    loss = module(**inputs)["loss"]
    loss.backward()
    with start(training, threads=1) as engine:
        batch = {name: x.numpy() for name, x in inputs.items()}
        gradients = engine.gradients(batch)
        np.testing.assert_allclose(engine.step(batch)[engine.loss], loss.item(), rtol=1e-5)
    np.testing.assert_allclose(gradients["layer.weight"], module.layer.weight.grad, rtol=1e-4, atol=1e-6)
