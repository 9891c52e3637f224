"""Train one .onnx file for ten steps with made-up data, and compare with stock ONNX Runtime: `run.py` starts this.

    python benchmarks/wild/trial.py model.onnx '{"constants": {"sr": 16000}}'

Prints a JSON object: the outcome, what the user would read, and measurements.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import onward
from onward.recipe.objective import terms

ROWS = 4
STEPS = 10
SIZES = (64, 16, 224, 1, 3, 80, 512, 640, 4000, 16000)
"""Sizes to try for open dimensions that packages.toml does not name."""
LARGEST = 3_000_000
"""Most numbers in an input of one sample."""
TOLERANCE = 2e-3
"""Relative difference of the first loss from that of stock ONNX Runtime, both in float32."""


class Stock:
    """The file in stock ONNX Runtime, row by row, with data for which it runs."""

    def __init__(self, path: str, settings: Mapping[str, Any]):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        model: str | bytes = path
        if inner := inner_value(path, settings.get("loss", "")):
            proto = onnx.load(path)
            proto.graph.output.append(onnx.ValueInfoProto(name=inner))
            model = proto.SerializeToString()
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.given = settings.get("values", {})
        self.axes = settings.get("axes", {})
        self.sizes = settings.get("sizes", {})
        self.constants: dict[str, Any] = settings.get("options", {}).get("constants", {})
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        first: Exception | None = None
        for size in SIZES:
            if any(np.prod(self._shape(name, value, size)) > LARGEST for name, value in self.inputs.items()):
                continue
            self.rows = [self._draw(size, seed) for seed in range(settings.get("rows", ROWS))]
            try:
                self.results = [self._run(row) for row in self.rows]
                break
            except Exception as error:
                first = first or error
        else:
            raise RuntimeError(f"ONNX Runtime does not run the file: {first}")

    def _draw(self, otherwise: int, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: self._values(name, value, otherwise, rng) for name, value in self.inputs.items()}

    def _values(self, name: str, value: Any, otherwise: int, rng: np.random.Generator) -> np.ndarray:
        dtype = _TYPES[value.type]
        shape = self._shape(name, value, otherwise)
        if name in self.constants:
            numbers = {"zeros": 0, "ones": 1}.get(self.constants[name], self.constants[name])
            return np.broadcast_to(np.asarray(numbers, dtype), shape).copy()
        if dtype is bool:
            return np.ones(shape, bool)
        if dtype is object:
            return np.full(shape, "text", object)
        low, high = self.given.get(name, (0, 2) if np.dtype(dtype).kind in "iu" else (-1, 1))
        if np.dtype(dtype).kind in "iu":
            return rng.integers(low, high, shape).astype(dtype)
        return rng.uniform(low, high, shape).astype(dtype)

    def _shape(self, name: str, value: Any, otherwise: int) -> list[int]:
        axis = self.axes.get(name, 0)
        return [self._size(name, i, dim, otherwise, i == axis) for i, dim in enumerate(value.shape)]

    def _size(self, name: str, axis: int, dim: Any, otherwise: int, is_batch: bool) -> int:
        if isinstance(dim, int) and dim > 0:
            return dim
        for key in (f"{name}.{axis}", str(dim)):
            if key in self.sizes:
                return self.sizes[key]
        return 1 if is_batch else otherwise

    def _run(self, row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [value.name for value in self.session.get_outputs()]
        return dict(zip(names, self.session.run(None, dict(row)), strict=True))

    def stacked(self, values: list[np.ndarray], name: str) -> np.ndarray:
        """Return rows as data have them: with the batch on axis 0."""
        axis = self.axes.get(name, 0)
        if axis == "none" or not values[0].ndim:
            return np.stack(values)
        return np.concatenate([np.moveaxis(value, axis, 0) for value in values])


def inner_value(path: str, loss: str) -> str:
    """Return the name of the value that a loss reads if it is not an output."""
    output = (terms(loss)[0].output or "") if loss else ""
    outputs = [value.name for value in onnx.load(path, load_external_data=False).graph.output]
    return "" if output in outputs else output


_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": bool,
    "tensor(string)": object,
}


def spec_of(loss: str | None, stock: Stock) -> tuple[str, str, str]:
    """Return a loss for `train`, its output and its name.

    The default is the first output of floats: `bce` if all are between 0 and 1, else `mse`.
    """
    results = stock.results[0]
    term = terms(loss)[0] if loss else None
    given = (term.output or "") if term else ""
    spec = (loss or "").removeprefix(f"{given}=")
    outputs = [given] if given else [name for name, value in results.items() if _is_float(value) and value.size]
    if not outputs:
        return spec or "mse", "", spec or "mse"
    output = outputs[0]
    if not spec:
        within = all((r[output] >= 0).all() and (r[output] <= 1).all() for r in stock.results)
        spec = "bce" if within else "mse"
    text = spec if len(results) == 1 and output in results else f"{output}={spec}"
    return text, output, spec.partition(":")[0]


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def targets_of(name: str, predictions: np.ndarray, options: str) -> np.ndarray:
    """Return made-up targets that fit a loss."""
    rng = np.random.default_rng(1)
    if name in ("bce", "binary_cross_entropy", "focal"):
        for axis in (-1, 1):  # classes
            size = predictions.shape[axis] if predictions.ndim > 1 else 1
            if size > 1 and np.allclose(predictions.sum(axis), 1, atol=1e-3):
                classes = rng.integers(0, size, predictions.sum(axis, keepdims=True).shape)
                indices = np.arange(size).reshape(
                    [-1 if i == axis % predictions.ndim else 1 for i in range(predictions.ndim)]
                )
                return (indices == classes).astype(np.float32)
        return rng.integers(0, 2, predictions.shape).astype(np.float32)
    if name in ("cross_entropy", "ce", "nll"):
        axis = -1 if "axis=-1" in options else 1
        shape = np.delete(predictions.shape, axis)
        return rng.integers(0, predictions.shape[axis], shape)
    if name == "ctc":
        return rng.integers(1, predictions.shape[-1], (len(predictions), 3))
    spread = max(float(np.std(predictions)), 0.1 * float(np.abs(predictions).mean()), 1e-2)
    return (predictions + spread * (1 + 0.3 * rng.standard_normal(predictions.shape))).astype(np.float32)


def mean_of(name: str, predictions: np.ndarray, targets: np.ndarray) -> float | None:
    """Return the loss by NumPy in float64, for losses with a plain formula."""
    x, y = predictions.astype(np.float64), targets
    if name == "mse":
        return float(np.mean((x - y) ** 2))
    if name == "bce":
        with np.errstate(divide="ignore"):
            logs, others = (np.maximum(np.log(p), -100) for p in (x, 1 - x))
        return float(-np.mean(y * logs + (1 - y) * others))
    if name in ("cross_entropy", "ce") and x.ndim == 2:
        top = x.max(1, keepdims=True)
        return float(np.mean(np.log(np.exp(x - top).sum(1)) + top[:, 0] - x[np.arange(len(x)), y]))
    return None


def trial(path: str, settings: Mapping[str, Any], report: dict[str, Any]) -> None:
    report["stage"] = "stock"
    stock = Stock(path, settings)
    spec, output, name = spec_of(settings.get("loss"), stock)
    report["loss"] = spec
    if output and any(np.isnan(result[output]).any() for result in stock.results):
        raise RuntimeError(f"`{output}` is NaN with made-up data")
    options = dict(settings.get("options", {}))
    recipe = {"loss": spec, "lr": settings.get("lr", 1e-4), **options}
    report["stage"] = "prepare"
    prepared = onward.prepare(path, **recipe)
    fail(not output, "no output is a float, and nothing is said about it")
    predictions = stock.stacked([result[output] for result in stock.results], output)
    targets = targets_of(name, predictions, spec)
    data = {
        n: stock.stacked([row[n] for row in stock.rows], n)
        for n in stock.inputs
        if n not in options.get("constants", {})
    }
    (target,) = (v.name for v in prepared.step().algorithm.inputs if v.name not in stock.inputs)
    data[target] = targets
    report["stage"] = "train"
    with tempfile.TemporaryDirectory() as folder:
        run_options = settings.get("run", {})
        run = onward.train(path, data, run=f"{folder}/run", epochs=STEPS, quiet=True, **recipe, **run_options)
        best, training, log = run.load_best(), run.load_training(), run.read_log()
    report["remarks"] = [text for event in log for text in _remarks(event)]
    report["stage"] = "losses"
    losses = [event["loss"] for event in log if event.get("event") == "epoch" and "loss" in event]
    report["losses"] = [losses[0], losses[-1]]
    fail(not np.isfinite(losses).all(), "a loss is not finite")
    fail(not min(losses[1:]) < losses[0], f"the loss does not fall: {losses[0]:.6g} to {losses[-1]:.6g}")
    report["stage"] = "first loss"
    size = next((len(a) for n, a in batch_of(training, data).items() if n == target), len(targets))
    expected = mean_of(name, predictions, targets) if size == len(targets) else None
    if expected is not None and not any(node.op_type == "Dropout" for node in prepared.graph):
        actual = losses[0]
        report["first"] = [actual, expected]
        rough = options.get("dequantize") or np.any(np.abs(predictions - 0.5) > 0.5 - 1e-6)  # logs of almost 0
        wrong = abs(actual - expected) > (0.03 if rough else TOLERANCE) * max(abs(expected), 1e-6) + 1e-6
        fail(wrong, f"the first loss is {actual:.6g}, in stock ONNX Runtime {expected:.6g}")
    report["stage"] = "result"
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "trained.onnx")
        best.save(file)
        again = Stock(file, settings)
    for before, after in zip(stock.results[0].items(), again.results[0].items(), strict=True):
        fail(before[0] != after[0], f"the output `{before[0]}` is `{after[0]}` in the result")
    interface = [[(v.name, v.type, v.shape) for v in s.session.get_inputs()] for s in (stock, again)]
    report["same inputs"] = interface[0] == interface[1]
    pairs = zip(stock.results, again.results, strict=True)
    fail(all(same(before[output], after[output]) for before, after in pairs), f"training did not change `{output}`")
    report["stage"] = "gradients"
    if any(node.op_type == "QuantizeLinear" for node in prepared.graph):
        report["gradients"] = {"verdicts": ["straight through rounding"]}
    else:
        report["gradients"] = gradients(training, batch_of(training, data))


def batch_of(training: onward.Model, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs = {value.name: value for value in (*training.inputs, *training.step().algorithm.inputs)}
    return {name: fitting(inputs[name], array) for name, array in data.items() if name in inputs}


def fitting(value: Any, array: np.ndarray) -> np.ndarray:
    if value is None or value.dtype is None:
        return array
    if value.shape is None or len(value.shape) != array.ndim:
        return array.astype(value.dtype.numpy())
    shape = [dim if isinstance(dim, int) else size for dim, size in zip(value.shape, array.shape, strict=True)]
    first = array[: shape[0]]  # a batch of a fixed size
    return first.astype(value.dtype.numpy()).reshape(shape) if first.size == np.prod(shape) else first


def gradients(training: onward.Model, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Compare the gradients of the first, middle and last parameter with finite differences."""
    start = time.perf_counter()
    names = next(n.attributes["xs"].as_strings() for n in training.step().algorithm if n.op_type == "Gradient")
    chosen = [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})]
    fixed = {v.name for v in training.inputs if v.shape is not None and v.shape and isinstance(v.shape[0], int)}
    few = batch if fixed else {name: array[:2] for name, array in batch.items()}
    result = onward.check_gradients(training, xs=chosen, inputs=few)
    verdicts = [row.verdict for row in result.rows]
    wrong = [" ".join(str(row).split()) for row in result.rows if row.verdict == "wrong"]
    fail(wrong, "a gradient is wrong: " + "; ".join(wrong))
    return {"verdicts": verdicts, "seconds": round(time.perf_counter() - start, 1)}


def _remarks(event: Mapping[str, Any]) -> Iterator[str]:
    for key in ("notes", "remarks", "note", "text"):
        if value := event.get(key):
            yield from [value] if isinstance(value, str) else value


def same(a: Any, b: Any) -> bool:
    return isinstance(a, np.ndarray) and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


class Wrong(Exception):
    """A silently wrong result."""


def fail(is_wrong: Any, text: str) -> None:
    if is_wrong:
        raise Wrong(text)


def main() -> None:
    path, settings = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    report: dict[str, Any] = {"outcome": "trained", "stage": ""}
    start = time.perf_counter()
    errors = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stderr(errors):
        warnings.simplefilter("always")
        try:
            trial(path, settings, report)
        except onward.Error as error:
            report |= {"outcome": "refused", "message": error.message, "hint": error.hint}
        except Wrong as error:
            report |= {"outcome": "wrong", "message": str(error)}
        except Exception as error:
            outcome = "not run" if report["stage"] == "stock" else "raw error"
            report |= {"outcome": outcome, "message": f"{type(error).__name__}: {error}"[:600]}
            report["trace"] = traceback.format_exc()[-1500:]
    report["warnings"] = list(dict.fromkeys(str(w.message) for w in caught if "onward" in w.filename.lower()))[:8]
    report["seconds"] = round(time.perf_counter() - start, 1)
    report["versions"] = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    print(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
