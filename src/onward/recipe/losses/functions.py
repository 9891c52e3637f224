"""Functions of losses that are not operators: one value per element, for any float type.

Hyper-parameters are inputs, which keeps double precision. Formulas also have right gradients: no
inf or NaN behind a Where, and the usual slopes at the kinks of Abs and Clip.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, function

# ---- classes: logits [N, C, d...] ------------------------------------------------------------------------------------


@function("loss", "weight")
def SmoothedCrossEntropy(
    op: Builder, logits: Expr, labels: Expr, class_weight: Expr, label_smoothing: Expr, *, ignore_index: int
) -> tuple[Expr, Expr]:
    """loss = (1 - s) w[y] nll[y] + s / C sum_c w[c] nll[c], with nll = -log softmax(logits) and s = label_smoothing.

    labels [N, d...] are class indices; class_weight is one number or [C]. weight = w[y]: the mean of the loss is
    sum(loss) / sum(weight). Where the label is ignore_index, both are 0.
    """
    smoothing = op.CastLike(label_smoothing, logits)
    weights = op.Expand(op.CastLike(class_weight, logits), _class_count(op, logits))
    nll = -op.LogSoftmax(logits, axis=1)
    counts = op.Not(op.Equal(labels, op.CastLike(op.Constant(value_int=ignore_index), labels)))
    labels = op.Where(counts, labels, 0)
    label_weight = op.Where(counts, op.Gather(weights, labels), 0)
    of_label = op.Squeeze(op.GatherElements(nll, op.Unsqueeze(labels, [1]), axis=1), [1])
    of_all = op.ReduceSum(nll * _along_classes(op, weights, logits), [1], keepdims=0)
    share = smoothing / op.CastLike(_class_count(op, logits), logits)
    return (1 - smoothing) * label_weight * of_label + share * op.Where(counts, of_all, 0), label_weight


@function("loss")
def CrossEntropyWithProbabilities(op: Builder, logits: Expr, probabilities: Expr) -> Expr:
    """loss = -sum_c probabilities[c] log softmax(logits)[c]."""
    return -op.ReduceSum(probabilities * op.LogSoftmax(logits, axis=1), [1], keepdims=0)


@function("smoothed")
def SmoothLabels(op: Builder, probabilities: Expr, label_smoothing: Expr) -> Expr:
    """smoothed = (1 - s) probabilities + s / C, with s = label_smoothing and C classes on axis 1."""
    smoothing = op.CastLike(label_smoothing, probabilities)
    return (1 - smoothing) * probabilities + smoothing / op.CastLike(_class_count(op, probabilities), probabilities)


@function("weighted")
def WeightClasses(op: Builder, x: Expr, class_weight: Expr) -> Expr:
    """weighted = x [N, C, d...] with each class multiplied by its class_weight [C]."""
    return x * _along_classes(op, op.CastLike(class_weight, x), x)


def _class_count(op: Builder, x: Expr) -> Expr:
    return op.Shape(x, start=1, end=2)


def _along_classes(op: Builder, weights: Expr, x: Expr) -> Expr:
    """Return weights [C] as [C, 1, ...], to broadcast against x [N, C, d...] of any rank."""
    ones = op.ConstantOfShape(op.Shape(op.Shape(x)) - 2, value=np.array([1]))
    return op.Reshape(weights, op.Concat([-1], ones, axis=0))


# ---- yes or no -------------------------------------------------------------------------------------------------------


@function("loss")
def BinaryCrossEntropy(op: Builder, probability: Expr, target: Expr) -> Expr:
    """loss = -(y log p + (1 - y) log(1 - p)), where a logarithm of 0 is -100, with gradient 0."""
    return -(target * _floored_log(op, probability) + (1 - target) * _floored_log(op, 1 - probability))


@function("loss")
def BinaryCrossEntropyWithLogits(op: Builder, logits: Expr, target: Expr) -> Expr:
    """loss = softplus(x) - x y = -(y log sigmoid(x) + (1 - y) log(1 - sigmoid(x)))."""
    return _softplus(op, logits) - logits * target


@function("loss")
def WeightedBinaryCrossEntropyWithLogits(op: Builder, logits: Expr, target: Expr, pos_weight: Expr) -> Expr:
    """loss = -(pos_weight y log sigmoid(x) + (1 - y) log(1 - sigmoid(x)))."""
    negative = 1 - target
    weight = op.CastLike(pos_weight, logits) * target + negative
    return negative * logits + weight * _softplus(op, -logits)


@function("loss")
def Hinge(op: Builder, prediction: Expr, target: Expr) -> Expr:
    """loss = max(1 - y x, 0), with targets y of -1 and 1."""
    return op.Relu(1 - target * prediction)


@function("loss")
def SquaredHinge(op: Builder, prediction: Expr, target: Expr) -> Expr:
    """loss = max(1 - y x, 0)^2, with targets y of -1 and 1."""
    hinge = op.Relu(1 - target * prediction)
    return hinge * hinge


def _softplus(op: Builder, x: Expr) -> Expr:
    """Return log(1 + exp(x)) = (x + |x|) / 2 + log(1 + exp(-|x|)).

    It cannot overflow, and its gradient at 0 is sigmoid(x) whatever that of Abs is.
    """
    magnitude = op.Abs(x)
    return (x + magnitude) / 2 + op.Log(1 + op.Exp(-magnitude))


def _floored_log(op: Builder, p: Expr) -> Expr:
    """Return max(log p, -100). Tiny p count as 0: their gradient would overflow float32."""
    positive = p > float(np.finfo(np.float32).tiny)
    return op.Where(positive, op.Log(op.Where(positive, p, 1)), -100)


# ---- distances -------------------------------------------------------------------------------------------------------


@function("loss")
def SquaredError(op: Builder, prediction: Expr, target: Expr) -> Expr:
    """loss = (x - y)^2."""
    error = prediction - target
    return error * error


@function("loss")
def AbsoluteError(op: Builder, prediction: Expr, target: Expr) -> Expr:
    """loss = |x - y|."""
    return op.Abs(prediction - target)


@function("loss")
def Huber(op: Builder, prediction: Expr, target: Expr, delta: Expr) -> Expr:
    """loss = e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2), with e = x - y."""
    return _huber(op, prediction - target, op.CastLike(delta, prediction))


@function("loss")
def SmoothL1(op: Builder, prediction: Expr, target: Expr, beta: Expr) -> Expr:
    """loss = e^2 / (2 beta) where |e| <= beta, else |e| - beta / 2, with e = x - y."""
    beta = op.CastLike(beta, prediction)
    return _huber(op, prediction - target, beta) / beta


@function("loss")
def CosineDistance(op: Builder, prediction: Expr, target: Expr, eps: Expr, *, axes: list[int]) -> Expr:
    """loss = 1 - x·y / sqrt((|x|^2 + eps) (|y|^2 + eps)), along `axes`."""
    eps, along = op.CastLike(eps, prediction), op.Constant(value_ints=axes)

    def dot(x: Expr, y: Expr) -> Expr:
        return op.ReduceSum(x * y, along, keepdims=0)

    squares = (dot(prediction, prediction) + eps) * (dot(target, target) + eps)
    return 1 - dot(prediction, target) / op.Sqrt(squares)


@function("loss")
def TripletMargin(op: Builder, anchor: Expr, positive: Expr, negative: Expr, margin: Expr, p: Expr, eps: Expr) -> Expr:
    """loss = max(d(anchor, positive) - d(anchor, negative) + margin, 0), with d(x, y) = (sum |x - y + eps|^p)^(1/p)."""
    margin, p, eps = (op.CastLike(number, anchor) for number in (margin, p, eps))

    def distance(other: Expr) -> Expr:
        powers = op.Abs(anchor - other + eps) ** p
        return op.ReduceSum(powers, [-1], keepdims=0) ** (1 / p)

    return op.Relu(distance(positive) - distance(negative) + margin)


def _huber(op: Builder, error: Expr, delta: Expr) -> Expr:
    """Return c (e - c / 2), with c = e clipped to [-delta, delta]: smooth over both branches."""
    clipped = op.Clip(error, -delta, delta)
    return clipped * (error - clipped / 2)


# ---- likelihoods -----------------------------------------------------------------------------------------------------


@function("loss")
def KLDivergence(op: Builder, log_probability: Expr, target: Expr) -> Expr:
    """loss = q (log q - log p), with q = target and 0 log 0 = 0."""
    positive = target > 0
    return target * (op.Log(op.Where(positive, target, 1)) - log_probability)


@function("loss")
def KLDivergenceOfLogs(op: Builder, log_probability: Expr, log_target: Expr) -> Expr:
    """loss = q (log q - log p), with log q = log_target."""
    return op.Exp(log_target) * (log_target - log_probability)


@function("loss")
def PoissonNLL(op: Builder, rate: Expr, target: Expr, eps: Expr) -> Expr:
    """loss = rate - y log(rate + eps): the negative log-likelihood of a count y, less log y!."""
    return rate - target * op.Log(rate + op.CastLike(eps, rate))


@function("loss")
def PoissonNLLOfLog(op: Builder, log_rate: Expr, target: Expr) -> Expr:
    """loss = exp(log_rate) - y log_rate: the negative log-likelihood of a count y, less log y!."""
    return op.Exp(log_rate) - target * log_rate


@function("log_factorial")
def Stirling(op: Builder, x: Expr) -> Expr:
    """log_factorial = x log x - x + log(2 pi x) / 2 where x > 1, else 0: Stirling's approximation of log x!."""
    n = op.Max(x, 1)
    return op.Where(x > 1, n * op.Log(n) - n + op.Log(2 * math.pi * n) / 2, 0)


@function("loss")
def GaussianNLL(op: Builder, mean: Expr, target: Expr, variance: Expr, eps: Expr) -> Expr:
    """loss = (log v + (y - mean)^2 / v) / 2, with v = max(variance, eps)."""
    variance, error = op.Max(variance, op.CastLike(eps, mean)), mean - target
    return (op.Log(variance) + error * error / variance) / 2


# ---- label sequences without an alignment ----------------------------------------------------------------------------

# Connectionist temporal classification is the likelihood of a label sequence, summed over all its
# alignments: the forward algorithm in log space, one `Scan` step per time step. Where the textbook
# has log 0 = -inf there is a large negative number, so that neither the loss nor its gradient ever
# sees inf - inf.


IMPOSSIBLE = -1e30
"""Stand-in for log 0: below any path's log-probability, and finite in sums of float32."""


@function("loss")
def ConnectionistTemporalClassification(
    op: Builder, log_probs: Expr, labels: Expr, input_lengths: Expr, target_lengths: Expr, *, blank: int
) -> Expr:
    """loss [N] = -log of the total probability of all alignments of a label sequence with its input.

    log_probs [T, N, C] are log-probabilities, labels [N, S] class indices padded to any value, and the lengths [N] say
    how much of each is meant. An alignment repeats labels and inserts `blank`; without any (a label sequence too long
    for its input) the loss is inf, with gradient 0.
    """
    blank_index = op.Constant(value_int=blank)
    target_lengths = op.Cast(op.Unsqueeze(target_lengths, [1]), to=ir.DataType.INT64)
    symbols = _between_blanks(op, op.Cast(labels, to=ir.DataType.INT64), target_lengths, blank_index)
    emissions = op.Max(_emissions(op, log_probs, symbols), IMPOSSIBLE)
    alpha = _forward(op, emissions, _may_skip_blank(op, symbols, blank_index), input_lengths)
    # A path ends in its last label or in the blank after it; the columns of alpha are two further
    # right.
    ends = op.Concat(target_lengths * 2 + 1, target_lengths * 2 + 2, axis=1)
    log_likelihood = op.ReduceLogSumExp(op.GatherElements(alpha, ends, axis=1), [1], keepdims=0)
    return op.Where(log_likelihood > IMPOSSIBLE / 2, -log_likelihood, np.inf)


def _between_blanks(op: Builder, labels: Expr, lengths: Expr, blank: Expr) -> Expr:
    """Return the symbols [N, 2S + 1] of a path: blank, label, blank, ..., blank."""
    batch, length = op.Shape(labels, end=1), op.Shape(labels, start=1)
    positions = op.Range(0, op.Squeeze(length), 1)
    labels = op.Where(op.Less(positions, lengths), labels, blank)
    pairs = op.Concat(op.Expand(blank, op.Shape(op.Unsqueeze(labels, [2]))), op.Unsqueeze(labels, [2]), axis=2)
    return op.Concat(
        op.Reshape(pairs, op.Concat(batch, length * 2, axis=0), allowzero=1),
        op.Expand(blank, op.Concat(batch, [1], axis=0)),
        axis=1,
    )


def _emissions(op: Builder, log_probs: Expr, symbols: Expr) -> Expr:
    everywhen = op.Concat(op.Shape(log_probs, end=1), op.Shape(symbols), axis=0)
    return op.GatherElements(log_probs, op.Expand(symbols, everywhen), axis=2)


def _may_skip_blank(op: Builder, symbols: Expr, blank: Expr) -> Expr:
    """Return a mask [N, 2S + 1]: True at a label that differs from the label before it."""
    before = op.Slice(op.Concat(op.Expand(blank, _columns(op, symbols, 2)), symbols, axis=1), [0], [-2], [1])
    return op.Not(op.Or(op.Equal(symbols, blank), op.Equal(symbols, before)))


def _forward(op: Builder, emissions: Expr, may_skip: Expr, input_lengths: Expr) -> Expr:
    """Return log alpha [N, 2 + 2S + 1] after the last step; 2 columns precede the start."""
    impossible = op.scalar(IMPOSSIBLE, emissions)
    before_start = op.Expand(impossible, _columns(op, may_skip, 2))
    shape = op.Shape(may_skip) + np.array([0, 2])
    columns = op.Range(0, op.Gather(shape, 1), 1)
    start = op.Expand(op.Where(op.Equal(columns, 2), op.scalar(0, emissions), impossible), shape)
    input_lengths = op.Cast(op.Unsqueeze(input_lengths, [1]), to=ir.DataType.INT64)

    def advance(op: Builder, alpha: Expr, emission: Expr, time: Expr) -> Expr:
        stay = op.Slice(alpha, [2], [2**31], [1])
        step = op.Slice(alpha, [1], [-1], [1])
        skip = op.Where(may_skip, op.Slice(alpha, [0], [-2], [1]), impossible)
        ways = op.Concat(*(op.Unsqueeze(path, [0]) for path in (stay, step, skip)), axis=0)
        moved = op.ReduceLogSumExp(ways, [0], keepdims=0) + emission
        return op.Where(op.Less(time, input_lengths), op.Concat(before_start, moved, axis=1), alpha)

    times = op.Range(0, op.Squeeze(op.Shape(emissions, end=1)), 1)
    body = op.subgraph(advance, [ir.Value(name=name) for name in ("alpha", "emission", "time")], name="advance")
    return op.Scan(start, emissions, times, body=body, num_scan_inputs=2)


def _columns(op: Builder, like: Expr, columns: int) -> Expr:
    return op.Concat(op.Shape(like, end=1), [columns], axis=0)
