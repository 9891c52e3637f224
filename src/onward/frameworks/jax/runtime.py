"""Definitions that written programs copy, besides the graph, if they mention them.

Nothing here may need more than JAX, optax and numpy.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onward.engines.jax.elementwise import convert
from onward.engines.jax.types import concrete_array


@contextlib.contextmanager
def exact():
    """Allow 64-bit numbers, and compute matmuls in full precision."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def at_once(function, *inputs, **attributes):
    """Compute numpy results from numpy arguments during tracing, as for shapes."""
    if not all(isinstance(x, np.ndarray | np.generic) for x in inputs if x is not None):
        return function(*inputs, **attributes)
    with jax.ensure_compile_time_eval():
        placed = (None if x is None else jnp.asarray(x) for x in inputs)
        return jax.tree.map(np.asarray, function(*placed, **attributes))


def several(results):
    """Return a tuple of the results of operators that return one or several."""
    return results if isinstance(results, tuple) else (results,)


def dtype_of(name):
    return jnp.dtype(name)


def cast(x, *, to, saturate=True, round_mode="up"):
    return convert(x, dtype_of(to), saturate=saturate, round_mode=round_mode)


def check_growth(rows):
    """Let a Loop collect any size: a program does not check the memory."""


class Values:
    """Arrays of control flow, in numpy or JAX."""

    operators: ClassVar = {
        "Unsqueeze": lambda x, axes: jnp.expand_dims(x, tuple(axes.tolist())),
        "Concat": lambda *xs, axis: jnp.concatenate(xs, axis),
    }

    @staticmethod
    def host(value):
        return value if isinstance(value, np.ndarray) else concrete_array(value)

    @staticmethod
    def place(value):
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value


TYPES = {  # names of dtypes in a safetensors file
    **{"bool": "BOOL", "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"},
    **{f"{name}{bits}": f"{name[0].upper()}{bits}" for name in ("int", "uint") for bits in (8, 16, 32, 64)},
}


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file by name."""
    data = Path(path).read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header, types = json.loads(data[8:start]), {code: jnp.dtype(name) for name, code in TYPES.items()}
    arrays = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            array = np.frombuffer(data[start + first : start + last], types[entry["dtype"]])
            arrays[name] = array.reshape(entry["shape"])
    return arrays


def write(arrays: Mapping[str, Any], path: str | Path) -> None:
    """Write arrays by name to a safetensors file."""
    header, end = {}, 0
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": TYPES[str(array.dtype)], "shape": array.shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for array in arrays.values():
            file.write(array.tobytes())


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path: `opt_state/0/mu/fc1.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def fill_tree(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return the tree with arrays, by name, as leaves."""
    leaves = [jnp.asarray(arrays[name], leaf.dtype) for name, leaf in leaves_by_name(tree).items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class ExactState(NamedTuple):
    """State of `transformation`."""

    count: Any  # of updates
    slots: Any  # by slot and parameter


def transformation(rules: Any, rate: Any) -> optax.GradientTransformation:
    """Return an optimizer with `rules`: initial slots and update function by parameter."""

    def init(params):
        first = {name: slots(params[name]) for name, (slots, _) in rules.items()}
        names = dict.fromkeys(slot for slots in first.values() for slot in slots)
        by_slot = {slot: {name: slots[slot] for name, slots in first.items() if slot in slots} for slot in names}
        return ExactState(jnp.zeros([], jnp.int32), by_slot)

    def update(gradients, state, params=None):
        if params is None:
            raise ValueError(optax.NO_PARAMS_MSG)
        changes, slots = dict(gradients), {slot: dict(values) for slot, values in state.slots.items()}
        with exact():
            lr = jnp.asarray(rate(state.count) if callable(rate) else rate, np.float64)
            t = jnp.asarray(state.count + 1, np.int64)
            for name, (_, rule) in rules.items():
                own = {slot: values[name] for slot, values in slots.items() if name in values}
                new, after = rule(params[name], gradients[name], lr=lr, t=t, **own)
                changes[name] = new - params[name]
                for slot, value in after.items():
                    slots[slot][name] = value
        return changes, ExactState(state.count + 1, slots)

    return optax.GradientTransformation(init, update)


def exact_clip(kind, limit, variant):
    """Clip by the norm of all gradients (`norm`) or of each (`tensor_norm`)."""

    def update(gradients, state, params=None):
        leaves, structure = jax.tree.flatten(gradients)
        groups = [leaves] if kind == "norm" else [[leaf] for leaf in leaves]
        with exact():
            clipped = [leaf for group in groups for leaf in scale_to_norm(group, limit, variant)]
        return structure.unflatten(clipped), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_to_norm(gradients, limit, variant):
    """Scale gradients whose norm exceeds a limit. PyTorch adds 1e-6 to the norm."""
    wide = [g.astype(jnp.promote_types(g.dtype, np.float32)) for g in gradients]
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)).astype(np.float64) for g in wide))
    if variant == "torch":
        factor = jnp.minimum(limit / (norm + 1e-6), 1.0)
    else:
        factor = jnp.where(norm < limit, 1.0, limit / norm)
    return [g * factor.astype(g.dtype) for g in gradients]


class ExecutedState(NamedTuple):
    """State of `joint`."""

    count: Any  # of updates
    state: Any  # by name


def joint(names: Any, rule: Any, initial: Any, rate: Any) -> optax.GradientTransformation:
    """Return an optimizer whose `rule` updates all parameters at once."""

    def init(params):
        return ExecutedState(jnp.zeros([], jnp.int32), initial())

    def update(gradients, state, params=None):
        if params is None:
            raise ValueError(optax.NO_PARAMS_MSG)
        with exact():
            lr = jnp.asarray(rate(state.count) if callable(rate) else rate, np.float64)
            new, after = rule(params, gradients, state.state, lr, jnp.asarray(state.count + 1, np.int64))
        changes = {**gradients, **{name: new[name] - params[name] for name in names}}
        return changes, ExecutedState(state.count + 1, after)

    return optax.GradientTransformation(init, update)
