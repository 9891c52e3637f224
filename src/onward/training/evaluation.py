"""How good a model is on data that it does not learn from."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from onward.engines import Engine
from onward.engines.distributed import Portion
from onward.errors import UnsupportedError
from onward.recipe.metrics import OF_LOSS, Measures, Metric
from onward.training.data import Batch


def evaluate(engine: Engine, batches: Iterable[tuple[Batch, int]], measures: Measures) -> dict[str, float]:
    """The metrics of a model over batches, of which so many samples count; the loss is the mean over samples."""
    metrics = measures.make()
    total, count = 0.0, 0
    for whole, samples in batches:
        batch = _padded_with_last(whole, samples)
        results = engine.evaluate(batch)
        if engine.loss not in results:
            raise UnsupportedError(
                "the loss of this model cannot be computed without training: it depends on random numbers or gradients",
                hint="train without validation data",
            )
        total, count = total + _sum_of_losses(engine, batch, samples, float(results[engine.loss])), count + samples
        if samples < engine.group.size and not engine.group.is_first:
            continue  # all have the same samples
        for metric in metrics.values():
            assert measures.output is not None and measures.target is not None
            predictions = results[measures.output][:samples]
            if measures.axis != 1 and predictions.ndim > 1:
                predictions = np.moveaxis(predictions, measures.axis, 1)
            metric.add(predictions, measures.countable(batch[measures.target][:samples]))
    for name, metric in metrics.items():
        of_all = engine.group.gather(metric)
        metrics[name] = functools.reduce(_merge, of_all)
    loss = total / count if count else math.nan
    found = {"loss": loss} | {name: metric.result() for name, metric in metrics.items()}
    if OF_LOSS in measures.names:
        found[OF_LOSS] = math.exp(loss) if loss < 700 else math.inf
    return {name: found[name] for name in ("loss", *measures.names)}


def _padded_with_last(batch: Batch, samples: int) -> Batch:
    """The batch, with copies of its last sample in the place of others that do not count."""
    if samples == samples_in(batch):
        return batch
    return {name: array[np.minimum(np.arange(len(array)), samples - 1)] for name, array in batch.items()}


def _sum_of_losses(engine: Engine, batch: Batch, samples: int, mean: float) -> float:
    """The sum of the losses of the samples that count. What the copies of the last one add, a batch of them tells."""
    size = samples_in(batch)
    if samples == size:
        return mean * samples
    copies = {name: array[np.full(size, samples - 1)] for name, array in batch.items()}
    return mean * size - float(engine.evaluate(copies)[engine.loss]) * (size - samples)


def _merge(one: Metric, other: Metric) -> Metric:
    one.merge(other)
    return one


def samples_in(batch: Batch) -> int:
    """How many samples a batch has, in all processes together."""
    if isinstance(batch, Portion):
        return batch.whole
    return max((len(array) for array in batch.values() if array.ndim), default=1)


@contextlib.contextmanager
def using_averages(engine: Engine) -> Iterator[None]:
    """Within it, parameters are their moving averages, where training keeps such: those are what is exported."""
    averages = {s.parameter: s.name for s in engine.states() if s.role == "ema" and s.parameter}
    if not averages:
        yield
        return
    state = engine.state()
    engine.load_state({name: state[average].astype(state[name].dtype) for name, average in averages.items()})
    try:
        yield
    finally:
        engine.load_state({name: state[name] for name in averages})
