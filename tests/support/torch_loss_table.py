"""Every loss of PyTorch with every argument at a value other than its default, and modules that compute them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, C, WIDTH = 6, 5, 4
"""Samples, classes, and inputs of the layer before the loss."""


class Data(NamedTuple):
    """The shape of a prediction without samples, the function that makes it of logits, and the targets."""

    shape: tuple[int, ...]
    link: Callable[[Tensor], Tensor]
    targets: tuple[Tensor, ...]


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _same(x: Tensor) -> Tensor:
    return x


def _first(x: Tensor) -> Tensor:
    """The prediction for a single sample, without an axis of samples."""
    return x.mean(0)


_log = functools.partial(torch.log_softmax, dim=1)
_labels = torch.tensor([2, 0, 4, 1, 2, 3])
_ignored = torch.tensor([2, -100, 4, 1, 2, 3])
_pixels = torch.arange(N * 2 * 3).mul(7).remainder(C).view(N, 2, 3)
_values, _others = _randn(N, C, seed=1), _randn(N, C, seed=2)
_soft, _log_soft = _others.softmax(1), _others.log_softmax(1)
_soft_pixels = _randn(N, C, 2, 3).softmax(1)
_yes_no = (_values > 0).float()
_counts = _values.abs().mul(3).round()
_symbols = torch.tensor([[1, 2, 2], [3, 1, 3], [2, 3, 1], [1, 1, 3], [3, 3, 2], [2, 2, 1]])
_lengths = (torch.tensor([7, 6, 7, 7, 5, 7]), torch.tensor([3, 2, 3, 1, 3, 3]))
_too_short = (torch.tensor([7, 6, 7, 7, 2, 7]), torch.tensor([3, 2, 3, 1, 3, 3]))


def _times_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).log_softmax(-1)


DATA: dict[str, Data] = {
    "classes": Data((C,), _same, (_labels,)),
    "classes, one ignored": Data((C,), _same, (_ignored,)),
    "classes of a sequence": Data((C, 3), _same, (_pixels[:, 0],)),
    "classes of pixels": Data((C, 2, 3), _same, (_pixels,)),
    "a class of one sample": Data((C,), _first, (torch.tensor(2),)),
    "probabilities of classes": Data((C,), _same, (_soft,)),
    "probabilities of pixels": Data((C, 2, 3), _same, (_soft_pixels,)),
    "probabilities of one sample": Data((C,), _first, (_soft[0],)),
    "log classes": Data((C,), _log, (_labels,)),
    "log classes, one ignored": Data((C,), _log, (_ignored,)),
    "log classes of pixels": Data((C, 2, 3), _log, (_pixels,)),
    "a log class of one sample": Data((C,), lambda x: x.mean(0).log_softmax(0), (torch.tensor(2),)),
    "values": Data((C,), _same, (_values,)),
    "values of pixels": Data((C, 2, 3), _same, (_randn(N, C, 2, 3),)),
    "values, one for each sample": Data((C,), _same, (_values[:, :1],)),
    "yes or no": Data((C,), torch.sigmoid, (_yes_no,)),
    "yes or no, logits": Data((C,), _same, (_yes_no,)),
    "yes or no, logits of pixels": Data((C, 2, 3), _same, ((_randn(N, C, 2, 3) > 0).float(),)),
    "distributions": Data((C,), _log, (_soft,)),
    "log distributions": Data((C,), _log, (_log_soft,)),
    "counts": Data((C,), _same, (_counts,)),
    "counts and rates": Data((C,), torch.exp, (_counts,)),
    "normals": Data((C,), _same, (_values, _soft)),
    "normals, a variance for each sample": Data((C,), _same, (_values, _soft[:, :1])),
    "signs": Data((C,), _same, (_values.sign(),)),
    "several classes": Data((C,), _same, (torch.tensor([[3, 0, -1, 1, 2], [1, -1, 0, 0, 0]] * 3),)),
    "several classes of one sample": Data((C,), _first, (torch.tensor([3, 0, -1, 1, 2]),)),
    "pairs of vectors": Data((C,), _same, (_others, _values[:, 0].sign())),
    "a pair of vectors": Data((C,), _first, (_others[0], torch.tensor(-1.0))),
    "pairs of numbers": Data((C,), _same, (_others, _values.sign())),
    "triplets": Data((C,), _same, (_values, _others)),
    "a triplet": Data((C,), _first, (_values[0], _others[0])),
    "alignments": Data((7, C), _times_first, (_symbols, *_lengths)),
    "alignments, one impossible": Data((7, C), _times_first, (_symbols, *_too_short)),
    "alignments of labels in a row": Data(
        (7, C), _times_first, (torch.cat([row[:n] for row, n in zip(_symbols, _lengths[1], strict=True)]), *_lengths)
    ),
    "an alignment of one sample": Data(
        (7, C), lambda x: x.mean(0).log_softmax(-1), (_symbols[0], torch.tensor(7), torch.tensor(3))
    ),
}


class Row(NamedTuple):
    """A loss, its arguments, and what it is computed of."""

    loss: Any
    """A class of torch.nn or a function of torch.nn.functional."""
    settings: dict[str, Any]
    data: str

    def __str__(self) -> str:
        words = [f"{key}={value if not isinstance(value, Tensor) else '...'}" for key, value in self.settings.items()]
        return f"{self.loss.__name__}({', '.join(words)}) of {self.data}"

    def make(self) -> Any:
        return (
            self.loss(**self.settings) if isinstance(self.loss, type) else functools.partial(self.loss, **self.settings)
        )


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.125])
_WHOLE_WEIGHT = torch.linspace(0.5, 2, N * C).view(N, C)
_PIXEL_WEIGHT = WEIGHT[:, None, None].expand(C, 2, 3).contiguous()
_SAMPLE_WEIGHT = torch.linspace(0.5, 2, N)[:, None]


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(x, y)


ARGUMENTS: dict[tuple[Any, Any], list[tuple[dict[str, Any], tuple[str, ...]]]] = {
    (nn.CrossEntropyLoss, F.cross_entropy): [
        ({}, ("classes", "classes, one ignored", "classes of a sequence")),
        ({}, ("classes of pixels", "a class of one sample")),
        ({}, ("probabilities of classes", "probabilities of pixels", "probabilities of one sample")),
        ({"weight": WEIGHT}, ("classes", "classes, one ignored", "classes of pixels", "a class of one sample")),
        ({"weight": WEIGHT}, ("probabilities of classes", "probabilities of pixels", "probabilities of one sample")),
        ({"ignore_index": 2}, ("classes", "classes of pixels")),
        ({"ignore_index": 3}, ("a class of one sample",)),
        ({"label_smoothing": 0.2}, ("classes", "classes, one ignored", "classes of pixels", "a class of one sample")),
        ({"label_smoothing": 0.2}, ("probabilities of classes", "probabilities of pixels")),
        ({"label_smoothing": 1.0}, ("classes",)),
        ({"label_smoothing": 0.2, "weight": WEIGHT}, ("classes, one ignored", "classes of pixels")),
        ({"label_smoothing": 0.2, "weight": WEIGHT}, ("probabilities of classes", "probabilities of one sample")),
        ({"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": 2}, ("classes",)),
        ({"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": 3}, ("a class of one sample",)),
        ({"weight": WEIGHT, "ignore_index": 2}, ("classes", "classes of pixels")),
    ],
    (nn.NLLLoss, F.nll_loss): [
        ({}, ("log classes", "log classes, one ignored", "log classes of pixels", "a log class of one sample")),
        ({"weight": WEIGHT}, ("log classes", "log classes, one ignored", "log classes of pixels")),
        ({"weight": WEIGHT}, ("a log class of one sample",)),
        ({"ignore_index": 2}, ("log classes", "log classes of pixels")),
        ({"ignore_index": 3}, ("a log class of one sample",)),
        ({"weight": WEIGHT, "ignore_index": 2}, ("log classes", "log classes of pixels")),
    ],
    (nn.MSELoss, F.mse_loss): [({}, ("values", "values of pixels", "values, one for each sample"))],
    (None, F.mse_loss): [({"weight": _WHOLE_WEIGHT}, ("values",))],
    (nn.L1Loss, F.l1_loss): [({}, ("values", "values of pixels", "values, one for each sample"))],
    (None, F.l1_loss): [({"weight": _WHOLE_WEIGHT}, ("values",))],
    (nn.SmoothL1Loss, F.smooth_l1_loss): [
        ({}, ("values",)),
        ({"beta": 0.25}, ("values", "values of pixels", "values, one for each sample")),
        ({"beta": 0.0}, ("values",)),
    ],
    (nn.HuberLoss, F.huber_loss): [({}, ("values",)), ({"delta": 0.25}, ("values", "values of pixels"))],
    (None, F.huber_loss): [({"weight": _WHOLE_WEIGHT, "delta": 0.25}, ("values",))],
    (nn.BCELoss, F.binary_cross_entropy): [
        ({}, ("yes or no",)),
        ({"weight": WEIGHT}, ("yes or no",)),
        ({"weight": _SAMPLE_WEIGHT}, ("yes or no",)),
    ],
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits): [
        ({}, ("yes or no, logits", "yes or no, logits of pixels")),
        ({"weight": WEIGHT}, ("yes or no, logits",)),
        ({"pos_weight": WEIGHT}, ("yes or no, logits",)),
        ({"pos_weight": _PIXEL_WEIGHT}, ("yes or no, logits of pixels",)),
        ({"weight": _SAMPLE_WEIGHT, "pos_weight": WEIGHT}, ("yes or no, logits",)),
    ],
    (nn.KLDivLoss, F.kl_div): [
        ({}, ("distributions",)),
        ({"log_target": True}, ("log distributions",)),
    ],
    (nn.PoissonNLLLoss, F.poisson_nll_loss): [
        ({}, ("counts",)),
        ({"full": True}, ("counts",)),
        ({"log_input": False}, ("counts and rates",)),
        ({"log_input": False, "full": True, "eps": 0.1}, ("counts and rates",)),
    ],
    (nn.GaussianNLLLoss, F.gaussian_nll_loss): [
        ({}, ("normals", "normals, a variance for each sample")),
        ({"full": True}, ("normals",)),
        ({"eps": 0.3}, ("normals", "normals, a variance for each sample")),
    ],
    (nn.HingeEmbeddingLoss, F.hinge_embedding_loss): [({}, ("signs",)), ({"margin": 0.3}, ("signs",))],
    (nn.SoftMarginLoss, F.soft_margin_loss): [({}, ("signs",))],
    (nn.MultiLabelMarginLoss, F.multilabel_margin_loss): [({}, ("several classes", "several classes of one sample"))],
    (nn.MultiLabelSoftMarginLoss, F.multilabel_soft_margin_loss): [
        ({}, ("yes or no, logits",)),
        ({"weight": WEIGHT}, ("yes or no, logits",)),
    ],
    (nn.MultiMarginLoss, F.multi_margin_loss): [
        ({}, ("classes", "a class of one sample")),
        ({"p": 2}, ("classes",)),
        ({"margin": 0.3}, ("classes",)),
        ({"p": 2, "margin": 0.3, "weight": WEIGHT}, ("classes",)),
    ],
    (nn.CosineEmbeddingLoss, F.cosine_embedding_loss): [
        ({}, ("pairs of vectors", "a pair of vectors")),
        ({"margin": 0.3}, ("pairs of vectors",)),
    ],
    (nn.MarginRankingLoss, F.margin_ranking_loss): [
        ({}, ("pairs of numbers",)),
        ({"margin": 0.3}, ("pairs of numbers",)),
    ],
    (nn.TripletMarginLoss, F.triplet_margin_loss): [
        ({}, ("triplets", "a triplet")),
        ({"margin": 0.3}, ("triplets",)),
        ({"p": 1.0}, ("triplets",)),
        ({"p": 3.0, "eps": 0.1}, ("triplets",)),
        ({"swap": True, "margin": 3.0}, ("triplets",)),
    ],
    (nn.TripletMarginWithDistanceLoss, F.triplet_margin_with_distance_loss): [
        ({}, ("triplets",)),
        ({"distance_function": _cosine, "margin": 0.3}, ("triplets",)),
        ({"swap": True, "margin": 3.0}, ("triplets",)),
    ],
    (nn.CTCLoss, F.ctc_loss): [
        ({}, ("alignments", "alignments of labels in a row", "an alignment of one sample")),
        ({"blank": 4}, ("alignments",)),
        ({"zero_infinity": True}, ("alignments, one impossible",)),
    ],
}  # fmt: skip
"""The class and the function of a loss -> arguments, and which data they are tried with, with each reduction."""


def rows() -> Iterator[Row]:
    """All rows of the table."""
    for pair, cases in ARGUMENTS.items():
        for loss, (settings, kinds) in itertools.product(filter(None, pair), cases):
            reductions = ["mean", "sum", "none", *(["batchmean"] if loss in (nn.KLDivLoss, F.kl_div) else [])]
            for data, reduction in itertools.product(kinds, reductions):
                given = settings if reduction == "mean" else {**settings, "reduction": reduction}
                yield Row(loss, given, data)


def groups() -> dict[str, list[Row]]:
    """Rows of the same class or function with the same data, which one module can compute together."""
    made: dict[str, list[Row]] = {}
    for row in rows():
        made.setdefault(f"{row.loss.__name__} of {row.data}", []).append(row)
    return made


# ---- modules ---------------------------------------------------------------------------------------------------------


class Predicting(nn.Module):
    """A layer whose output a loss takes."""

    def __init__(self, data: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.link, _ = DATA[data]
        self.layer = nn.Linear(WIDTH, torch.Size(self.shape).numel())

    def predict(self, x: Tensor) -> Tensor:
        return self.link(self.layer(x).unflatten(1, self.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(x)


class Losing(Predicting):
    """The same with losses inside: each is an output, and the sum of all is the loss.

    Each is divided by its first value, so that none is small beside the others.
    """

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(rows[0].data)
        losses = [row.make() for row in rows]
        self.modules_of_torch = nn.ModuleList(loss for loss in losses if isinstance(loss, nn.Module))
        self.losses = losses
        self.scales = [1.0] * len(rows)
        values = self(inputs(), *DATA[rows[0].data].targets)
        self.scales = [1 / max(1e-3, abs(values[f"loss_{i}"].item())) for i in range(len(rows))]

    def forward(self, x: Tensor, *targets: Tensor) -> dict[str, Tensor]:
        prediction = self.predict(x)
        values = {}
        for i, (loss, scale) in enumerate(zip(self.losses, self.scales, strict=True)):
            value = loss(prediction, *targets)
            values[f"loss_{i}"] = (value if value.ndim == 0 else value.square().sum()) * scale
        return {"loss": torch.stack(list(values.values())).sum(), **values}


def inputs() -> Tensor:
    return _randn(N, WIDTH, seed=3)
