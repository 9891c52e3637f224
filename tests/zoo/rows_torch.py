"""Networks of PyTorch as tutorials and textbooks write them, and every layer of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from side_torch import Objects
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo import Case

CASES: list[Case] = []

BATCH = 4
STATIC: Mapping[str, Any] = {"dynamic_shapes": {}}


def row(family: str, *, quick: bool = False) -> Callable[[Callable[[], Objects]], Callable[[], Objects]]:
    """Add a function that builds objects as a row of a family, with seeded random numbers."""

    def add(build: Callable[[], Objects]) -> Callable[[], Objects]:
        def seeded() -> Objects:
            torch.manual_seed(0)
            return build()

        CASES.append(Case(family, build.__name__, "torch", seeded, quick=quick))
        return build

    return add


def regression(net: nn.Module, *inputs: Tensor, **options: Any) -> Objects:
    """Return objects with a squared error towards random targets."""
    result = net.train()(*inputs).detach()
    return Objects(net, inputs, nn.MSELoss(), torch.randn_like(result), options=options)


def classification(net: nn.Module, *inputs: Tensor, classes: int = 4, **options: Any) -> Objects:
    """Return objects with a cross entropy of classes for each row."""
    return Objects(net, inputs, nn.CrossEntropyLoss(), torch.randint(0, classes, (len(inputs[0]),)), options=options)


def images(channels: int = 3, size: int = 16, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, channels, size, size)


def tokens(words: int, *shape: int) -> Tensor:
    return torch.randint(1, words, shape)


# ---- layers ----------------------------------------------------------------------------------------------------------

Layers = Callable[[], tuple[nn.Module, Tensor]]


def _layers(name: str, build: Layers) -> None:
    @row("layers")
    def objects() -> Objects:
        net, x = build()
        return regression(net, x)

    CASES[-1] = Case("layers", name, "torch", CASES[-1].build)


def _after(layer: nn.Module, *sizes: int) -> tuple[nn.Module, Tensor]:
    """Return a layer after a convolution or a matmul, and its input."""
    channels, *rest = sizes
    first = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(rest)]
    before = first(channels, channels) if not rest else first(channels, channels, 1)
    return nn.Sequential(before, layer), torch.randn(BATCH, *sizes)


def _chain(width: int, *layers: nn.Module) -> tuple[nn.Module, Tensor]:
    """Return layers between matmuls, and their input."""
    parts = [part for layer in layers for part in (nn.Linear(width, width), layer)]
    return nn.Sequential(*parts), torch.randn(BATCH, width)


@row("layers", quick=True)
def mlp():
    net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    return classification(net, torch.randn(8, 12))


_SMOOTH = (nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.ELU, nn.SELU, nn.CELU, nn.LogSigmoid, nn.Tanh, nn.Sigmoid,
           nn.Softsign, nn.Tanhshrink)  # fmt: skip
_PIECEWISE = (nn.LeakyReLU, nn.PReLU, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.ReLU6, nn.Softshrink)

for _name, _build in {
    "smooth_activations": lambda: _chain(6, *(layer() for layer in _SMOOTH)),
    "piecewise_activations": lambda: _chain(6, *(layer() for layer in _PIECEWISE)),
    "gelu_tanh": lambda: _chain(6, nn.GELU("tanh"), nn.Threshold(0.1, -1.0), nn.Hardshrink(0.1)),
    "glu": lambda: (nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.Linear(4, 6), nn.GLU(1)), torch.randn(BATCH, 6)),
    "softmaxes": lambda: _chain(6, nn.Softmax(1), nn.LogSoftmax(-1), nn.Softmin(1)),
    "softmax2d": lambda: _after(nn.Softmax2d(), 3, 4, 4),
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(BATCH, 4, 11)),
    "conv2d_options": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, padding="same", dilation=2), nn.Conv2d(8, 8, (3, 1), groups=8, bias=False)),
        images(4, 9)),
    "conv2d_padding_modes": lambda: (
        nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, padding_mode=mode)
                        for mode in ("zeros", "reflect", "replicate", "circular"))), images(3, 7)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 3, padding=1, stride=(1, 2, 2)), torch.randn(BATCH, 2, 4, 6, 6)),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(4, 3, 4, 2, 1), torch.randn(BATCH, 4, 7)),
    "conv_transpose2d": lambda: (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), images(4, 5)),
    "conv_transpose3d": lambda: (nn.ConvTranspose3d(2, 3, 2, 2), torch.randn(BATCH, 2, 3, 3, 3)),
    "max_pools": lambda: _after(nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True)), 3, 13, 13),
    "max_pool_1d_3d": lambda: _after(
        nn.Sequential(nn.MaxPool3d(2), nn.Flatten(2), nn.MaxPool1d(2, dilation=2, stride=1)), 2, 4, 4, 4),
    "average_pools": lambda: _after(
        nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.AvgPool2d(2, count_include_pad=False)), 3, 12, 12),
    "average_pool_1d_3d": lambda: _after(
        nn.Sequential(nn.AvgPool3d(2, ceil_mode=True), nn.Flatten(2), nn.AvgPool1d(2)), 2, 4, 4, 4),
    "lp_pools": lambda: _after(nn.Sequential(nn.LPPool2d(2, 2), nn.Flatten(2), nn.LPPool1d(3, 2)), 3, 8, 8),
    "adaptive_average_pools": lambda: _after(
        nn.Sequential(nn.AdaptiveAvgPool2d((5, 4)), nn.AdaptiveAvgPool2d(1)), 3, 10, 12),
    "adaptive_average_pool_uneven": lambda: _after(nn.AdaptiveAvgPool2d((3, 5)), 3, 7, 7),
    "adaptive_max_pools": lambda: _after(nn.AdaptiveMaxPool2d((4, 2)), 3, 8, 8),
    "max_unpool": lambda: (Unpooling(), images(3, 8)),
    "batch_norms": lambda: (
        nn.Sequential(nn.Conv3d(2, 4, 1), nn.BatchNorm3d(4), nn.Flatten(3), nn.BatchNorm2d(4), nn.Flatten(2),
                      nn.BatchNorm1d(4, affine=False)), torch.randn(BATCH, 2, 3, 3, 3)),
    "batch_norm_without_statistics": lambda: _after(nn.BatchNorm2d(4, track_running_stats=False), 4, 5, 5),
    "layer_norms": lambda: _after(
        nn.Sequential(nn.LayerNorm([6, 6]), nn.LayerNorm(6, bias=False), nn.RMSNorm(6)), 3, 6, 6),
    "group_norms": lambda: _after(nn.Sequential(nn.GroupNorm(2, 6), nn.GroupNorm(6, 6, affine=False)), 6, 5, 5),
    "instance_norms": lambda: _after(
        nn.Sequential(nn.InstanceNorm2d(3), nn.InstanceNorm2d(3, affine=True)), 3, 6, 6),
    "instance_norm_1d_3d": lambda: _after(
        nn.Sequential(nn.InstanceNorm3d(3, affine=True), nn.Flatten(2), nn.InstanceNorm1d(3)), 3, 4, 4, 4),
    "instance_norm_with_statistics": lambda: _after(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True), 3, 6, 6),
    "local_response_norm": lambda: _after(nn.LocalResponseNorm(3), 6, 5, 5),
    "paddings": lambda: _after(
        nn.Sequential(nn.ReflectionPad2d(2), nn.ReplicationPad2d((1, 0, 2, 1)), nn.ZeroPad2d(1),
                      nn.ConstantPad2d(1, 0.5), nn.CircularPad2d(2)), 2, 5, 5),
    "paddings_1d_3d": lambda: _after(
        nn.Sequential(nn.ReplicationPad3d(1), nn.Flatten(2), nn.ReflectionPad1d(2), nn.ConstantPad1d(1, 2.0)),
        2, 3, 3, 3),
    "shuffles": lambda: _after(
        nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Conv2d(8, 8, 1)), 8, 4, 4),
    "upsampling": lambda: _after(
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"),
                      nn.Upsample(size=(9, 9), mode="bicubic", align_corners=True)), 2, 3, 3),
    "upsampling_1d_3d": lambda: _after(
        nn.Sequential(nn.Upsample(scale_factor=2, mode="trilinear"), nn.Flatten(2),
                      nn.Upsample(scale_factor=2, mode="linear")), 2, 2, 3, 3),
    "unfold": lambda: _after(nn.Sequential(nn.Unfold(2, stride=2), nn.Linear(9, 4)), 2, 6, 6),
    "fold": lambda: (
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.Unfold(3, padding=1), nn.Fold((6, 6), 3, padding=1)), images(2, 6)),
    "reshaping": lambda: (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Unflatten(1, (2, 4)), nn.Identity(), nn.Linear(4, 2)),
        torch.randn(BATCH, 3, 4)),
    "dropouts": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.0), nn.Flatten(), nn.Linear(64, 8), nn.AlphaDropout(0.0),
                      nn.SELU(), nn.Dropout(0.0), nn.Linear(8, 2)), images(2, 6)),
    "embedding": lambda: (nn.Sequential(nn.Embedding(9, 4, padding_idx=1), nn.Linear(4, 2)), tokens(9, BATCH, 5)),
    "embedding_bag_mean": lambda: (nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2)), tokens(9, BATCH, 5)),
    "embedding_bag_max": lambda: (
        nn.Sequential(nn.EmbeddingBag(9, 4, mode="max"), nn.Linear(4, 2)), tokens(9, BATCH, 5)),
    "spectral_norm": lambda: (
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.ReLU(), nn.Linear(5, 2)),
        torch.randn(BATCH, 6)),
    "weight_norm": lambda: (
        nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(),
                      parametrizations.weight_norm(nn.Linear(64, 2), dim=None)), images(3, 6)),
    "weight_norm_of_old": lambda: (nn.utils.weight_norm(nn.Linear(6, 3)), torch.randn(BATCH, 6)),
    "orthogonal": lambda: (parametrizations.orthogonal(nn.Linear(4, 4)), torch.randn(BATCH, 4)),
    "transformer_encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
        torch.randn(BATCH, 5, 8)),
    "transformer_encoder_norm_first": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True), 2,
                              nn.LayerNorm(8), enable_nested_tensor=False), torch.randn(BATCH, 5, 8)),
}.items():  # fmt: skip
    _layers(_name, _build)


class Unpooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.unpool = nn.Conv2d(3, 3, 1), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x):
        x, indices = self.pool(self.conv(x))
        return self.unpool(x, indices)


class Call(nn.Module):
    """A function of a module and its inputs as a module."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *inputs):
        return self.function(self.module, *inputs)


@row("layers")
def bilinear():
    return regression(nn.Bilinear(4, 5, 3), torch.randn(BATCH, 4), torch.randn(BATCH, 5))


@row("layers")
def distances():
    def forward(net, a, b):
        a, b = net(a), net(b)
        return torch.stack([nn.CosineSimilarity()(a, b), nn.PairwiseDistance()(a, b)], 1)

    return regression(Call(nn.Linear(5, 6), forward), torch.randn(BATCH, 5), torch.randn(BATCH, 5))


@row("layers")
def embedding_bag_offsets():
    inputs = tokens(9, 10), torch.tensor([0, 2, 5, 9])
    return regression(Call(nn.EmbeddingBag(9, 4, mode="mean"), lambda bag, x, at: bag(x, at)), *inputs)


@row("layers")
def embedding_bag_max_offsets():
    inputs = tokens(9, 10), torch.tensor([0, 2, 5, 9])
    return regression(Call(nn.EmbeddingBag(9, 4, mode="max"), lambda bag, x, at: bag(x, at)), *inputs)


@row("layers")
def embedding_bag_weights():
    inputs = tokens(9, BATCH, 3), torch.rand(BATCH, 3)
    bag = nn.EmbeddingBag(9, 4, mode="sum")
    return regression(Call(bag, lambda bag, x, weights: bag(x, per_sample_weights=weights)), *inputs)


@row("layers")
def multi_head_attention():
    net = Call(nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=5), lambda mha, q, k, v: mha(q, k, v)[0])
    return regression(net, torch.randn(BATCH, 3, 8), torch.randn(BATCH, 4, 6), torch.randn(BATCH, 4, 5))


@row("layers")
def multi_head_attention_masked():
    def forward(mha, x, padding):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).isinf()
        result, weights = mha(x, x, x, key_padding_mask=padding, attn_mask=mask)
        return result + weights.sum(-1, keepdim=True)

    padding = torch.zeros(BATCH, 4, dtype=torch.bool)
    padding[:, -1] = True
    return regression(Call(nn.MultiheadAttention(8, 2, batch_first=True), forward), torch.randn(BATCH, 4, 8), padding)


@row("layers")
def transformer():
    net = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
    return regression(net, torch.randn(BATCH, 5, 8), torch.randn(BATCH, 3, 8))


@row("layers")
def transformer_decoder():
    net = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    net = Call(net, lambda decoder, x, memory: decoder(x, memory, tgt_mask=mask, tgt_is_causal=True))
    return regression(net, torch.randn(BATCH, 3, 8), torch.randn(BATCH, 5, 8))


for _name, _module in {
    "rnn": lambda: nn.RNN(5, 6, batch_first=True, nonlinearity="relu"),
    "lstm": lambda: nn.LSTM(5, 6, 2, batch_first=True),
    "lstm_bidirectional": lambda: nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True, bias=False),
    "lstm_projected": lambda: nn.LSTM(5, 6, batch_first=True, proj_size=3),
    "lstm_projected_stacked": lambda: nn.LSTM(5, 6, 2, batch_first=True, proj_size=3, bidirectional=True),
    "gru": lambda: nn.GRU(5, 6, 2, batch_first=True, bidirectional=True),
}.items():
    _layers(_name, lambda _module=_module: (Call(_module(), lambda net, x: net(x)[0]), torch.randn(BATCH, 4, 5)))


@row("layers")
def recurrent_cells():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.gru, self.lstm = nn.RNNCell(4, 5), nn.GRUCell(5, 5), nn.LSTMCell(5, 5)

        def forward(self, x):
            a = b = x.new_zeros(len(x), 5)
            state = None
            for i in range(x.shape[1]):
                a = self.rnn(x[:, i], a)
                b = self.gru(a, b)
                state = self.lstm(b, state)
            return state[0]

    return regression(Cells(), torch.randn(BATCH, 3, 4))


@row("layers")
def packed_lstm():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            _, (last, _) = self.lstm(packed)
            return self.head(last[-1])

    return classification(Packed(), torch.randn(BATCH, 5, 5), torch.tensor([5, 3, 2, 4]))


@row("layers")
def packed_gru_padded_again():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.gru = nn.Embedding(9, 5), nn.GRU(5, 6, batch_first=True, bidirectional=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
            return pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0]

    return regression(Packed(), tokens(9, BATCH, 5), torch.tensor([5, 4, 4, 2]))


@row("layers")
def custom_parametrization():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

    net = nn.utils.parametrize.register_parametrization
    linear = nn.Linear(4, 4)
    net(linear, "weight", Symmetric())
    return regression(nn.Sequential(linear, nn.Tanh(), nn.Linear(4, 2)), torch.randn(BATCH, 4))


@row("layers")
def custom_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3 * ctx.saved_tensors[0] ** 2

    return regression(Call(nn.Linear(4, 4), lambda net, x: Cube.apply(net(x))), torch.randn(BATCH, 4))


@row("layers")
def straight_through():
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return regression(Call(nn.Linear(4, 4), lambda net, x: Rounded.apply(net(x))), torch.randn(BATCH, 4))


# ---- losses ----------------------------------------------------------------------------------------------------------


def _loss(name: str, loss: Callable[[], Any], targets: Callable[[], Any], outputs: int = 4) -> None:
    @row("losses")
    def objects() -> Objects:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))
        return Objects(net, torch.randn(BATCH, 6), loss(), targets())

    CASES[-1] = Case("losses", name, "torch", CASES[-1].build)


def classes() -> Tensor:
    return torch.randint(0, 4, (BATCH,))


def signs(*shape: int) -> Tensor:
    return torch.randint(0, 2, shape).float() * 2 - 1


def focal(logits, target):
    probability = torch.softmax(logits, 1).gather(1, target[:, None])
    return (-((1 - probability) ** 2) * probability.log()).mean()


def dice(logits, target):
    p = logits.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


class Quantiles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.7, 0.9]))

    def forward(self, prediction, target):
        error = target[:, None] - prediction
        return torch.maximum(self.levels * error, (self.levels - 1) * error).sum(1).mean()


for _name, _arguments in {
    "cross_entropy": (lambda: nn.CrossEntropyLoss(torch.rand(4), label_smoothing=0.1), classes),
    "nll": (lambda: (lambda x, y: F.nll_loss(x.log_softmax(1), y)), classes),
    "binary": (lambda: nn.BCEWithLogitsLoss(pos_weight=torch.rand(4)), lambda: torch.rand(BATCH, 4).round()),
    "smooth_l1": (lambda: nn.SmoothL1Loss(beta=0.5), lambda: torch.randn(BATCH, 4)),
    "soft_margin": (nn.SoftMarginLoss, lambda: signs(BATCH, 4)),
    "multi_margin": (nn.MultiMarginLoss, classes),
    "multi_label_soft_margin": (nn.MultiLabelSoftMarginLoss, lambda: torch.rand(BATCH, 4).round()),
    "hinge_embedding": (nn.HingeEmbeddingLoss, lambda: signs(BATCH, 4)),
    "gaussian_nll": (
        lambda: (lambda x, y: F.gaussian_nll_loss(x[:, :2], y, x[:, 2:].exp())), lambda: torch.randn(BATCH, 2)),
    "focal": (lambda: focal, classes),
    "dice": (lambda: dice, lambda: torch.rand(BATCH, 4).round()),
    "quantiles": (Quantiles, lambda: torch.randn(BATCH)),
    "lambda_with_constant": (
        lambda: (lambda scale: (lambda x, y: ((x - y) ** 2 * scale).sum(1).sqrt().mean()))(torch.rand(4)),
        lambda: torch.randn(BATCH, 4)),
}.items():  # fmt: skip
    _loss(_name, *_arguments)


@row("losses")
def cosine_embedding_of_two():
    net = Call(nn.Linear(6, 5), lambda net, a, b: (net(a), net(b)))
    loss = nn.CosineEmbeddingLoss(margin=0.1)
    inputs = torch.randn(BATCH, 6), torch.randn(BATCH, 6)
    return Objects(net, inputs, lambda pair, sign: loss(*pair, sign), signs(BATCH))


@row("losses")
def margin_ranking_of_two():
    net = Call(nn.Linear(6, 1), lambda net, a, b: (net(a).squeeze(1), net(b).squeeze(1)))
    inputs = torch.randn(BATCH, 6), torch.randn(BATCH, 6)
    return Objects(net, inputs, lambda pair, sign: F.margin_ranking_loss(*pair, sign, 0.2), signs(BATCH))


@row("losses")
def triplet_of_three():
    net = Call(nn.Linear(6, 5), lambda net, a, b, c: (net(a), net(b), net(c)))
    inputs = tuple(torch.randn(BATCH, 6) for _ in range(3))
    return Objects(net, inputs, lambda result: F.triplet_margin_loss(*result, margin=2.0), None)


@row("losses")
def contrastive_of_pairs():
    net = Call(nn.Linear(6, 5), lambda net, a, b: {"left": net(a), "right": net(b)})

    def loss(result, same):
        distance = F.pairwise_distance(result["left"], result["right"])
        return (same * distance**2 + (1 - same) * F.relu(2 - distance) ** 2).mean()

    return Objects(net, (torch.randn(BATCH, 6), torch.randn(BATCH, 6)), loss, torch.rand(BATCH).round())


@row("losses")
def clip_loss():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text, self.scale = nn.Linear(6, 5), nn.Linear(7, 5), nn.Parameter(torch.tensor(2.0))

        def forward(self, image, text):
            image, text = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
            return self.scale.exp() * image @ text.T

    def loss(scores):
        labels = torch.arange(len(scores))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return Objects(Towers(), (torch.randn(BATCH, 6), torch.randn(BATCH, 7)), loss, None)


@row("losses")
def adaptive_log_softmax():
    net = nn.ModuleDict({"body": nn.Linear(6, 8), "head": nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8])})
    net = Call(net, lambda net, x, y: net["head"](net["body"](x), y).loss)
    return Objects(net, (torch.randn(BATCH, 6), torch.randint(0, 12, (BATCH,))), "output")


@row("losses")
def sequence_ctc():
    net = Call(nn.Linear(6, 5), lambda net, x: net(x).log_softmax(2).transpose(0, 1))
    targets = torch.randint(1, 5, (BATCH, 2)), torch.full((BATCH,), 7), torch.full((BATCH,), 2)
    return Objects(net, torch.randn(BATCH, 7, 6), nn.CTCLoss(), targets)


# ---- images ----------------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


@row("images")
def lenet():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 5), nn.Sigmoid(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(24, 12), nn.Sigmoid(), nn.Linear(12, 4),
    )  # fmt: skip
    return classification(net, images(1, 16))


@row("images")
def mnist_cnn():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0), nn.Flatten(),
        nn.Linear(128, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 4), nn.LogSoftmax(1),
    )  # fmt: skip
    return Objects(net, images(1, 12), F.nll_loss, classes())


@row("images")
def small_resnet():
    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.body = nn.Sequential(
                convolution(inputs, outputs, stride), nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
            )
            self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            return F.relu(self.body(x) + self.skip(x))

    net = nn.Sequential(
        convolution(3, 8), Block(8, 8, 1), Block(8, 12, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)
    )
    return classification(net, images(3, 12))


@row("images")
def u_net():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.bottom = nn.ModuleList([convolution(3, 4), convolution(4, 8)]), convolution(8, 16)
            self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
            self.join, self.head = nn.ModuleList([convolution(16, 8), convolution(8, 4)]), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            skips = []
            for block in self.down:
                x = block(x)
                skips.append(x)
                x = F.max_pool2d(x, 2)
            x = self.bottom(x)
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([up(x), skips.pop()], 1))
            return self.head(x)

    return Objects(UNet(), images(3, 16), nn.CrossEntropyLoss(), torch.randint(0, 3, (BATCH, 16, 16)))


@row("images")
def super_resolution():
    net = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip
    return regression(net, images(1, 8))


@row("images")
def fast_style():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    def reflected(inputs, outputs, size, stride=1):
        return nn.Sequential(nn.ReflectionPad2d(size // 2), nn.Conv2d(inputs, outputs, size, stride))

    net = nn.Sequential(
        reflected(3, 4, 5), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), reflected(4, 8, 3, 2), nn.ReLU(),
        Residual(reflected(8, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), reflected(8, 8, 3)),
        nn.Upsample(scale_factor=2), reflected(8, 3, 5),
    )  # fmt: skip
    return regression(net, images(3, 12))


@row("images")
def spatial_transformer():
    class SpatialTransformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.locate = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(100, 6))
            self.head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 4))
            self.locate[-1].weight.data.mul_(0.1)
            self.locate[-1].bias.data.copy_(torch.tensor([0.9, 0.1, 0.05, -0.1, 0.8, 0.03]))

        def forward(self, x):
            grid = F.affine_grid(self.locate(x).view(-1, 2, 3), x.size(), align_corners=False)
            return self.head(F.grid_sample(x, grid, align_corners=False))

    return classification(SpatialTransformer(), images(1, 12))


@row("images")
def siamese():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 8))
            self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, a, b):
            return self.head(torch.cat([self.body(a), self.body(b)], 1)).sigmoid().squeeze()

    return Objects(Siamese(), (images(1, 12), images(1, 12)), nn.BCELoss(), torch.rand(BATCH).round())


@row("images")
def vision_transformer():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
            self.positions = nn.Parameter(torch.randn(1, 10, 8))
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.head(self.body(x)[:, 0])

    return classification(Vision(), images(3, 12))


@row("images")
def dcgan_discriminator():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    return Objects(net, images(3, 16), nn.BCELoss(), torch.rand(BATCH).round())


@row("images")
def dcgan_generator():
    net = nn.Sequential(
        nn.ConvTranspose2d(6, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 3, 4, 2, 1),
        nn.Tanh(),
    )  # fmt: skip
    return regression(net, torch.randn(BATCH, 6, 1, 1))


@row("images")
def video_net():
    net = nn.Sequential(
        nn.Conv3d(3, 4, (3, 5, 5), (1, 2, 2), (1, 2, 2), bias=False), nn.BatchNorm3d(4), nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)), nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    return classification(net, torch.randn(BATCH, 3, 4, 12, 12))


# ---- autoencoders ----------------------------------------------------------------------------------------------------


class Autoencoder(nn.Module):
    """Variational autoencoder whose noise is an input."""

    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.log_variance = nn.Linear(20, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 20), nn.Sigmoid())

    def forward(self, x, noise):
        h = F.relu(self.encoder(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.decoder(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance


@row("autoencoders")
def vae():
    def loss(result, x):
        reconstruction, mean, log_variance = result
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(reconstruction, x, reduction="sum") + divergence

    x = torch.rand(BATCH, 20)
    return Objects(Autoencoder(), (x, torch.randn(BATCH, 3)), loss, x)


@row("autoencoders")
def vae_with_own_noise():
    class Noisy(Autoencoder):
        def forward(self, x):
            return super().forward(x, torch.randn(len(x), 3))[0]

    return regression(Noisy(), torch.rand(BATCH, 20))


@row("autoencoders")
def convolutional_autoencoder():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(4, 1, 3, 2, 1, 1), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.rand(BATCH, 1, 12, 12)
    return Objects(net, x, nn.BCELoss(), x)


@row("autoencoders")
def vector_quantized():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.codes, self.decoder = nn.Linear(10, 4), nn.Embedding(6, 4), nn.Linear(4, 10)

        def forward(self, x):
            z = self.encoder(x)
            q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
            return self.decoder(z + (q - z).detach()), z, q

    def loss(result, x):
        y, z, q = result
        return F.mse_loss(y, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    x = torch.randn(BATCH, 10)
    return Objects(Quantized(), x, loss, x)


@row("autoencoders")
def diffusion_step():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.body = nn.Embedding(10, 8), nn.Sequential(nn.Linear(14, 16), nn.SiLU(), nn.Linear(16, 6))
            self.register_buffer("alpha", torch.linspace(0.99, 0.5, 10))

        def forward(self, x, noise, t):
            alpha = self.alpha[t][:, None]
            x = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
            return self.body(torch.cat([x, self.time(t)], 1))

    noise = torch.randn(BATCH, 6)
    return Objects(Denoiser(), (torch.randn(BATCH, 6), noise, tokens(10, BATCH)), nn.MSELoss(), noise)


# ---- text and time ---------------------------------------------------------------------------------------------------


class WordModel(nn.Module):
    def __init__(self, cell: str, tie: bool = False):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 8), getattr(nn, cell)(8, 8, 2), nn.Linear(8, 11)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x, state):
        y, state = self.rnn(self.embed(x), state)
        return self.head(y).view(-1, 11).log_softmax(1), state


def _words(cell: str, tie: bool = False) -> Objects:
    hidden = torch.zeros(2, BATCH, 8)
    state = (hidden, hidden.clone()) if cell == "LSTM" else hidden
    axes: dict[str, Any] = {"x": {1: "batch"}, "state": {1: "batch"}, "state_0": {1: "batch"}}
    axes["state_1"] = axes["state_0"]
    names = {"x", "state_0", "state_1"} if cell == "LSTM" else {"x", "state"}
    return Objects(
        WordModel(cell, tie), (tokens(11, 5, BATCH), state), lambda result, y: F.nll_loss(result[0], y),
        tokens(11, 5 * BATCH), options={"dynamic_shapes": {name: axes[name] for name in names}},
    )  # fmt: skip


@row("text")
def word_model_rnn():
    return _words("RNN")


@row("text")
def word_model_lstm_tied():
    return _words("LSTM", tie=True)


@row("text")
def word_model_gru():
    return _words("GRU")


@row("text")
def word_model_transformer():
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
            position, frequency = torch.arange(12.0)[:, None], torch.exp(torch.arange(0, 8, 2) * -1.15)
            angles = position * frequency
            self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, None])
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 2)

        def forward(self, x):
            mask = torch.log(torch.tril(torch.ones(len(x), len(x))))
            x = self.embed(x) * 8**0.5 + self.positions[: len(x)]
            return self.head(self.body(x, mask=mask)).log_softmax(-1).view(-1, 11)

    options = {"dynamic_shapes": {"x": {1: "batch"}}}
    return Objects(Transformer(), tokens(11, 6, BATCH), nn.NLLLoss(), tokens(11, 6 * BATCH), options=options)


@row("text")
def small_gpt():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(8), nn.LayerNorm(8)
            self.heads, self.join = nn.Linear(8, 24), nn.Linear(8, 8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            n, t, c = x.shape
            q, k, v = (y.view(n, t, 2, 4).transpose(1, 2) for y in self.heads(self.before(x)).split(c, 2))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.join(y.transpose(1, 2).reshape(n, t, c))
            return x + self.mlp(self.after(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
            self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x, targets):
            x = self.words(x) + self.positions(torch.arange(x.shape[1]))
            logits = self.head(self.norm(self.blocks(x)))
            return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)}

    return Objects(Gpt(), {"x": tokens(11, BATCH, 6), "targets": tokens(11, BATCH, 6)})


@row("text")
def rotary_attention():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.heads, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
            self.register_buffer("angles", torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1])), persistent=False)

        def rotate(self, x):
            a, b = x[..., ::2], x[..., 1::2]
            cos, sin = self.angles[: x.shape[2]].cos(), self.angles[: x.shape[2]].sin()
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.heads(self.embed(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
            return self.head(y.transpose(1, 2).flatten(2)).transpose(1, 2)

    return Objects(Rotary(), tokens(11, BATCH, 5), nn.CrossEntropyLoss(), tokens(11, BATCH, 5))


@row("text")
def text_classifier():
    net = Call(
        nn.ModuleDict({"embed": nn.EmbeddingBag(11, 8), "head": nn.Linear(8, 4)}),
        lambda net, x, offsets: net["head"](net["embed"](x, offsets)),
    )
    return Objects(net, (tokens(11, 12), torch.tensor([0, 3, 4, 8])), nn.CrossEntropyLoss(), classes())


@row("text")
def text_cnn():
    class TextCnn(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(12, 4)
            self.convolutions = nn.ModuleList([nn.Conv1d(6, 4, width) for width in (2, 3, 4)])

        def forward(self, x):
            x = self.embed(x).transpose(1, 2)
            return self.head(torch.cat([conv(x).relu().amax(2) for conv in self.convolutions], 1))

    return classification(TextCnn(), tokens(11, BATCH, 7))


@row("text")
def sequence_to_sequence():
    class Translator(nn.Module):
        """Encoder and decoder with additive attention, fed with the true words."""

        def __init__(self):
            super().__init__()
            self.source, self.target, self.encoder = nn.Embedding(9, 6), nn.Embedding(8, 6), nn.GRU(6, 6)
            self.query, self.key, self.score = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
            self.decoder, self.head = nn.GRUCell(12, 6), nn.Linear(6, 8)

        def forward(self, source, target):
            memory, state = self.encoder(self.source(source))
            state, results = state[0], []
            for word in self.target(target).unbind(0):
                weights = self.score(torch.tanh(self.query(state) + self.key(memory))).softmax(0)
                state = self.decoder(torch.cat([word, (weights * memory).sum(0)], 1), state)
                results.append(self.head(state))
            return torch.stack(results, 2)

    options = {"dynamic_shapes": {"source": {1: "batch"}, "target": {1: "batch"}}}
    inputs = tokens(9, 5, BATCH), tokens(8, 4, BATCH)
    return Objects(Translator(), inputs, nn.CrossEntropyLoss(), tokens(8, BATCH, 4), options=options)


@row("text")
def encoder_decoder_masked():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target, self.head = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 9)
            self.body = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

        def forward(self, source, target):
            causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            padding = source == 0
            y = self.body(
                self.source(source), self.target(target), tgt_mask=causal, src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )  # fmt: skip
            return self.head(y).transpose(1, 2)

    source = tokens(9, BATCH, 5)
    source[:, -1] = 0
    loss = nn.CrossEntropyLoss(ignore_index=0)
    return Objects(Translator(), (source, tokens(9, BATCH, 4)), loss, torch.randint(0, 9, (BATCH, 4)))


@row("time")
def sine_waves():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

        def forward(self, x):
            h = c = g = d = x.new_zeros(x.size(0), 6)
            results = []
            for value in x.split(1, dim=1):
                h, c = self.first(value, (h, c))
                g, d = self.second(h, (g, d))
                results.append(self.head(g))
            return torch.cat(results, 1)

    return regression(Sequence(), torch.randn(BATCH, 5).sin())


@row("time")
def mnist_rnn():
    net = nn.ModuleDict({"rnn": nn.LSTM(8, 6, batch_first=True), "norm": nn.BatchNorm1d(6), "head": nn.Linear(6, 4)})
    net = Call(net, lambda net, x: net["head"](net["norm"](net["rnn"](x.flatten(1, 2))[0][:, -1])).log_softmax(1))
    return Objects(net, images(1, 8), F.nll_loss, classes())


@row("time")
def temporal_convolutions():
    def causal(inputs, outputs, dilation):
        return nn.Sequential(nn.ConstantPad1d((2 * dilation, 0), 0.0), nn.Conv1d(inputs, outputs, 3, dilation=dilation))

    net = nn.Sequential(causal(2, 6, 1), nn.ReLU(), causal(6, 6, 2), nn.ReLU(), causal(6, 2, 4))
    return regression(net, torch.randn(BATCH, 2, 9))


@row("time")
def state_space_scan():
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay, self.inward, self.outward = nn.Parameter(torch.randn(6)), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            state, decay = x.new_zeros(len(x), 6), torch.sigmoid(self.decay)
            for value in self.inward(x).unbind(1):
                state = decay * state + value
            return self.outward(state)

    return regression(Scan(), torch.randn(BATCH, 5, 3))


@row("time")
def fourier_layer():
    def forward(net, x):
        return torch.fft.rfft(net(x), dim=1).abs()

    return regression(Call(nn.Linear(8, 8), forward), torch.randn(BATCH, 8))


@row("time")
def stft_features():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(9, 4)
            self.register_buffer("window", torch.hann_window(16))

        def forward(self, x):
            spectrum = torch.stft(x, 16, 8, window=self.window, return_complex=True)
            return self.head(spectrum.abs().square().add(1e-3).log().mean(2))

    return classification(Speech(), torch.randn(BATCH, 64))


# ---- graphs ----------------------------------------------------------------------------------------------------------

NODES = 6
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2, 4, 1], [1, 2, 3, 4, 5, 0, 3, 5, 1, 4]])
GRAPH: Mapping[str, Any] = {"dynamic_shapes": {"x": {0: "nodes"}, "edges": {1: "edges"}}}


def _graph(net: nn.Module) -> Objects:
    targets = torch.randint(0, 4, (NODES,))
    return Objects(net, (torch.randn(NODES, 5), EDGES), nn.CrossEntropyLoss(), targets, options=GRAPH)


class Aggregation(nn.Module):
    """Two layers of messages along edges."""

    def __init__(self, how: str):
        super().__init__()
        self.layers, self.how = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 4)]), how

    def forward(self, x, edges):
        source, target = edges
        for i, layer in enumerate(self.layers):
            messages = layer(x)[source]
            zeros = torch.zeros(len(x), messages.shape[1])
            if self.how == "index_add":
                x = zeros.index_add(0, target, messages)
            elif self.how == "scatter_add":
                x = zeros.scatter_add(0, target[:, None].expand_as(messages), messages)
            else:
                index = target[:, None].expand_as(messages)
                x = zeros.scatter_reduce(0, index, messages, self.how, include_self=False)
            x = x.relu() if i == 0 else x
        return x


@row("graphs")
def gcn_index_add():
    return _graph(Aggregation("index_add"))


@row("graphs")
def gcn_scatter_add():
    return _graph(Aggregation("scatter_add"))


@row("graphs")
def gcn_sum():
    return _graph(Aggregation("sum"))


@row("graphs")
def gcn_mean():
    return _graph(Aggregation("mean"))


@row("graphs")
def gcn_max():
    return _graph(Aggregation("amax"))


@row("graphs")
def gcn_dense():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 4)

        def forward(self, x, adjacency):
            return self.head(torch.mm(adjacency, x @ self.weight).relu()).log_softmax(1)

    adjacency = torch.eye(NODES).index_put((EDGES[0], EDGES[1]), torch.tensor(0.5))
    inputs = torch.randn(NODES, 5), adjacency
    return Objects(Dense(), inputs, nn.NLLLoss(), torch.randint(0, 4, (NODES,)), options=STATIC)


@row("graphs")
def gat_dense():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.score = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(2, 8, 1))

        def forward(self, x, adjacency):
            h = (x @ self.weight).view(-1, 2, 4).transpose(0, 1)
            scores = F.leaky_relu(h @ self.score[:, :4] + (h @ self.score[:, 4:]).mT, 0.2)
            scores = torch.where(adjacency > 0, scores, -9e15 * torch.ones_like(scores))
            return (scores.softmax(-1) @ h).mean(0)

    adjacency = torch.eye(NODES).index_put((EDGES[0], EDGES[1]), torch.tensor(1.0))
    inputs = torch.randn(NODES, 5), adjacency
    return Objects(Attention(), inputs, nn.CrossEntropyLoss(), torch.randint(0, 4, (NODES,)), options=STATIC)


@row("graphs")
def gat_edges():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.score = nn.Linear(5, 4, bias=False), nn.Linear(8, 1, bias=False)

        def forward(self, x, edges):
            h, (source, target) = self.linear(x), edges
            scores = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)).squeeze(1), 0.2)
            highest = torch.full((len(x),), -1e9).scatter_reduce(0, target, scores, "amax").detach()
            weights = (scores - highest[target]).exp()
            total = torch.zeros(len(x)).index_add(0, target, weights)
            return torch.zeros_like(h).index_add(0, target, (weights / total[target])[:, None] * h[source])

    return _graph(Attention())


@row("graphs")
def graph_pooling():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Aggregation("mean"), nn.Linear(4, 2)

        def forward(self, x, edges, graph):
            x = self.body(x, edges)
            return self.head(torch.zeros(2, 4).index_add(0, graph, x))

    options = {"dynamic_shapes": {**GRAPH["dynamic_shapes"], "graph": {0: "nodes"}}}
    inputs = torch.randn(NODES, 5), EDGES, torch.tensor([0, 0, 0, 1, 1, 1])
    return Objects(Pooled(), inputs, nn.CrossEntropyLoss(), torch.tensor([0, 1]), options=options)


# ---- structure -------------------------------------------------------------------------------------------------------


@row("structure")
def mixture_of_experts():
    class Mixture(nn.Module):
        """The best two of four experts for each row, each expert on all rows."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(4))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(1).topk(2, 1)
            gates = torch.zeros(len(x), 4).scatter(1, chosen, weights / weights.sum(1, keepdim=True))
            return torch.einsum("ne,enc->nc", gates, torch.stack([expert(x) for expert in self.experts]))

    return regression(Mixture(), torch.randn(BATCH, 6))


@row("structure")
def mixture_of_experts_by_index():
    class Mixture(nn.Module):
        """Each expert on the rows that chose it."""

        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

        def forward(self, x):
            weight, chosen = self.gate(x).softmax(1).max(1)
            result = torch.zeros(len(x), 2)
            for i, expert in enumerate(self.experts):
                rows = torch.where(chosen == i)[0]
                result = result.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return result

    return regression(Mixture(), torch.randn(2 * BATCH, 6))


@row("structure")
def several_outputs():
    net = nn.ModuleDict({"body": nn.Linear(6, 8), "kind": nn.Linear(8, 4), "size": nn.Linear(8, 1)})

    def forward(net, x):
        h = net["body"](x).relu()
        return {"kind": net["kind"](h), "size": net["size"](h)}

    loss = {"kind": nn.CrossEntropyLoss(), "size": (0.5, nn.MSELoss())}
    targets = {"kind": classes(), "size": torch.randn(BATCH, 1)}
    return Objects(Call(net, forward), torch.randn(BATCH, 6), loss, targets)


@row("structure")
def nested_inputs():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.number, self.word = nn.Linear(3, 4), nn.Embedding(7, 4)

        def forward(self, batch: dict[str, Any], scale: float = 2.0):
            number, (word, mask) = batch["number"], batch["words"]
            return self.number(number) + scale * (self.word(word) * mask[..., None]).sum(1)

    words = tokens(7, BATCH, 3), torch.rand(BATCH, 3).round()
    net, inputs = Nested(), {"batch": {"number": torch.randn(BATCH, 3), "words": words}}
    return Objects(net, inputs, nn.MSELoss(), torch.randn(BATCH, 4))


@row("structure")
def frozen_body():
    net = nn.Sequential(convolution(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    net[0].requires_grad_(False).eval()
    return classification(net, images(3, 8))


@row("structure")
def low_rank_adapter():
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T

    return classification(
        nn.Sequential(Adapter(nn.Linear(6, 8)), nn.ReLU(), Adapter(nn.Linear(8, 4))), torch.randn(8, 6)
    )


@row("structure")
def reused_layer():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            for _ in range(3):
                x = x + torch.tanh(self.layer(x))
            return self.head(x)

    return regression(Recursive(), torch.randn(BATCH, 6))


@row("structure")
def checkpointed():
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)), "head": nn.Linear(6, 2)})

    def forward(net, x):
        return net["head"](torch.utils.checkpoint.checkpoint(net["body"], x, use_reentrant=False))

    return regression(Call(net, forward), torch.randn(BATCH, 6))


@row("structure")
def counted_calls():
    class Counter(nn.Module):
        """A running mean in a buffer that the forward pass changes."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.register_buffer("center", torch.zeros(6))

        def forward(self, x):
            self.center.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return self.linear(x - self.center)

    return regression(Counter(), torch.randn(BATCH, 6))


@row("structure")
def hyper_network():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Linear(3, 12)

        def forward(self, x, context):
            return torch.bmm(self.weights(context).view(-1, 3, 4), x.unsqueeze(2)).squeeze(2)

    return regression(Hyper(), torch.randn(BATCH, 4), torch.randn(BATCH, 3))


@row("structure")
def physics_informed():
    class Physics(nn.Module):
        """The derivative of the network itself is in the loss."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            y = self.net(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return slope + y

    return regression(Physics(), torch.randn(BATCH, 1))


@row("structure")
def policy_and_value():
    net = nn.ModuleDict({"body": nn.Linear(4, 8), "policy": nn.Linear(8, 2), "value": nn.Linear(8, 1)})

    def forward(net, x):
        h = net["body"](x).relu()
        return net["policy"](h).softmax(1), net["value"](h).squeeze(1)

    def loss(result: Sequence[Tensor], action: Tensor, reward: Tensor) -> Tensor:
        policy, value = result
        advantage = (reward - value).detach()
        chosen = torch.distributions.Categorical(policy).log_prob(action)
        return -(chosen * advantage).mean() + F.smooth_l1_loss(value, reward)

    targets = torch.randint(0, 2, (BATCH,)), torch.randn(BATCH)
    return Objects(Call(net, forward), torch.randn(BATCH, 4), loss, targets)


@row("structure")
def forward_forward():
    def loss(x, sign):
        return torch.log1p(torch.exp(-sign * (x.pow(2).mean(1) - 1.5))).mean()

    net = Call(nn.Linear(6, 8), lambda net, x: net(x / (x.norm(2, 1, keepdim=True) + 1e-4)).relu())
    return Objects(net, torch.randn(BATCH, 6), loss, signs(BATCH))


@row("structure")
def polynomial_regression():
    net = nn.Linear(4, 1)
    x = torch.randn(BATCH, 1)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return Objects(net, torch.cat([x**i for i in range(1, 5)], 1), F.smooth_l1_loss, x, optimizer=sgd)
