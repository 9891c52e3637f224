"""Makes the checkpoints of JAX in this folder: steps of Orbax from two processes, and a file of Flax. Both are small.

`python make_jax.py` needs jax, optax, flax and orbax-checkpoint; it calls itself for each process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PORT = 12_765


def training() -> dict[str, Any]:
    """Three steps of Adam with a schedule, with averages and the state of random numbers."""
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 10)))
    params = {"dense": {"kernel": jnp.arange(8.0).reshape(4, 2), "bias": jnp.ones(2, jnp.bfloat16)}}
    opt_state = tx.init(params)
    for _ in range(3):
        updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
        params = optax.apply_updates(params, updates)
    rng = jax.random.key_data(jax.random.key(5))
    return {"step": 3, "params": params, "opt_state": opt_state, "rng": rng, "ema": params}


def one_of_two(process: int, folder: str) -> None:
    """The part of one process: rows of matrices are spread over both."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from orbax import checkpoint as ocp

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", 2, process)
    with jax.default_device(jax.local_devices()[0]):
        before = training()
    mesh = jax.make_mesh((2,), ("data",))

    rows, all_of_it = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def spread(leaf: Any) -> Any:
        if isinstance(leaf, int):
            return leaf
        array, sharding = np.asarray(leaf), rows if leaf.ndim > 1 else all_of_it
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    with ocp.CheckpointManager(folder, item_names=("state", "data")) as manager:
        state = jax.tree.map(spread, before)
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave({"epoch": 1}))
        manager.save(3, args=parts)


def orbax() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        place.mkdir()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        calls = [[sys.executable, __file__, str(process), str(place)] for process in range(2)]
        running = [subprocess.Popen(call, env=environment) for call in calls]
        assert not any(each.wait(300) for each in running)
        shutil.rmtree(HERE / "orbax", ignore_errors=True)
        shutil.copytree(place, HERE / "orbax")


def flax() -> None:
    from flax import serialization

    (HERE / "flax.msgpack").write_bytes(serialization.to_bytes(training()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one_of_two(int(sys.argv[1]), sys.argv[2])
    else:
        orbax()
        flax()
