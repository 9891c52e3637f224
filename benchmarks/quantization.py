"""Measure accuracy on scikit-learn's digits: float models, quantized after training, and quantization-aware training.

    python benchmarks/quantization.py             # prints the tables of docs/quantization.md, in minutes
    python benchmarks/quantization.py --write     # writes them to the page, too

Each number is the mean over ten seeds, which also split the data, with its standard error. Models
run as files in ONNX Runtime. The quantizer of ONNX Runtime works per channel, calibrates on all
training data, and gets the preprocessing that its documentation asks for. It lacks 4 bits for some
operators, so these models use Onward's observers: `quantize=int4` and no epochs.
"""

from __future__ import annotations

import argparse
import io
import itertools
import logging
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from sklearn.datasets import load_digits
from torch import nn

import onward

PAGE = Path(__file__).resolve().parent.parent / "docs" / "quantization.md"
SEEDS = range(10)
TRAINING, BATCH, EPOCHS, MORE, RATE = 1078, 32, 40, 15, 5e-3
SPECS = ("int8", "int4", "int4:block=32,activations=none")
Data = dict[str, np.ndarray]


class Block(nn.Module):
    """Attention with two heads, and an MLP, each behind a LayerNorm."""

    def __init__(self, width: int):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.before(x)
        query, key, value = (
            layer(normal).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        x = x + self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return x + self.narrow(torch.relu(self.wide(self.after(x))))


class Transformer(nn.Module):
    """A transformer that reads the rows of an image as a sequence."""

    def __init__(self, times: int = 1):
        super().__init__()
        width = 16 * times
        self.embed, self.position = nn.Linear(8, width), nn.Parameter(torch.randn(8, width) * 0.1)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(image[:, 0]) + self.position)).mean(1))


def cnn(times: int = 1) -> nn.Module:
    def block(inputs: int, outputs: int, *after: nn.Module) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), *after

    few, many = 8 * times, 16 * times
    first, second = block(1, few, nn.MaxPool2d(2)), block(few, few, nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, *block(few, many), nn.Flatten(), nn.Linear(4 * many, 10))


def mlp(times: int = 1) -> nn.Module:
    sizes = [64, *[24 * times] * 3]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


MODELS = {"CNN": cnn, "MLP": mlp, "transformer": Transformer}


def exported(module: nn.Module) -> onward.Model:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), (torch.zeros(2, 1, 8, 8),), file, input_names=["image"], output_names=["logits"],
            dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}}, dynamo=False, do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )  # fmt: skip
    return onward.load(file.getvalue())


def split(seed: int) -> tuple[Data, Data]:
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = (digits.images[order, None] / 16).astype(np.float32), digits.target[order].astype(np.int64)
    halves = (slice(TRAINING), slice(TRAINING, None))
    training, test = ({"image": images[rows], "label": labels[rows]} for rows in halves)
    return training, test


def accuracy(model: onward.Model, test: Data) -> float:
    """Return the accuracy of a model in ONNX Runtime, in percent."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    file = model.to_proto().SerializeToString()
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": test["image"]})
    return 100 * float((logits.argmax(1) == test["label"]).mean())


def trained(model: onward.Model, data: Data, epochs: int, lr: float, seed: int, **recipe: str) -> onward.Model:
    steps = max(1, epochs * -(-len(data["label"]) // BATCH))
    with tempfile.TemporaryDirectory() as folder:
        run = onward.train(
            model, data, loss="cross_entropy", optimizer=f"adam:lr={lr}", schedule=f"cosine:steps={steps}", seed=seed,
            epochs=epochs, batch_size=BATCH, run=f"{folder}/run", quiet=True, threads=1, statistics=False, **recipe,
        )  # fmt: skip
        return onward.load(run.load_last().to_proto())


def by_onnxruntime(model: onward.Model, data: Data) -> onward.Model:
    """Quantize a trained model to 8 bits with the quantizer of ONNX Runtime."""

    class Reader(CalibrationDataReader):
        batches = iter({"image": data["image"][i : i + 64]} for i in range(0, len(data["image"]), 64))

        def get_next(self) -> Data | None:
            return next(self.batches, None)

    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/float.onnx")
        quant_pre_process(f"{folder}/float.onnx", f"{folder}/ready.onnx", skip_symbolic_shape=True)
        types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(f"{folder}/ready.onnx", f"{folder}/made.onnx", Reader(), per_channel=True, **types)
        return onward.load(onward.load(f"{folder}/made.onnx").to_proto())


COLUMNS = (
    "float", "float, trained on", "8 bits after (ONNX Runtime)", "8 bits after", "8 bits trained", "4 bits after",
    "4 bits trained", "4 bits trained, `lsq`",
)  # fmt: skip


def results(name: str, seed: int) -> Iterator[float]:
    """Yield accuracies in percent, in the order of the columns."""
    training, test = split(seed)
    torch.manual_seed(seed)
    model = trained(exported(MODELS[name]()), training, EPOCHS, RATE, seed)
    yield accuracy(model, test)
    yield accuracy(trained(model, training, MORE, RATE / 10, seed), test)
    yield accuracy(by_onnxruntime(model, training), test)
    for spec, methods in (("int8", ("moving",)), ("int4", ("moving", "lsq"))):
        yield accuracy(trained(model, training, 0, RATE / 10, seed, quantize=spec), test)
        for ranges in methods:
            quantized = trained(model, training, MORE, RATE / 10, seed, quantize=f"{spec}:ranges={ranges}")
            yield accuracy(quantized, test)


def table(names: Sequence[str]) -> Iterator[str]:
    yield f"| | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"
    for name in names:
        rows = [list(results(name, seed)) for seed in SEEDS]
        spread = [statistics.stdev(column) / len(rows) ** 0.5 for column in zip(*rows, strict=True)]
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        yield f"| {name} | {' | '.join(f'{m:.2f} ± {s:.2f}' for m, s in zip(means, spread, strict=True))} |"


def sizes() -> Iterator[str]:
    """Yield a table of file sizes, of larger models: names and nodes are much of the size of small ones."""
    yield "| | float | `int8` | `int4` | `int4:block=32,activations=none` |"
    yield "|---|---|---|---|---|"
    data, _ = split(0)
    for name, make in MODELS.items():
        model = exported(make(8))
        models = [model, *(trained(model, data, 0, RATE, 0, quantize=spec) for spec in SPECS)]
        kilobytes = [len(proto.SerializeToString()) / 1000 for proto in map(onward.Model.to_proto, models)]
        yield f"| {name}, 8 times as wide | {' | '.join(f'{number:,.0f} kB' for number in kilobytes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), help="models in the table of accuracies (default: all)"
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables to docs/{PAGE.name}")
    args = parser.parse_args()
    for name, lines in (("sizes", sizes()), ("accuracy", table(args.models))):
        text = []
        for line in lines:
            print(line, flush=True)
            text.append(line)
        if args.write:
            begin, end = f"<!-- {name} -->\n", "\n<!-- end -->"
            before, _, rest = PAGE.read_text().partition(begin)
            PAGE.write_text(f"{before}{begin}\n{chr(10).join(text)}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
