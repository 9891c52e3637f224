"""Checkpoints of TensorFlow, read and written without it: agreement with TensorFlow, and files that are damaged."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.checkpoint.formats import tensorflow as bundle
from onward.checkpoint.tf.object_graph import meaning_of
from onward.checkpoint.tf.tensor_bundle import GRAPH, make_table, read_bundle, read_table, text_of, write_bundle
from onward.model.storage.wire import crc32c, field, mask, varint
from onward.run_state.tensors import ArrayTensor, ScatteredTensor, StoredTensor, Tensor

MANAGED, PIECES = CHECKPOINTS / "tensorflow", CHECKPOINTS / "tensorflow_pieces"


def test_what_a_checkpoint_says_of_its_training() -> None:
    found = onward.open_checkpoint(MANAGED)
    trained = [f"net/{name}" for name in ("dense/kernel", "dense/bias", "batch_normalization/gamma",
               "batch_normalization/beta", "dense_1/kernel", "dense_1/bias")]  # fmt: skip
    assert found.format == "tensorflow" and found.step == 3 and found.progress["step"] == 3
    assert set(trained) < set(found.tensors) and len(found.tensors) == len(trained) + 2
    assert all(isinstance(tensor, StoredTensor) for tensor in found.tensors.values())
    (kept,) = found.optimizers
    assert kept.families == ("adamw",) and list(kept.groups[0].parameters) == trained
    assert all(list(kept.slots[name]) == ["exp_avg", "exp_avg_sq"] for name in trained)
    assert all(slot.shape == found.tensors[name].shape for name in trained for slot in kept.slots[name].values())
    assert found.randomness[0].state.shape == (3,) and list(found.data) == ["batches"]
    assert found.missing == (
        "class of the optimizer", "shape of the schedule", "loss", "gradient clipping", "gradient accumulation",
    )  # fmt: skip


def test_variables_in_pieces() -> None:
    found = onward.open_checkpoint(PIECES / "ckpt-1")  # as TensorFlow names it: there is no such file
    assert isinstance(found.tensors["table"], ScatteredTensor)
    np.testing.assert_array_equal(found.tensors["table"].array(), np.arange(45).reshape(9, 5))
    np.testing.assert_array_equal(found.tensors["offset"].array(), np.arange(3))


def test_checksums() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    data = np.random.default_rng(0).integers(0, 256, 70_001, np.uint8).tobytes()
    assert crc32c(data[1234:], crc32c(data[:1234])) == crc32c(data)


@needs("tensorflow")
@pytest.mark.parametrize("folder", [MANAGED, PIECES], ids=lambda folder: folder.name)
def test_tensorflow_reads_the_same_in_what_it_wrote_and_in_what_we_write(folder: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    tree = read_bundle(folder / "ckpt-1")
    write_bundle(tmp_path / "again", tree)
    theirs, again = (tf.train.load_checkpoint(str(path)) for path in (folder / "ckpt-1", tmp_path / "again"))
    assert set(tree) == set(theirs.get_variable_to_shape_map()) == set(again.get_variable_to_shape_map())
    for key, value in tree.items():
        if isinstance(value, Tensor):
            for reader in (theirs, again):
                np.testing.assert_array_equal(value.array(), reader.get_tensor(key), strict=True)
    assert text_of(tree[GRAPH]) == again.get_tensor(GRAPH)


def _model(seed: int) -> Any:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Nadam(0.01, use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@needs("tensorflow")
def test_tensorflow_goes_on_from_what_we_write(tmp_path: Path) -> None:
    import tensorflow as tf

    draw = np.random.default_rng(0)
    batches = [(draw.random((8, 4), np.float32), draw.random((8, 2), np.float32)) for _ in range(10)]

    def state(model: Any, step: int) -> tuple[Any, Any]:
        data = iter(tf.data.Dataset.range(10).shuffle(3, seed=step))
        objects = {"model": model, "optimizer": model.optimizer, "step": tf.Variable(step), "data": data,
                   "generator": tf.random.Generator.from_seed(step)}  # fmt: skip
        return tf.train.Checkpoint(**objects), data

    model = _model(0)
    for x, y in batches[:5]:
        model.train_on_batch(x, y)
    saved, data = state(model, 5)
    next(data)
    tf.train.CheckpointManager(saved, str(tmp_path / "theirs"), 1).save()
    expected = [float(model.train_on_batch(x, y)) for x, y in batches[5:]]
    read = onward.open_checkpoint(tmp_path / "theirs")
    assert read.optimizers[0].families == ("nadam",) and len(read.averages) == 6 and read.step == 5
    assert list(read.optimizers[0].slots["sequential/dense/bias"]) == ["exp_avg", "exp_avg_sq", "mu_product"]
    bundle.write(read, tmp_path / "ours")
    other = _model(1)
    restored, rest = state(other, 0)
    restored.restore(tf.train.latest_checkpoint(str(tmp_path / "ours"))).assert_consumed()
    assert int(restored.step) == 5 and int(next(rest)) == int(next(data))
    assert [float(other.train_on_batch(x, y)) for x, y in batches[5:]] == expected


@needs("tensorflow")
def test_variables_of_another_framework_by_name(tmp_path: Path) -> None:
    import tensorflow as tf

    foreign = dataclasses.replace(onward.open_checkpoint(MANAGED), trees={}, format="torch")
    bundle.write(foreign, tmp_path / "named")
    again = onward.open_checkpoint(tmp_path / "named")
    assert again.step == 3 and again.optimizers[0].families == ("adamw",)
    assert set(again.tensors) == set(foreign.tensors)
    for name, slots in foreign.optimizers[0].slots.items():
        for slot, tensor in slots.items():
            np.testing.assert_array_equal(again.optimizers[0].slots[name][slot].array(), tensor.array())
    module = tf.Module()
    module.weights = [tf.Variable(tf.zeros(tensor.shape), name=name) for name, tensor in foreign.tensors.items()]
    newest = tf.train.latest_checkpoint(str(tmp_path / "named"))
    tf.train.Checkpoint(anything=module).read(newest).assert_existing_objects_matched()
    for variable, tensor in zip(module.weights, foreign.tensors.values(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), tensor.array())


@needs("tensorflow")
def test_optimizers_before_keras_3(tmp_path: Path) -> None:
    import tensorflow as tf

    module, optimizer = tf.Module(), tf.compat.v1.train.AdamOptimizer(0.1)
    module.weight, module.rest = tf.Variable([[1.0, 2.0]], name="weight"), [tf.Variable([3.0], name="bias")]
    variables = [module.weight, module.rest[0]]
    optimizer.apply_gradients([(variable * 2, variable) for variable in variables])
    tf.train.Checkpoint(net=module, opt=optimizer).save(str(tmp_path / "ckpt"))
    found = onward.open_checkpoint(tmp_path)
    assert list(found.tensors) == ["weight", "bias"] and "adam" in found.optimizers[0].families
    kept = found.optimizers[0].slots["weight"]["exp_avg_sq"].array()
    np.testing.assert_array_equal(kept, optimizer.get_slot(module.weight, "v").numpy())


MIRRORED = """
import sys, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, onward
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(0).random((16, 4), np.float32)

def made():
    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.AdamW(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

def losses(model, epochs):
    return model.fit(x, x[:, :2], batch_size=8, epochs=epochs, verbose=0, shuffle=False).history["loss"]

model, state = made()
losses(model, 2)
tf.train.CheckpointManager(state, sys.argv[1] + "/theirs", 1).save()
onward.to_checkpoint(sys.argv[1] + "/theirs", sys.argv[1] + "/ours", format="tensorflow")
expected = losses(model, 5)
other, state = made()
with strategy.scope():
    state.restore(tf.train.latest_checkpoint(sys.argv[1] + "/ours")).assert_consumed()
assert losses(other, 5) == expected
"""


@pytest.mark.slow
@needs("tensorflow")
def test_a_model_on_two_devices_goes_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MIRRORED, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert onward.open_checkpoint(tmp_path / "ours").step == 4


# ---- files that are damaged ------------------------------------------------------------------------------------------


def _changed(tmp_path: Path, index: bytes, **files: bytes) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(MANAGED, folder, dirs_exist_ok=True)
    (folder / "ckpt-1.index").write_bytes(index)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_an_index_that_is_cut_off_or_has_a_wrong_bit(tmp_path: Path) -> None:
    """It is refused, or the bit is one of those that nobody looks at."""
    whole, refused = (MANAGED / "ckpt-1.index").read_bytes(), 0
    expected = onward.open_checkpoint(MANAGED).tensors
    for at in range(0, len(whole), 19):
        with pytest.raises(onward.Error):
            onward.open_checkpoint(_changed(tmp_path, whole[:at]))
        found = _changed(tmp_path, whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            again = onward.open_checkpoint(found).tensors
        except onward.Error:
            refused += 1
        else:
            assert {name: tensor.offset for name, tensor in again.items()} == {
                name: tensor.offset for name, tensor in expected.items()
            }
    assert refused > 0.9 * len(whole) / 19


SIZE = field(2, field(2, field(1, 2**40)))
ENTRIES = {
    "beyond the file": field(1, 1) + field(2, field(2, field(1, 3))) + field(4, 1 << 40) + field(5, 12),
    "of another size": field(1, 1) + SIZE + field(5, 12),
    "enormous": field(1, 1) + SIZE + field(5, 2**42),
    "in another file": field(1, 1) + field(3, 7) + field(5, 4),
    "of pieces that are not there": field(1, 1) + SIZE + field(7, field(1, field(2, 4))),
    "no message": b"\x0a\xff",
}


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_that_make_no_sense(case: str, tmp_path: Path) -> None:
    entries = dict(read_table((MANAGED / "ckpt-1.index").read_bytes()))
    entries[b"step/.ATTRIBUTES/VARIABLE_VALUE"] = ENTRIES[case]
    with pytest.raises(onward.Error):
        onward.open_checkpoint(_changed(tmp_path, make_table(entries)))


def test_keys_that_unpack_without_end() -> None:
    """A key of 64 KiB that a hundred thousand others begin with."""
    first, more = b"\0" + varint(65535) + b"\0" + b"k" * 65535, varint(65535) + b"\3\0"
    block = _block(first + b"".join(more + at.to_bytes(3, "big") for at in range(100_000)))
    index = _block(b"\0\1" + varint(1 + len(varint(len(block) - 5))) + b"z\0" + varint(len(block) - 5))
    handles = b"\0\0" + varint(len(block)) + varint(len(index) - 5)
    whole = block + index + handles.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")
    with pytest.raises(ValueError, match="keys are too long"):
        for _ in read_table(whole):
            pass


def _block(entries: bytes) -> bytes:
    whole = entries + bytes(4) + (1).to_bytes(4, "little") + b"\0"
    return whole + mask(crc32c(whole)).to_bytes(4, "little")


def _with_objects(graph: bytes) -> dict[str, Any]:
    """A tree with these objects, and one variable."""
    between = mask(crc32c(len(graph).to_bytes(4, "little"))).to_bytes(4, "little")
    data = ArrayTensor(np.frombuffer(varint(len(graph)) + between + graph, np.uint8))
    checksum = mask(crc32c(between + graph, crc32c(len(graph).to_bytes(4, "little"))))
    return {GRAPH: {"kind": 7, "shape": [], "checksum": checksum, "data": data}, "v": ArrayTensor(np.zeros(3))}


def _child(name: bytes, at: int) -> bytes:
    return field(1, field(1, at) + field(2, name))


OBJECTS = {
    "a chain": b"".join(field(1, _child(b"x", at + 1)) for at in range(50_000)) + field(1, b""),
    "many optimizers": field(1, b"") * 200 + field(1, _child(b"_iterations", 0) + _child(b"_variables", 0)) * 20_000,
    "an object that is not there": field(1, _child(b"x", 7)),
    "none": b"",
    "no message": b"\xff",
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_that_make_no_sense(case: str) -> None:
    with pytest.raises(onward.Error):
        meaning_of(_with_objects(OBJECTS[case]))


def test_objects_in_a_circle() -> None:
    variable = field(1, field(2, field(1, b"VARIABLE_VALUE") + field(2, b"weight") + field(3, b"v")))
    circle = field(1, _child(b"self", 0) + _child(b"other", 1)) + field(1, _child(b"back", 0) + _child(b"w", 2))
    assert meaning_of(_with_objects(circle + variable)).parameters == {"weight": "v"}


def test_folders_that_lead_astray(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(MANAGED, outside)
    (folder := tmp_path / "folder").mkdir()
    shutil.copy(MANAGED / "ckpt-1.index", folder / "other.index")
    (folder / "checkpoint").write_text('model_checkpoint_path: "../outside/ckpt-1"\n')
    with pytest.raises(onward.Error, match="which is missing"):
        onward.open_checkpoint(folder)
    (folder / "checkpoint").unlink()
    with pytest.raises(onward.Error, match="No such file"):  # without its data
        onward.open_checkpoint(folder)
    shutil.copy(MANAGED / "ckpt-1.index", folder / "second.index")
    with pytest.raises(onward.Error, match="several"):
        onward.open_checkpoint(folder)
