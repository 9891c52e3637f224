"""Checkpoints as training scripts of JAX write them, by Orbax, Flax, Equinox, pickle and numpy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEPS = 10
BATCHES = [
    {"image": rng.normal(size=(16, 8)).astype("float32"), "labels": rng.integers(0, 3, 16, "int32")}
    for rng in map(np.random.default_rng, range(2 * STEPS))
]


class JaxLayout(NamedTuple):
    """What a script saves of `params`, `opt_state` and `step`."""

    save: Callable[[Path, dict[str, Any]], Any]
    file: str = "run"
    """The name of the file or folder."""
    optimizer: Callable[[], Any] = lambda: _chain()
    load: Callable[[Path, dict[str, Any]], dict[str, Any]] | None = None
    """Restores what Onward writes into a tree like the saved one."""
    form: str = ""
    """The format that Onward writes."""
    refusal: str = ""
    module: str = "dict"
    """How the parameters are made: `haiku`, `equinox`, or a plain dict."""


def _optax() -> Any:
    import optax

    return optax


def _chain() -> Any:
    return _optax().chain(_optax().clip_by_global_norm(1.0), _optax().adamw(1e-2))


def _scheduled() -> Any:
    return _optax().adam(_optax().warmup_cosine_decay_schedule(0.0, 2e-2, 4, 40))


def _matrices(params: Any) -> Any:
    import jax

    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _partition() -> Any:
    import jax

    groups = {"decay": _optax().adamw(1e-2, weight_decay=0.1), "rest": _optax().sgd(0.1, momentum=0.9)}
    labels = lambda params: jax.tree.map(lambda leaf: "decay" if leaf.ndim > 1 else "rest", params)
    return _optax().partition(groups, labels)


def parameters(module: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return parameters and the function that computes logits."""
    import jax

    keys = jax.random.split(jax.random.PRNGKey(0))
    if module == "equinox":
        import equinox

        layers = [equinox.nn.Linear(8, 6, key=keys[0]), equinox.nn.Dropout(0.1, inference=True)]
        net = equinox.nn.Sequential([*layers, equinox.nn.Linear(6, 3, key=keys[1])])
        params, static = equinox.partition(net, equinox.is_array)
        return params, lambda params, image: jax.vmap(equinox.combine(params, static))(image)
    if module == "haiku":
        import haiku

        function = haiku.without_apply_rng(haiku.transform(lambda image: haiku.nets.MLP([6, 3])(image)))
        return function.init(keys[0], BATCHES[0]["image"]), function.apply
    sizes = [(8, 6), (6, 3)]
    draws = [jax.random.normal(key, size) * 0.3 for key, size in zip(keys, sizes, strict=True)]
    params = {f"dense_{at}": {"kernel": draw, "bias": draw[0] * 0} for at, draw in enumerate(draws)}

    def logits(params: Any, image: Any) -> Any:
        hidden = jax.nn.relu(image @ params["dense_0"]["kernel"] + params["dense_0"]["bias"])
        return hidden @ params["dense_1"]["kernel"] + params["dense_1"]["bias"]

    return params, logits


def train_state(tree: dict[str, Any]) -> Any:
    """Return the `TrainState` of Flax."""
    from flax.training.train_state import TrainState

    return TrainState(tree["step"], None, tree["params"], None, tree["opt_state"])  # type: ignore[arg-type]


def _managed(arguments: Callable[[Any, dict[str, Any]], Any]) -> Callable[[Path, dict[str, Any]], None]:
    """Return a function that saves with a manager of Orbax."""

    def save(path: Path, tree: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path.absolute()) as manager:
            manager.save(tree["step"], args=arguments(ocp.args, tree))

    return save


def _restored(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path.absolute()) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(tree))  # type: ignore[no-any-return]


def _checkpointer(path: Path, tree: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(path.absolute(), tree)


def _composite(arguments: Any, tree: dict[str, Any]) -> Any:
    parts = {name: arguments.StandardSave(tree[name]) for name in ("params", "opt_state")}
    return arguments.Composite(**parts, extra=arguments.JsonSave({"epoch": 1}))


def _to_bytes(path: Path, tree: dict[str, Any]) -> None:
    from flax import serialization

    path.write_bytes(serialization.to_bytes(train_state(tree)))


def _from_bytes(path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    from flax import serialization

    state = serialization.from_bytes(train_state(tree), path.read_bytes())
    return {"params": state.params, "opt_state": state.opt_state, "step": state.step}


def _parameters_to_bytes(path: Path, tree: dict[str, Any]) -> None:
    from flax import serialization

    path.write_bytes(serialization.to_bytes(tree["params"]))


def _save_checkpoint(path: Path, tree: dict[str, Any]) -> None:
    import flax
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", False)
    checkpoints.save_checkpoint(path.parent.absolute(), train_state(tree), tree["step"])


def _npz(path: Path, tree: dict[str, Any]) -> None:
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    np.savez(path, **{jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(x) for keys, x in leaves})


def _npz_of_parameters(path: Path, tree: dict[str, Any]) -> None:
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree["params"])[0]
    np.savez(path, **{jax.tree_util.keystr(keys): np.asarray(leaf) for keys, leaf in leaves})


def _pickle(path: Path, tree: Any) -> None:
    path.write_bytes(pickle.dumps(tree))


def _pickle_of_numpy(path: Path, tree: dict[str, Any]) -> None:
    import jax

    _pickle(path, jax.device_get(tree))


def _pickle_of_tuple(path: Path, tree: dict[str, Any]) -> None:
    _pickle(path, (tree["params"], tree["opt_state"]))


def _joblib(path: Path, tree: dict[str, Any]) -> None:
    import jax
    import joblib

    joblib.dump(jax.device_get(tree), path)


def _leaves(path: Path, tree: dict[str, Any]) -> None:
    import equinox

    equinox.tree_serialise_leaves(path, (tree["params"], tree["opt_state"]))


_STANDARD = _managed(lambda arguments, tree: arguments.StandardSave(tree))

JAX_LAYOUTS: dict[str, JaxLayout] = {
    "Orbax, StandardSave": JaxLayout(_STANDARD, load=_restored, form="orbax"),
    "Orbax, PyTreeSave": JaxLayout(_managed(lambda arguments, tree: arguments.PyTreeSave(tree))),
    "Orbax, Composite": JaxLayout(_managed(_composite)),
    "Orbax, PyTreeCheckpointer": JaxLayout(_checkpointer),
    "Orbax, TrainState": JaxLayout(
        _managed(lambda arguments, tree: arguments.StandardSave(train_state(tree))), optimizer=_scheduled
    ),
    "Flax, to_bytes": JaxLayout(_to_bytes, "run.msgpack", _scheduled, _from_bytes, "flax"),
    "Flax, to_bytes of parameters": JaxLayout(_parameters_to_bytes, "run.msgpack", refusal="`onward train --weights"),
    "Flax, save_checkpoint": JaxLayout(_save_checkpoint, f"checkpoint_{STEPS}"),
    "Haiku, pickle": JaxLayout(_pickle, "net.pkl", module="haiku"),
    "pickle of numpy": JaxLayout(_pickle_of_numpy, "net.pkl", module="haiku"),
    "pickle of a tuple": JaxLayout(_pickle_of_tuple, "net.pkl"),
    "Equinox": JaxLayout(_leaves, "net.eqx", module="equinox"),
    ".npz": JaxLayout(_npz, "net.npz"),
    ".npz of parameters": JaxLayout(_npz_of_parameters, "net.npz", refusal="`onward train --weights"),
    "joblib": JaxLayout(_joblib, "net.joblib", refusal="no known checkpoint format"),
    "optax.partition": JaxLayout(_STANDARD, optimizer=_partition, load=_restored, form="orbax"),
    "optax.inject_hyperparams": JaxLayout(
        _STANDARD,
        optimizer=lambda: _optax().inject_hyperparams(_optax().adam)(learning_rate=1e-2),
        load=_restored,
        form="orbax",
    ),
    "optax.MultiSteps": JaxLayout(
        _STANDARD, optimizer=lambda: _optax().MultiSteps(_optax().adam(1e-2), 2), load=_restored, form="orbax"
    ),
    "optax, decay of matrices": JaxLayout(
        _to_bytes,
        "run.msgpack",
        lambda: _optax().adamw(1e-2, weight_decay=0.1, mask=_matrices),
        _from_bytes,
        "flax",
    ),
}
