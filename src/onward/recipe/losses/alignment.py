"""Connectionist temporal classification: the likelihood of a label sequence, summed over all its alignments.

The forward algorithm in log space, one `Scan` step per time step. Where the textbook has log 0 = -inf there is a large
negative number, so that neither the loss nor its gradient ever sees inf - inf.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.build import Builder, Expr, function

IMPOSSIBLE = -1e30
"""Stands for log 0: below the log-probability of any real path, and far enough from -inf to be added up in float32."""


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
    # A path ends in its last label or in the blank after it; the columns of alpha are two further right.
    ends = op.Concat(target_lengths * 2 + 1, target_lengths * 2 + 2, axis=1)
    log_likelihood = op.ReduceLogSumExp(op.GatherElements(alpha, ends, axis=1), [1], keepdims=0)
    return op.Where(log_likelihood > IMPOSSIBLE / 2, -log_likelihood, np.inf)


def _between_blanks(op: Builder, labels: Expr, lengths: Expr, blank: Expr) -> Expr:
    """The symbols [N, 2S + 1] that a path runs through: blank, label, blank, ..., blank. Padding becomes blank too."""
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
    """The log-probability [T, N, 2S + 1] of each symbol at each time."""
    everywhen = op.Concat(op.Shape(log_probs, end=1), op.Shape(symbols), axis=0)
    return op.GatherElements(log_probs, op.Expand(symbols, everywhen), axis=2)


def _may_skip_blank(op: Builder, symbols: Expr, blank: Expr) -> Expr:
    """Where [N, 2S + 1] a path may come from two symbols back: at a label that differs from the label before."""
    before = op.Slice(op.Concat(op.Expand(blank, _columns(op, symbols, 2)), symbols, axis=1), [0], [-2], [1])
    return op.Not(op.Or(op.Equal(symbols, blank), op.Equal(symbols, before)))


def _forward(op: Builder, emissions: Expr, may_skip: Expr, input_lengths: Expr) -> Expr:
    """log alpha [N, 2 + 2S + 1] after the last time step; two impossible columns on the left are "before the start"."""
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
        ways = op.Concat(*(op.Unsqueeze(way, [0]) for way in (stay, step, skip)), axis=0)
        moved = op.ReduceLogSumExp(ways, [0], keepdims=0) + emission
        return op.Where(op.Less(time, input_lengths), op.Concat(before_start, moved, axis=1), alpha)

    times = op.Range(0, op.Squeeze(op.Shape(emissions, end=1)), 1)
    body = op.subgraph(advance, [ir.Value(name=name) for name in ("alpha", "emission", "time")], name="advance")
    return op.Scan(start, emissions, times, body=body, num_scan_inputs=2)


def _columns(op: Builder, like: Expr, columns: int) -> Expr:
    """The shape [N, columns], with N from `like`."""
    return op.Concat(op.Shape(like, end=1), [columns], axis=0)
