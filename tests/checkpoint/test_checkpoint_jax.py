"""Checkpoints of JAX: what Orbax and Flax store is read and written without them, and JAX goes on from it."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from marks import needs
from paths import CHECKPOINTS

import onward
from onward.checkpoint.formats import orbax as zarr_tree
from onward.checkpoint.pytree import flax_msgpack
from onward.recipe.spec import parse
from onward.run_state.tensors import StoredTensor, Tensor

pytestmark = needs("jax", "optax", "orbax", "flax")

Tree = Any


def same(ours: Tree, theirs: Tree) -> None:
    """Both trees have the same leaves, to the last bit."""
    import jax

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def loaded(tree: Tree) -> Tree:
    """A tree with arrays for tensors."""
    if isinstance(tree, dict):
        return {key: loaded(part) for key, part in tree.items()}
    if isinstance(tree, list):
        return [loaded(part) for part in tree]
    return tree.array() if isinstance(tree, Tensor) else tree


class Training:
    """A small network in JAX, and some steps of its training."""

    def __init__(self, tx: Any, steps: int = 0):
        import jax
        import jax.numpy as jnp

        keys = jax.random.split(jax.random.key(0), 4)
        self.params: Tree = {
            "encoder": {"kernel": jax.random.normal(keys[0], (3, 4)), "bias": jnp.zeros(4)},
            "heads": [{"kernel": jax.random.normal(keys[1], (4, 2))}],
        }
        self.batch = {"x": jax.random.normal(keys[2], (6, 3)), "y": jax.random.normal(keys[3], (6, 2))}
        self.tx, self.opt_state = tx, tx.init(self.params)
        self.step = 0
        self.run(steps)

    @staticmethod
    def loss(params: Tree, batch: Tree) -> Any:
        import jax.numpy as jnp

        hidden = jnp.tanh(batch["x"] @ params["encoder"]["kernel"] + params["encoder"]["bias"])
        return jnp.mean((hidden @ params["heads"][0]["kernel"] - batch["y"]) ** 2)

    def run(self, steps: int) -> list[float]:
        """The losses of some more steps."""
        import jax
        import optax

        @jax.jit
        def one(params: Tree, opt_state: Tree) -> tuple[Any, Tree, Tree]:
            value, gradients = jax.value_and_grad(self.loss)(params, self.batch)
            updates, opt_state = self.tx.update(gradients, opt_state, params)
            return value, optax.apply_updates(params, updates), opt_state

        found = []
        for _ in range(steps):
            value, self.params, self.opt_state = one(self.params, self.opt_state)
            self.step += 1
            found.append(float(value))
        return found

    @property
    def state(self) -> Tree:
        return {"step": self.step, "params": self.params, "opt_state": self.opt_state}

    def set(self, state: Tree) -> None:
        self.step, self.params, self.opt_state = (state[key] for key in ("step", "params", "opt_state"))

    def model(self, opt_state: Tree = None) -> onward.Model:
        return onward.from_jax(self.loss, self.params, self.batch, optimizer=self.tx, opt_state=opt_state, probe=False)


def adamw() -> Any:
    import optax

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(3e-2, 40)))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [2**30, 64])
def test_messages_are_those_of_flax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", largest)
    monkeypatch.setattr(flax_msgpack, "LARGEST_PIECE", largest)
    numbers = [0, 1, -1, 127, 128, -32, -33, -128, -129, 70_000, 2**40, -(2**40), 2**63, 1.5, float("inf")]
    tree = {
        "params": {"w": np.arange(60, dtype=np.float32).reshape(3, 4, 5), "none": np.zeros((0, 2))},
        "narrow": np.ones(300, ml_dtypes.bfloat16),
        "scalars": {"count": np.asarray(3, np.int32), "rate": np.float32(0.5), "complex": 1 + 2j},
        "plain": [None, True, False, "x" * 40, "é", *numbers],
        "many": {str(i): i for i in range(20)},
    }
    path = tmp_path / "state.msgpack"
    path.write_bytes(serialization.msgpack_serialize(tree))
    ours = flax_msgpack.read_messages(path)
    written = io.BytesIO()
    flax_msgpack.write_messages(ours, written)
    assert written.getvalue() == path.read_bytes()
    same(loaded(ours), serialization.msgpack_restore(path.read_bytes()))
    assert largest == 64 or isinstance(ours["params"]["w"], StoredTensor)


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_trees_are_those_of_orbax(tmp_path: Path, options: dict[str, bool]) -> None:
    import jax
    import jax.numpy as jnp
    from orbax import checkpoint as ocp

    tree = {
        "params": {"w": jnp.arange(12.0).reshape(3, 4), "narrow": jnp.ones(3, jnp.bfloat16)},
        "parts": [{"a/b": np.arange(3)}, (jnp.ones(2), 2.5)],
        "plain": {"step": 5, "rate": 0.5, "is": True, "name": "é", "nothing": None, "dict": {}, "list": []},
        "dropout": jax.random.key(3),
    }
    saver = ocp.PyTreeCheckpointer(**options)
    saver.save(tmp_path / "tree", tree)
    ours = onward.open_checkpoint(tmp_path / "tree")
    found = loaded(ours.trees["."])
    theirs = saver.restore(tmp_path / "tree")
    key, other = found.pop("dropout"), theirs.pop("dropout")
    same(found, theirs)
    assert key["random_key"] == "threefry2x32" and [each.kind for each in ours.randomness] == ["jax"]
    np.testing.assert_array_equal(key["data"], jax.random.key_data(other))
    zarr_tree.write(ours, tmp_path / "again")
    wanted = ocp.checkpoint_utils.construct_restore_args(tree)
    again = saver.restore(tmp_path / "again", item=tree, restore_args=wanted)
    assert bool(again.pop("dropout") == other)
    same(jax.tree.leaves(again), jax.tree.leaves(theirs))


def test_folders_of_a_manager(tmp_path: Path) -> None:
    import jax
    from orbax import checkpoint as ocp

    training = Training(adamw(), 1)
    with ocp.CheckpointManager(tmp_path / "run", item_names=("state", "data", "rng")) as manager:
        for _ in range(2):
            parts = ocp.args.Composite(
                state=ocp.args.StandardSave(training.state),
                data=ocp.args.JsonSave({"epoch": 2}),
                rng=ocp.args.JaxRandomKeySave(jax.random.key(7)),
            )
            manager.save(training.step, args=parts)
            training.run(1)
    newest = onward.open_checkpoint(tmp_path / "run")
    assert (newest.path.name, newest.step, onward.open_checkpoint(tmp_path / "run" / "1").step) == ("2", 2, 1)
    assert "others are 1" in newest.remarks[0]
    assert newest.trees["data"] == {"epoch": 2} and len(newest.randomness) == 1
    assert list(newest.tensors) == ["encoder/bias", "encoder/kernel", "heads/0/kernel"]
    onward.to_checkpoint(newest, tmp_path / "again", format="orbax")
    with ocp.CheckpointManager(tmp_path / "again", item_names=("state", "data", "rng")) as manager:
        key = ocp.args.JaxRandomKeyRestore()
        state = ocp.args.StandardRestore(training.state)
        wanted = ocp.args.Composite(state=state, data=ocp.args.JsonRestore(), rng=key)
        found = manager.restore(manager.latest_step(), args=wanted)
    assert found["state"]["step"] == 2 and found["data"] == {"epoch": 2}
    np.testing.assert_array_equal(jax.random.key_data(found["rng"]), jax.random.key_data(jax.random.key(7)))
    with pytest.warns(UserWarning, match="`data`, `rng` left out"):
        onward.to_checkpoint(newest, tmp_path / "state.msgpack", format="flax")
    same(restore(tmp_path / "state.msgpack", training.state, "flax"), found["state"])


# ---- what is in them -------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sgd": (lambda ox: ox.sgd(0.1), "sgd:lr=0.1,variant=optax"),
    "momentum": (lambda ox: ox.sgd(0.1, momentum=0.9), "sgd:lr=0.1,momentum=0.9,variant=optax"),
    "adam": (lambda ox: ox.adam(0.1), "adam:lr=0.1,variant=optax"),
    "adamw": (lambda ox: ox.adamw(0.1), "adamw:lr=0.1,variant=optax"),
    "amsgrad": (lambda ox: ox.amsgrad(0.1), "amsgrad:lr=0.1,variant=optax"),
    "adamax": (lambda ox: ox.adamax(0.1), "adamax:lr=0.1,variant=optax"),
    "nadam": (lambda ox: ox.nadam(0.1), "nadam:lr=0.1,variant=optax"),
    "radam": (lambda ox: ox.radam(0.1), "radam:lr=0.1,variant=optax"),
    "adagrad": (lambda ox: ox.adagrad(0.1), "adagrad:lr=0.1,variant=optax"),
    "rmsprop": (lambda ox: ox.rmsprop(0.1), "rmsprop:lr=0.1,variant=optax"),
    "rmsprop, all": (
        lambda ox: ox.rmsprop(0.1, centered=True, momentum=0.9),
        "rmsprop:lr=0.1,centered=true,momentum=0.9,variant=optax",
    ),
    "adadelta": (lambda ox: ox.adadelta(0.1), "adadelta:lr=0.1,variant=optax"),
    "adafactor": (
        lambda ox: ox.adafactor(0.1, min_dim_size_to_factor=2),
        "adafactor:lr=0.1,variant=optax,min_dim_size_to_factor=2",
    ),
    "lion": (lambda ox: ox.lion(0.1), "lion:lr=0.1,variant=optax"),
    "lamb": (lambda ox: ox.lamb(0.1), "lamb:lr=0.1,variant=optax"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_optax(tmp_path: Path, name: str) -> None:
    """What is kept is what the converter finds by the code of the optimizer; and a new state is optax's own."""
    import optax
    from flax import serialization

    from onward.frameworks.jax.optimizer import read_optimizer

    make, words = OPTIMIZERS[name]
    training = Training(make(optax), 2)
    path = tmp_path / "state.msgpack"
    path.write_bytes(serialization.to_bytes(training.state))
    found = onward.open_checkpoint(path)
    (kept,) = found.optimizers
    slots = {f"{parameter}/{slot}": each for parameter, s in kept.slots.items() for slot, each in s.items()}
    ours = {key: each.array() for key, each in slots.items() if isinstance(each, Tensor)}
    if name == "adamax":
        ours = {key.replace("exp_avg_sq", "exp_inf"): array for key, array in ours.items()}
    same(ours, read_optimizer(training.tx, training.opt_state, training.params).state)
    assert found.step == 2 and parse(words).name in kept.families

    fresh = _as_of_another_framework(found, words)
    onward.to_checkpoint(fresh, tmp_path / "new.msgpack", format="flax")
    blank = Training(make(optax))
    same(serialization.from_bytes(blank.state, (tmp_path / "new.msgpack").read_bytes()), training.state)


def _as_of_another_framework(found: onward.checkpoint.Checkpoint, words: str) -> onward.checkpoint.Checkpoint:
    """The same, without the tree that it was read from, and with an optimizer in words of a recipe."""
    (kept,) = found.optimizers
    slots = kept.slots
    if words.startswith("adamax"):
        slots = {name: {s.replace("avg_sq", "inf"): x for s, x in each.items()} for name, each in slots.items()}
    groups = tuple(dataclasses.replace(group, optimizer=parse(words)) for group in kept.groups)
    optimizer = dataclasses.replace(kept, groups=groups, slots=slots)
    return dataclasses.replace(found, format="onnx", trees={}, optimizers=(optimizer,))


def test_groups_masks_and_injected_numbers(tmp_path: Path) -> None:
    import optax
    from flax import serialization

    labels = {"encoder": {"kernel": "a", "bias": "b"}, "heads": [{"kernel": "a"}]}
    tx = optax.MultiSteps(
        optax.partition({"a": optax.inject_hyperparams(optax.adamw)(0.1), "b": optax.sgd(0.2, 0.9)}, labels), 2
    )
    training = Training(tx.gradient_transformation(), 5)
    path = tmp_path / "state.msgpack"
    path.write_bytes(serialization.to_bytes(training.state))
    found = onward.open_checkpoint(path)
    first, second = found.optimizers[0].groups
    assert (first.parameters, second.parameters) == (("encoder/kernel", "heads/0/kernel"), ("encoder/bias",))
    assert first.numbers["lr"] == pytest.approx(0.1) and first.numbers["weight_decay"] == pytest.approx(1e-4)
    assert [set(each) - {"step"} for each in found.optimizers[0].slots.values()].count({"momentum_buffer"}) == 1
    assert any("wait for an update" in remark for remark in found.remarks)
    assert found.step == 2 and found.progress == {"step": 5}
    with pytest.raises(onward.Error, match="1 batches wait for an update"):
        onward.from_checkpoint(path, like=Training(optax.adam(0.1)).model())
    onward.to_checkpoint(found, tmp_path / "again.msgpack", format="flax")
    assert (tmp_path / "again.msgpack").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("format", ["orbax", "flax"])
def test_a_training_model_with_groups_that_accumulates(tmp_path: Path, format: str) -> None:
    """A new state is that of optax, for clipping, accumulation, a schedule and two groups."""
    import optax

    labels = {"encoder": {"kernel": "group1", "bias": "group0"}, "heads": [{"kernel": "group1"}]}
    rate = optax.linear_schedule(0.1, 0.01, 50)
    parts = optax.partition({"group0": optax.sgd(rate, 0.9), "group1": optax.adamw(rate)}, labels)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), parts), 2).gradient_transformation()
    training = Training(tx, 4)
    model = training.model(training.opt_state)
    training.step = 2  # updates
    path = onward.to_checkpoint(model, tmp_path / "run", format=format)
    same(restore(path, Training(tx).state, format), training.state)
    found = onward.open_checkpoint(path)
    words = [group.optimizer and group.optimizer.name for group in found.optimizers[0].groups]
    assert words == ([None, None] if format == "flax" else ["sgd", "adamw"])
    if format == "orbax":
        assert found.clip == {"norm": 1.0, "variant": "optax"} and found.schedules[0].words[0].name == "linear"


# ---- going on --------------------------------------------------------------------------------------------------------


def save(state: Tree, path: Path, format: str) -> Path:
    from flax import serialization
    from orbax import checkpoint as ocp

    if format == "flax":
        path.write_bytes(serialization.to_bytes(state))
        return path
    with ocp.CheckpointManager(path) as manager:
        manager.save(state["step"], args=ocp.args.StandardSave(state))
    return path


def restore(path: Path, target: Tree, format: str) -> Tree:
    from flax import serialization
    from orbax import checkpoint as ocp

    if format == "flax":
        return serialization.from_bytes(target, path.read_bytes())
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))


def steps_here(model: onward.Model, training: Training, count: int) -> tuple[list[float], onward.Model]:
    """The losses of some steps on ONNX Runtime, and the training model after them."""
    batch = {name: np.asarray(array) for name, array in training.batch.items()}
    with onward.engines.start(model) as engine:
        return [float(engine.step(batch)[engine.loss]) for _ in range(count)], engine.updated()


def test_jax_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    """Five steps, saved, imported, exported, restored: the next five are to the last bit those of the same run."""
    training = Training(adamw())
    like = training.model()
    training.run(5)
    saved = {format: save(training.state, tmp_path / f"saved-{format}", format) for format in ("orbax", "flax")}
    expected = training.run(5)
    for format, path in saved.items():
        model = onward.from_checkpoint(path, like=like)
        for target in saved:
            onward.to_checkpoint(model, tmp_path / f"{format}-{target}", format=target)
            again = Training(adamw())
            again.set(restore(tmp_path / f"{format}-{target}", again.state, target))
            assert again.run(5) == expected, (format, target)


BETWEEN: dict[str, tuple[str, Callable[[], Any]]] = {
    "adamw": ("orbax", adamw),
    "rmsprop": ("flax", lambda: OPTIMIZERS["rmsprop, all"][0](importlib.import_module("optax"))),
    "adafactor": ("flax", lambda: OPTIMIZERS["adafactor"][0](importlib.import_module("optax"))),
    "adamax": ("flax", lambda: OPTIMIZERS["adamax"][0](importlib.import_module("optax"))),
}


@pytest.mark.slow("adafactor", "adamax", "rmsprop")
@pytest.mark.parametrize("case", BETWEEN)
def test_steps_between(tmp_path: Path, case: str) -> None:
    """Two steps in JAX, three in a training model, three in JAX again: as eight in JAX."""
    format, make = BETWEEN[case]
    training = Training(make())
    like = training.model()
    training.run(2)
    onward.to_checkpoint(save(training.state, tmp_path / "saved", format), tmp_path / "same", format=format)
    model = onward.from_checkpoint(tmp_path / "same", like=like)
    losses, later = steps_here(model, training, 3)
    onward.to_checkpoint(later, tmp_path / "later", format=format)
    again = Training(make())
    again.set(restore(tmp_path / "later", again.state, format))
    np.testing.assert_allclose([*losses, *again.run(3)], training.run(6), rtol=1e-5)
    assert int(again.step) == 8


@pytest.mark.slow
def test_what_states_of_optax_do_not_hold(tmp_path: Path) -> None:
    """Clipping leaves no trace, and accumulation one without its number; said, they go on the same."""
    import optax

    rate = optax.cosine_decay_schedule(3e-2, 40)
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate))
    training = Training(optax.MultiSteps(inner, 2).gradient_transformation())
    like = Training(optax.adamw(rate)).model()
    training.run(4)
    path, expected = save(training.state, tmp_path / "state", "flax"), training.run(6)
    assert "gradient clipping" in onward.open_checkpoint(path).missing
    with pytest.raises(onward.Error, match="of an unknown number of batches") as caught:
        onward.from_checkpoint(path, like, clip=0.1)
    assert "--accumulate" in str(caught.value.hint)
    model = onward.from_checkpoint(path, like, clip=0.1, accumulate=2)
    np.testing.assert_allclose(steps_here(model, training, 6)[0], expected, rtol=1e-5)


@pytest.mark.slow
def test_rates_that_optax_injects(tmp_path: Path) -> None:
    """What `inject_hyperparams` keeps is the rate of the last update, which a schedule must have given."""
    import optax

    rate = optax.exponential_decay(3e-2, 1, 0.9)
    training = Training(optax.inject_hyperparams(optax.adam)(rate))
    training.run(4)
    path, expected = save(training.state, tmp_path / "state", "flax"), training.run(4)
    like = Training(optax.adam(rate)).model()
    with pytest.raises(onward.Error, match="by its schedule after 4 updates"):
        onward.from_checkpoint(path, like, schedule="exponential:gamma=0.8")
    model = onward.from_checkpoint(path, like)
    np.testing.assert_allclose(steps_here(model, training, 4)[0], expected, rtol=1e-5)


@pytest.mark.slow
@needs("keras", "tensorflow")
def test_a_run_of_keras_goes_on_in_optax(tmp_path: Path) -> None:
    """Epsilon, which optax adds elsewhere, makes a difference of 1e-6 in five steps; a matching one, less."""
    import jax
    import jax.numpy as jnp
    import keras
    import optax

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, activation="tanh", name="first"), keras.layers.Dense(2, name="second")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    model.compile(keras.optimizers.Adam(1e-2), loss="mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)
    for _ in range(5):
        model.train_on_batch(x, y)
    with pytest.warns(UserWarning, match="is nearest"):
        onward.to_checkpoint(onward.from_keras(model, probe=False), tmp_path / "run", format="orbax")
    expected = [float(model.train_on_batch(x, y)) for _ in range(5)]

    def loss(params: Tree) -> Any:
        first, second = params["net"]["first"], params["net"]["second"]
        hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
        return jnp.mean((hidden @ second["kernel"] + second["bias"] - y) ** 2)

    params = {"net": {"first": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}}}
    params["net"]["second"] = {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}
    differences = []
    for eps in (1e-7, 1e-7 / np.sqrt(1 - 0.999**8)):
        tx = optax.adam(1e-2, eps=eps)
        target = {"step": 0, "params": params, "opt_state": tx.init(params)}
        state = restore(tmp_path / "run", target, "orbax")
        here, opt_state, losses = state["params"], state["opt_state"], []
        for _ in range(5):
            value, gradients = jax.value_and_grad(loss)(here)
            updates, opt_state = tx.update(gradients, opt_state, here)
            here = optax.apply_updates(here, updates)
            losses.append(float(value))
        differences.append(np.abs(np.array(losses) - expected).max())
    assert differences[0] < 1e-6 and differences[1] < 3e-7


# ---- what else there is ----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_processes() -> None:
    """Both recorded ones are of the same run."""
    spread, whole = (onward.open_checkpoint(CHECKPOINTS / name) for name in ("orbax", "flax.msgpack"))
    assert spread.layout["processes"] == 2 and spread.layout["mesh"] == {"data": 2}
    assert spread.layout["partition"]["params.dense.kernel"] == ["data"]
    assert spread.step == whole.step == 3 and spread.tensors["dense/bias"].dtype == ml_dtypes.bfloat16
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(spread.tensors[name].array(), tensor.array())
        buffer = io.BytesIO()
        spread.tensors[name].write_to(buffer)
        assert buffer.getvalue() == tensor.array().tobytes()
        for slot in ("exp_avg", "exp_avg_sq"):
            theirs, ours = (each.optimizers[0].slots[name][slot].array() for each in (spread, whole))
            np.testing.assert_array_equal(theirs, ours)


def test_states_of_flax(tmp_path: Path) -> None:
    """Linen's `TrainState` with statistics, and modules of NNX: names are those of `from_jax`."""
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from flax.training.train_state import TrainState
    from orbax import checkpoint as ocp

    class Linen(TrainState):
        batch_stats: Any

    saver = ocp.StandardCheckpointer()
    params = {"Dense_0": {"kernel": jnp.ones((2, 3))}, "BatchNorm_0": {"scale": jnp.ones(3)}}
    statistics = {"BatchNorm_0": {"mean": jnp.ones(3)}}
    linen = Linen.create(apply_fn=None, params=params, tx=optax.sgd(0.1, 0.9), batch_stats=statistics)
    saver.save(tmp_path / "linen", linen)
    saver.wait_until_finished()
    found = onward.open_checkpoint(tmp_path / "linen")
    assert sorted(found.tensors) == ["BatchNorm_0/mean", "BatchNorm_0/scale", "Dense_0/kernel"]
    assert set(found.optimizers[0].slots) == {"BatchNorm_0/scale", "Dense_0/kernel"} and found.step == 0
    onward.to_checkpoint(found, tmp_path / "linen.msgpack", format="flax")
    from flax import serialization

    same(serialization.from_bytes(linen, (tmp_path / "linen.msgpack").read_bytes()).opt_state, linen.opt_state)

    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(0.1), wrt=nnx.Param)
    saver.save(tmp_path / "nnx", {"model": nnx.state(module), "optimizer": nnx.state(optimizer)})
    saver.wait_until_finished()
    found = onward.open_checkpoint(tmp_path / "nnx")
    assert sorted(found.tensors) == ["bias", "kernel"] and found.step == 0
    assert {name: sorted(kept) for name, kept in found.optimizers[0].slots.items()} == {
        name: ["exp_avg", "exp_avg_sq", "step"] for name in ("bias", "kernel")
    }


def test_parameters_alone(tmp_path: Path) -> None:
    """As transformers saved models of Flax: `model` and `key` are names of layers there."""
    from flax import serialization

    layer = {"kernel": np.ones((2, 2), np.float32)}
    tree = {"model": {"attention": {"query": layer, "key": layer}}, "lm_head": layer}
    (tmp_path / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    found = onward.open_checkpoint(tmp_path / "flax_model.msgpack")
    names = ["model/attention/query/kernel", "model/attention/key/kernel", "lm_head/kernel"]
    assert sorted(found.tensors) == sorted(names) and not found.optimizers and not found.randomness


def test_without_tensorstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(onward.Error, match="not installed") as caught:
        onward.open_checkpoint(CHECKPOINTS / "orbax")
    assert "pip install" in str(caught.value.hint)


def _zarr_elsewhere(folder: Path) -> None:
    table = json.loads((folder / "_METADATA").read_text())
    table["tree_metadata"]["x"] = {
        "key_metadata": [{"key": "../../secret", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}
    }  # fmt: skip
    table["use_ocdbt"] = False
    (folder / "_METADATA").write_text(json.dumps(table))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _huge(folder: Path) -> None:
    path = folder / "params.w" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [2**20, 2**20]}))


def _inside_a_leaf(folder: Path) -> None:
    text = (folder / "_METADATA").read_text()
    table = json.loads(text)
    entry = json.loads(json.dumps(table["tree_metadata"]["('params', 'w')"]))
    entry["key_metadata"].append({"key": "more", "key_type": 2})
    table["tree_metadata"]["more"] = entry | {"value_metadata": {"value_type": "None"}}
    (folder / "_METADATA").write_text(json.dumps(table))


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a way out": (_zarr_elsewhere, "leads out of itself"),
    "more than there is": (_huge, "far more than its files"),
    "a leaf with parts": (_inside_a_leaf, "inside of a leaf"),
    "no array": (lambda folder: shutil.rmtree(folder / "params.w"), "no complete array"),
    "no table": (lambda folder: _write(folder / "_METADATA", "{}"), "not the table of a tree"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_folders_that_are_damaged(tmp_path: Path, case: str) -> None:
    from orbax import checkpoint as ocp

    ocp.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "tree", {"params": {"w": np.ones((2, 3), np.float32)}})
    damage, said = HOSTILE[case]
    damage(tmp_path / "tree")
    with pytest.raises(onward.Error, match=said):
        onward.open_checkpoint(tmp_path / "tree")


MESSAGES = {
    "cut off": b"\x81\xa6params\xdf\xff\xff\xff\xff",
    "nested too deeply": b"\x81\xa1a" * 300 + b"\xc0",
    "another size than its shape": b"\x81\xa1a\xc7\x11\x01\x93\x91\xce\x7f\xff\xff\xff\xa7float32\xc4\x00",
    "an invalid shape or type": b"\x81\xa1a\xc7\x0c\x01\x93\x91\x01\xa6object\xc4\x00",
    "is not Flax's": b"\x81\xa1a\xd4\x05\x00",
    "occurs twice": b"\x82\xa1a\x01\xa1a\x02",
    "data follows after the tree": b"\x81\xa1a\x01\x00",
}


@pytest.mark.parametrize("said", MESSAGES)
def test_files_that_are_damaged(tmp_path: Path, said: str) -> None:
    (tmp_path / "x.msgpack").write_bytes(MESSAGES[said])
    with pytest.raises(onward.Error, match=said):
        onward.open_checkpoint(tmp_path / "x.msgpack")
