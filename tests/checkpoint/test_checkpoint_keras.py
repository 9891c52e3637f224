"""Files of Keras, read and written without it: agreement with Keras, and files that are damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.checkpoint.tf.h5 import read_h5, write_h5
from onward.engines import start
from onward.run_state.tensors import ArrayTensor, StoredTensor

RECORDED = CHECKPOINTS / "keras" / "model.keras"
TRAINED = [f"net/{name}" for name in ("dense/kernel", "dense/bias", "batch_normalization/gamma",
           "batch_normalization/beta", "dense_1/kernel", "dense_1/bias")]  # fmt: skip


def test_what_a_file_says_of_its_training() -> None:
    found = onward.open_checkpoint(RECORDED)
    assert found.format == "keras" and found.title.startswith("Keras 3.") and found.step == 3
    assert list(found.optimizers[0].slots) == TRAINED and len(found.tensors) == 8
    assert all(isinstance(tensor, StoredTensor) for tensor in found.tensors.values())
    (group,) = found.optimizers[0].groups
    assert group.optimizer is not None and group.optimizer.name == "adamw"
    assert group.optimizer.options | {"lr": 0.01, "weight_decay": 0.02, "variant": "keras"} == group.optimizer.options
    assert [str(spec) for spec in found.schedules[0].words or ()] == ["cosine:steps=20,min=0.0"]
    assert found.clip == {"norm": 1.0, "variant": "keras"} and found.loss == "cross_entropy"
    assert found.missing == ("state of random numbers",) and not found.executes


def test_an_array_of_the_file_is_where_it_is_said_to_be() -> None:
    tensor = onward.open_checkpoint(RECORDED).tensors["net/dense/kernel"]
    assert isinstance(tensor, StoredTensor)
    stored = RECORDED.read_bytes()[tensor.offset : tensor.end]
    np.testing.assert_array_equal(np.frombuffer(stored, np.float32).reshape(4, 3), tensor.array())


def test_others_have_no_layers_to_write(tmp_path: Path) -> None:
    foreign = dataclasses.replace(onward.open_checkpoint(RECORDED), format="torch", trees={})
    with pytest.raises(onward.Error, match="layers of a model") as caught:
        onward.to_checkpoint(foreign, tmp_path / "x.keras", format="keras")
    assert "--to keras" in str(caught.value.hint)


# ---- agreement with Keras --------------------------------------------------------------------------------------------


def _dense() -> Any:
    import keras

    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def _composite() -> Any:
    """Layers that others are made of, nested models, layers that are frozen or do without some variables."""
    import keras
    from keras import layers as made

    x = keras.Input((4,))
    y = made.Embedding(7, 4)(x)
    y = made.LSTM(3, return_sequences=True)(y)
    y = made.MultiHeadAttention(2, 2)(y, y)
    y = made.Bidirectional(made.GRU(2))(y)
    y = made.LayerNormalization(center=False)(y)
    y = keras.Sequential([made.Dense(3), made.Dense(3, use_bias=False)], name="inner")(y)
    inside = keras.Input((3,))
    nested = keras.Model(inside, made.Dense(2, trainable=False)(made.Dense(2)(inside)), name="nested")
    return keras.Model(x, nested(y))


def _optimizers() -> dict[str, Callable[[], Any]]:
    from keras import optimizers as of

    cosine = lambda: of.schedules.CosineDecay(0.01, 20)
    return {
        "adamw": lambda: of.AdamW(cosine(), global_clipnorm=1.0),
        "nadam": lambda: of.Nadam(0.01, use_ema=True),
        "scaled": lambda: of.LossScaleOptimizer(of.SGD(0.1, momentum=0.9)),
        "adam": lambda: of.Adam(0.01, amsgrad=True, gradient_accumulation_steps=2),
        "rmsprop": lambda: of.RMSprop(0.01, momentum=0.9, centered=True),
        "sgd": lambda: of.SGD(0.01),
        "adagrad": lambda: of.Adagrad(),
        "adadelta": lambda: of.Adadelta(),
        "adamax": lambda: of.Adamax(),
        "lion": lambda: of.Lion(),
        "lamb": lambda: of.Lamb(),
        "muon": lambda: of.Muon(0.01),
    }


def _trained(build: Callable[[], Any], optimizer: str, batches: list[Any]) -> Any:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(_optimizers()[optimizer](), "mse", run_eagerly=True)
    for x, y in batches:
        model.train_on_batch(x, y)
    return model


def _batches(count: int) -> list[Any]:
    draw = np.random.default_rng(0)
    return [(draw.integers(0, 7, (8, 4)).astype(np.float32), draw.random((8, 2), np.float32)) for _ in range(count)]


QUICK = {("_dense", "nadam"), ("_dense", "scaled")}
ALL = [("_dense", name) for name in ("nadam", "scaled", "adamw", "adam", "rmsprop", "sgd", "adagrad", "adadelta",
       "adamax", "lion", "lamb", "muon")] + [("_composite", "adamw")]  # fmt: skip


@pytest.mark.slow("_dense-nadam")
@needs("keras")
@pytest.mark.parametrize(
    ("build", "optimizer"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in ALL],
)
def test_keras_goes_on_from_what_we_write(build: str, optimizer: str, tmp_path: Path) -> None:
    import keras

    from onward.frameworks.keras.optimizer import slots_of

    batches = _batches(8)
    model = _trained(globals()[build], optimizer, batches[:3])
    model.save(tmp_path / "theirs.keras")
    found = onward.open_checkpoint(tmp_path / "theirs.keras")
    saved = {variable.path: variable for variable in model.variables if "seed_generator" not in variable.path}
    assert list(found.tensors) == list(saved)
    for name, variable in saved.items():
        np.testing.assert_array_equal(found.tensors[name].array(), variable.numpy(), strict=True)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer != "muon":
        for variable in model.trainable_variables:
            for slot, array in slots_of(inner, variable).items():
                np.testing.assert_array_equal(found.optimizers[0].slots[variable.path][slot].array(), array)
    expected = [float(model.train_on_batch(x, y)) for x, y in batches[3:]]
    onward.to_checkpoint(found, tmp_path / "ours.keras", format="keras")
    again = keras.models.load_model(tmp_path / "ours.keras")
    assert [float(again.train_on_batch(x, y)) for x, y in batches[3:]] == expected


@pytest.mark.slow
@needs("keras", "tensorflow")
@pytest.mark.parametrize("format", ["keras", "tensorflow"])
def test_rates_that_a_callback_sets(format: str, tmp_path: Path) -> None:
    """A schedule that is said must give the rate that is stored; clipping is said where that is not stored."""
    import keras
    import tensorflow as tf

    batches = _batches(12)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.1)
    model.compile(optimizer, "mse", run_eagerly=True)

    def losses(first: int, last: int) -> list[float]:
        found = []
        for at in range(first, last):
            optimizer.learning_rate = 0.05 * 0.5 ** (at // 4)
            found.append(float(model.train_on_batch(*batches[at])))
        return found

    losses(0, 6)
    if format == "keras":
        path = tmp_path / "model.keras"
        model.save(path)
    else:
        path = tmp_path / "saved"
        tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), str(path), 1).save()
    like = onward.transform.strip(onward.from_keras(model, probe=False))
    said: dict[str, Any] = {"loss": "mse", "optimizer": "adam:lr=0.05,variant=keras"}
    said |= {} if format == "keras" else {"clip": "norm:0.1"}
    expected = losses(6, 12)
    with pytest.raises(onward.Error, match="by its schedule after 6 updates"):
        onward.from_checkpoint(path, like, schedule="exponential:gamma=0.5,every=7", **said)
    if format == "keras":
        with pytest.raises(onward.Error, match="`clip` is norm:1, and norm:0"):
            onward.from_checkpoint(path, like, clip=1.0, **said)
    run = onward.from_checkpoint(path, like, schedule="exponential:gamma=0.5,every=4", **said)
    names = [value.name or "" for value in (*run.inputs, *run.step().algorithm.inputs)]
    with start(run) as engine:
        found = [float(engine.step(dict(zip(names, batches[at], strict=True)))[engine.loss]) for at in range(6, 12)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow("tensorflow-adamw")
@needs("keras", "tensorflow")
@pytest.mark.parametrize(("format", "optimizer"), [("keras", "nadam"), ("tensorflow", "adamw")])
def test_a_run_through_a_training_model(format: str, optimizer: str, tmp_path: Path) -> None:
    """Five steps in Keras, five in Onward, five in Keras again: as fifteen in Keras, averages too."""
    import keras
    import tensorflow as tf

    batches = _batches(15)
    like = onward.from_keras(_trained(_dense, "adamw", []), probe=False)
    if format == "keras":  # which tells all but the graph
        like = onward.transform.strip(like)
    model = _trained(_dense, optimizer, batches[:5])

    def saved(name: str, source: Any = None) -> Path:
        path = tmp_path / (f"{name}.keras" if format == "keras" else name)
        if source is not None:
            return onward.to_checkpoint(source, path, format=format)
        if format == "keras":
            model.save(path)
        else:
            counter = tf.Variable(5, dtype=tf.int64)
            state = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=counter)
            tf.train.CheckpointManager(state, str(path), 1).save()
        return path

    def losses(path: Path, part: slice) -> list[float]:
        if format == "keras":
            again = keras.models.load_model(path)
        else:
            again = _trained(_dense, "adamw", [])
            again.optimizer.build(again.trainable_variables)
            state = tf.train.Checkpoint(model=again, optimizer=again.optimizer, step=tf.Variable(0, dtype=tf.int64))
            state.restore(tf.train.latest_checkpoint(str(path))).assert_consumed()
            assert int(state.step) == part.start
        found = [float(again.train_on_batch(x, y)) for x, y in batches[part]]
        kept.append(getattr(again.optimizer, "_model_variables_moving_average", []))
        return found

    kept: list[Any] = []
    training = onward.from_checkpoint(saved("theirs"), like=like)
    expected = [float(model.train_on_batch(x, y)) for x, y in batches[5:]]
    assert losses(saved("ours", training), slice(5, 10)) == expected[:5]
    training.save(tmp_path / "run.onnx")
    with start(onward.load(tmp_path / "run.onnx")) as engine:
        (name,) = (value.name for value in training.inputs)
        ours = [float(engine.step({name: x, "target": y})["loss"]) for x, y in batches[5:10]]
        np.testing.assert_allclose(ours, expected[:5], rtol=1e-5)
        after = saved("later", engine.updated())
    np.testing.assert_allclose(losses(after, slice(10, 15)), expected[5:], rtol=1e-5)
    averages = getattr(model.optimizer, "_model_variables_moving_average", [])
    assert len(averages) == len(kept[-1]) == (6 if optimizer == "nadam" else 0)
    for average, again in zip(averages, kept[-1], strict=True):
        np.testing.assert_allclose(again.numpy(), average.numpy(), rtol=1e-5, atol=1e-7)


@needs("keras")
@pytest.mark.parametrize("build", [_dense, pytest.param(_composite, marks=pytest.mark.slow)])
def test_a_file_has_its_own_model(build: Callable[[], Any], tmp_path: Path) -> None:
    """Without `like`: layers, names, loss and run are those of the file."""
    batches = _batches(4)
    model = _trained(build, "adamw", batches[:2])
    model.save(tmp_path / "x.keras")
    training = onward.from_checkpoint(tmp_path / "x.keras")
    assert {variable.path for variable in model.trainable_variables} <= set(training.graph.initializers)
    expected = [float(model.train_on_batch(x, y)) for x, y in batches[2:]]
    with start(training) as engine:
        (name,) = (value.name for value in training.inputs)
        found = [float(engine.step({name: x, "target": y})["loss"]) for x, y in batches[2:]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@needs("keras")
def test_backups_of_a_run(tmp_path: Path) -> None:
    import keras

    batches = _batches(6)
    model = _trained(_dense, "nadam", [])
    backup = keras.callbacks.BackupAndRestore(tmp_path / "theirs", delete_checkpoint=False)
    model.fit(*batches[0], epochs=2, batch_size=4, verbose=0, callbacks=[backup])
    found = onward.open_checkpoint(tmp_path / "theirs")
    assert found.progress == {"step": 4, "epoch": 2, "batch": 0} and found.optimizers[0].families == ("nadam",)
    assert set(found.tensors) == {variable.path for variable in model.variables}
    onward.to_checkpoint(found, tmp_path / "ours", format="keras")
    assert json.loads((tmp_path / "ours" / "training_metadata.json").read_text()) == {"epoch": 2, "batch": 0}
    others = [_trained(_dense, "nadam", []) for _ in range(2)]
    for other, folder in zip(others, ("theirs", "ours"), strict=True):
        other.optimizer.build(other.trainable_variables)
        other.load_weights(tmp_path / folder / "latest.weights.h5")
    first, second = ([float(other.train_on_batch(x, y)) for x, y in batches] for other in others)
    assert first == second


# ---- files that are damaged ------------------------------------------------------------------------------------------


def _rewritten(path: Path, change: Callable[[str, bytes], tuple[str, bytes, int] | None]) -> Path:
    """The recorded file with other members."""
    with zipfile.ZipFile(RECORDED) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            name, data, method = change(info.filename, source.read(info)) or (info.filename, source.read(info), 0)
            target.writestr(name, data, method)
    return path


DAMAGES: dict[str, Callable[[str, bytes], tuple[str, bytes, int] | None]] = {
    "packed": lambda name, data: (name, data, zipfile.ZIP_DEFLATED) if name.endswith(".h5") else None,
    "no JSON": lambda name, data: (name, b"{", 0) if name == "config.json" else None,
    "endless JSON": lambda name, data: (name, b"[" * 100_000, 0) if name == "config.json" else None,
    "a list": lambda name, data: (name, b"[]", 0) if name == "config.json" else None,
    "no HDF5": lambda name, data: (name, b"no" * 99, 0) if name.endswith(".h5") else None,
    "half of it": lambda name, data: (name, data[: len(data) // 2], 0) if name.endswith(".h5") else None,
    "no weights": lambda name, data: ("other.h5", data, 0) if name.endswith(".h5") else None,
    "another optimizer": lambda name, data: (name, data.replace(b'"amsgrad": false', b'"amsgrad": true'), 0),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_files_that_are_not_whole(case: str, tmp_path: Path) -> None:
    with pytest.raises(onward.Error):
        onward.open_checkpoint(_rewritten(tmp_path / "x.keras", DAMAGES[case]))


def test_files_with_wrong_bits(tmp_path: Path) -> None:
    """They are refused, or it was a bit that changes no place, name or shape; reading ends in either case."""
    whole, path, refused = RECORDED.read_bytes(), tmp_path / "x.keras", 0
    draw = np.random.default_rng(0)
    for at in draw.integers(0, len(whole), 300):
        path.write_bytes(whole[:at] + bytes([draw.integers(256)]) + whole[at + 1 :])
        try:
            for tensor in onward.open_checkpoint(path).tensors.values():
                tensor.array()
        except onward.Error:
            refused += 1
    assert refused > 20
    for at in range(0, len(whole), 900):
        path.write_bytes(whole[:at])
        with pytest.raises(onward.Error):
            onward.open_checkpoint(path)


def _values(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _values(tree[key])


ODD: list[Any] = [None, True, -1, 10**30, float("nan"), "x", [], {}, [{}], {"config": 1}]


def test_configurations_that_make_no_sense(tmp_path: Path) -> None:
    """Any value in the place of another: an error of ours, or it did not matter."""
    with zipfile.ZipFile(RECORDED) as archive:
        text = archive.read("config.json")
    count, path = len(list(_values(json.loads(text)))), tmp_path / "x.keras"
    for number in range(count):
        config = json.loads(text)
        tree, key = list(_values(config))[number]
        tree[key] = ODD[number % len(ODD)]
        changed = json.dumps(config).encode()
        _rewritten(path, lambda name, data, new=changed: (name, new, 0) if name == "config.json" else None)
        with contextlib.suppress(onward.Error):
            onward.open_checkpoint(path)


def test_what_is_written_is_what_h5py_reads(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    draw = np.random.default_rng(0)
    arrays = [
        draw.random((300, 200), np.float32), draw.random((200, 300)).astype(ml_dtypes.bfloat16), np.int64(3),
        np.zeros((0, 3), np.float32), np.array([True, False]), draw.random((2, 3)), np.float16([1, 2]), np.uint8([7]),
    ]  # fmt: skip
    tensors = {str(at): ArrayTensor(np.asarray(array)) for at, array in enumerate(arrays)}
    many = {str(at): ArrayTensor(np.asarray(at, np.int32)) for at in range(500)}
    path = tmp_path / "x.h5"
    write_h5(path, {"layers/dense/vars": {"attributes": {"name": "dense"}, "arrays": tensors},
                    "optimizer/vars": {"attributes": {"name": "adam"}, "arrays": many}})  # fmt: skip
    found = read_h5(path)
    assert [*found] == ["", "layers", "layers/dense", "layers/dense/vars", "optimizer", "optimizer/vars"]
    with h5py.File(path) as file:
        for group, written in (("layers/dense/vars", tensors), ("optimizer/vars", many)):
            assert set(found[group]["arrays"]) == set(written)
            assert found[group]["attributes"] == dict(file[group].attrs)
            for key, tensor in written.items():
                again, theirs = found[group]["arrays"][key].array(), np.array(file[group][key])
                np.testing.assert_array_equal(again, tensor.array(), strict=True)
                assert theirs.tobytes() == tensor.array().tobytes()


def test_links_to_elsewhere_and_other_kinds_of_arrays(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")

    def written(make: Callable[[Any], Any]) -> Path:
        path = tmp_path / "x.weights.h5"
        with h5py.File(path, "w") as file:
            group = file.create_group("layers/dense/vars")
            group["0"] = np.ones((2, 3), np.float32)
            make(group)
        return path

    assert list(onward.open_checkpoint(written(lambda group: None)).tensors) == ["dense/0"]
    harmful: list[Callable[[Any], Any]] = [
        lambda group: group.__setitem__("1", h5py.SoftLink("/layers/dense/vars/0")),
        lambda group: group.__setitem__("1", h5py.ExternalLink("/etc/passwd", "/")),
        lambda group: group.__setitem__("1", group["0"]),
        lambda group: group.__setitem__("again", group.file["layers"]),
        lambda group: group.create_dataset("1", data=np.zeros(1 << 20), compression="gzip"),
        lambda group: group.create_dataset("1", (4,), np.float32, external=[("/etc/passwd", 0, 16)]),
        lambda group: group.create_dataset("1", data=["text"]),
        lambda group: group.create_dataset("1", (1 << 40,), np.float32),
        lambda group: group.create_virtual_dataset("1", h5py.VirtualLayout((2,), np.float32)),
    ]
    for make in harmful:
        with pytest.raises(onward.Error):
            onward.open_checkpoint(written(make))


def test_functions_in_a_file_are_told_and_not_executed(tmp_path: Path) -> None:
    def with_function(name: str, data: bytes) -> tuple[str, bytes, int] | None:
        if name != "config.json":
            return None
        config = json.loads(data)
        code = {"class_name": "__lambda__", "config": {"code": "4wEAAAA="}}
        config["config"]["layers"].append({"module": "keras.layers", "class_name": "Lambda", "config": {"name": "harm",
                                          "function": code}, "registered_name": None})  # fmt: skip
        config["config"]["layers"].append({"module": "os", "class_name": "system", "config": {}, "registered_name": ""})
        return name, json.dumps(config).encode(), 0

    found = onward.open_checkpoint(_rewritten(tmp_path / "x.keras", with_function))
    assert any("Lambda" in name for name in found.executes) and "os.system" in found.executes
