"""Run a script up to its first `fit`, then train the model in Keras and in other engines: `run.py` starts this.

    python benchmarks/examples/keras_script.py examples/vision/mnist_convnet.py

Built-in data sets become random arrays, and modules for plots do nothing. Prints a JSON object.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

SCRIPT = Path(sys.argv[1]).resolve()
SOURCE = SCRIPT.read_text(encoding="utf-8")
if backend := re.search(r"""os\.environ\[["']KERAS_BACKEND["']\]\s*=\s*["'](\w+)["']""", SOURCE):
    os.environ["KERAS_BACKEND"] = backend[1]
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")

import onward.frameworks.keras  # noqa: F401, E402, I001  (before Keras, which would print more)
import keras  # noqa: E402
import numpy as np  # noqa: E402
from script import Reached, Skipped, finish, outcome_of, replace_plots, tried  # noqa: E402

import side_keras  # noqa: E402

SAMPLES = (50_000, 10_000) if "--whole" in sys.argv else (1_000, 200)
"""For training and for tests. Some scripts cut parts of the whole data set."""
ROWS = 8
"""Of the batch."""
ROUTES = ("onnxruntime", "torch")


def images(size: tuple[int, ...], classes: int, column: bool) -> Any:
    def load_data(*_: Any, **__: Any) -> Any:
        rng = np.random.default_rng(0)
        shape = (lambda n: (n, 1)) if column else (lambda n: (n,))
        return tuple(
            (rng.integers(0, 256, (n, *size), dtype=np.uint8), rng.integers(0, classes, shape(n)).astype(np.uint8))
            for n in SAMPLES
        )

    return load_data


def sequences(classes: int) -> Any:
    def load_data(*_: Any, num_words: int | None = None, **__: Any) -> Any:
        rng = np.random.default_rng(0)

        def rows(n: int) -> Any:
            lists = np.empty(n, object)
            lists[:] = [[1, *rng.integers(4, num_words or 1000, rng.integers(20, 200)).tolist()] for _ in range(n)]
            return lists, rng.integers(0, classes, n)

        return rows(SAMPLES[0] // 2), rows(SAMPLES[0] // 2)

    return load_data


def columns(width: int) -> Any:
    def load_data(*_: Any, **__: Any) -> Any:
        rng = np.random.default_rng(0)
        return tuple((rng.random((n, width), np.float32), rng.random(n, np.float32)) for n in (400, 100))

    return load_data


def unreachable(*arguments: Any, **options: Any) -> NoReturn:
    raise Skipped(f"downloads {str((*arguments, *options.values())[0])[:80]}" if arguments or options else "downloads")


def replace_data() -> None:
    data = keras.datasets
    for module, size, classes, column in (
        (data.mnist, (28, 28), 10, False),
        (data.fashion_mnist, (28, 28), 10, False),
        (data.cifar10, (32, 32, 3), 10, True),
        (data.cifar100, (32, 32, 3), 100, True),
    ):
        module.load_data = images(size, classes, column)
    data.imdb.load_data, data.reuters.load_data = sequences(2), sequences(46)
    data.california_housing.load_data, data.boston_housing.load_data = columns(8), columns(13)
    data.imdb.get_word_index = data.reuters.get_word_index = lambda *_, **__: {f"word{i}": i for i in range(1, 1000)}
    keras.utils.get_file = keras.src.utils.file_utils.get_file = unreachable
    import urllib.request

    urllib.request.urlretrieve = urllib.request.urlopen = unreachable
    if module := sys.modules.get("keras.src.applications.imagenet_utils"):
        module.file_utils.get_file = unreachable


def first_batch(model: Any, x: Any, y: Any, size: int | None) -> tuple[Any, Any]:
    """Return a small batch, or one of the script's size if the model takes no other."""
    if hasattr(x, "element_spec"):
        x = next(iter(x))
    elif isinstance(x, keras.utils.PyDataset):
        x = x[0]
    elif hasattr(x, "__next__"):
        x = next(x)
    if y is None and isinstance(x, tuple):
        x, y = (*x, None)[:2]

    def rows(leaf: Any, count: int) -> Any:
        if leaf is None:
            return None
        array = np.asarray(leaf)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        return array[:count]

    count = min(ROWS, size or ROWS)
    try:
        if size and type(model).call is not keras.Model.call:
            model(keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(rows(leaf, count)), x))
    except Exception:  # of the framework
        count = size or ROWS
    return tuple(None if z is None else keras.tree.map_structure(lambda leaf: rows(leaf, count), z) for z in (x, y))


def intercept() -> tuple[Any, Any]:
    """Let the first `fit` end the script; return what it replaces."""

    def fit(self: Any, x: Any = None, y: Any = None, batch_size: int | None = None, *_: Any, **__: Any) -> NoReturn:
        raise Reached(self, *first_batch(self, x, y, batch_size))

    def step(self: Any, x: Any = None, y: Any = None, *_: Any, **__: Any) -> NoReturn:
        raise Reached(self, *first_batch(self, x, y, None))

    originals = keras.Model.fit, keras.Model.train_on_batch
    keras.Model.fit, keras.Model.train_on_batch = fit, step
    return originals


def main() -> dict[str, Any]:
    replace_plots()
    keras.utils.plot_model = lambda *_, **__: None
    replace_data()
    originals = intercept()
    os.chdir(os.environ.get("TMPDIR", "/tmp"))

    def reached(model: Any, x: Any, y: Any) -> dict[str, Any]:
        keras.Model.fit, keras.Model.train_on_batch = originals
        options: dict[str, Any] = {}
        return tried(lambda: side_keras.run(side_keras.Objects(model, x, y, options=options)), ROUTES, options)

    return outcome_of(SCRIPT, [], "fit", reached)


if __name__ == "__main__":
    finish(main())
