"""States of optax for optimizers of a recipe: the trees that the `init` of optax's own optimizers makes, filled.

Where optax has an optimizer by name (`optax.adamw`), its state is that one's; where it takes several transformations,
that of their chain, as `onward.to_jax` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint
from onward.checkpoint.pytree.optax_trees import reshape, with_sign
from onward.checkpoint.pytree.pytrees import nest_names
from onward.errors import UnsupportedError, warn
from onward.recipe.optimizers import ConfiguredOptimizer, optimizer
from onward.recipe.spec import Spec
from onward.run_state.state import OptimizerState, ParameterGroup
from onward.run_state.tensors import ArrayTensor, ComputedTensor, Tensor
from onward.vocabulary.optax import ELSE, EPSILON, FIELDS, difference_from_optax

Settings = SimpleNamespace
Stages = list[str]
"""The parts of a chain: transformations that keep something, `rate`, and `` for those that keep nothing."""

_RATE = "rate"
_COUNTLESS = ("trace", "scale_by_rss", "scale_by_rms", "scale_by_stddev", "scale_by_adadelta")


def optimizer_state(checkpoint: Checkpoint, empty: Any) -> Any:
    """The state of optax that goes on with the optimizer of a checkpoint. `empty` is what stands for nothing."""
    if len(checkpoint.optimizers) != 1:
        raise UnsupportedError(
            f"the checkpoint has {len(checkpoint.optimizers)} optimizers, and a state of optax is of one",
            hint="write them one by one",
        )
    made = _Maker(checkpoint, checkpoint.optimizers[0], empty)
    chains = [made.chain(group) for group in made.groups]
    state: Any = chains[0]
    if len(chains) > 1:
        state = {"inner_states": {f"group{i}": {"inner_state": chain} for i, chain in enumerate(chains)}}
    state = [empty, state] if checkpoint.clip else state
    return made.multi_steps(state) if (checkpoint.accumulate or 1) > 1 else state


class _Maker:
    def __init__(self, checkpoint: Checkpoint, of: OptimizerState, empty: Any):
        self._tensors, self._slots, self._empty = checkpoint.tensors, of.slots, empty
        self._step = checkpoint.step or 0
        self._is_scheduled = any(each.words is None or each.words for each in checkpoint.schedules)
        self.groups = [group for group in of.groups if group.parameters]
        self._trained = [str(name) for group in self.groups for name in group.parameters]
        if unnamed := [name for name in self._trained if name not in self._tensors]:
            raise UnsupportedError(
                f"the optimizer keeps state of `{unnamed[0]}`, which is no parameter of the checkpoint",
                hint="read it together with its model, so that parameters have names",
            )

    def multi_steps(self, state: Any) -> dict[str, Any]:
        """The state of `optax.MultiSteps` at an update."""
        zeros = {name: _fill_like(self._tensors[name], 0.0) for name in self._trained}
        counts = {"mini_step": _counter(0), "gradient_step": _counter(self._step)}
        return {**counts, "inner_opt_state": state, "acc_grads": nest_names(zeros), "skip_state": []}

    def chain(self, group: ParameterGroup) -> list[Any]:
        if group.optimizer is None:
            raise UnsupportedError(
                "the checkpoint does not say which optimizer it is of, and states of optax differ",
                hint="say which when it is read: `optimizer=...`",
            )
        spec = group.spec
        configured = optimizer(spec.name).configure(**spec.options)
        made = [self._stage(stage, group, configured) for stage in stages(spec, configured)]
        _warn_of_epsilon(configured, self._step)
        return made

    def _stage(self, stage: str, group: ParameterGroup, configured: ConfiguredOptimizer) -> Any:
        count = _counter(self._step)
        if stage in ("", _RATE):
            return {"count": count} if stage and self._is_scheduled else self._empty
        fields = {
            field: nest_names({name: self._slot(name, slot, group, configured) for name in self._trained})
            for field, slot in FIELDS[stage].items()
        }
        return fields if stage in _COUNTLESS else {"count": count, **fields}

    def _slot(self, name: str, slot: str, group: ParameterGroup, configured: ConfiguredOptimizer) -> Any:
        if name not in group.parameters:
            return self._empty
        kept, shape = self._slots.get(name, {}), self._tensors[name].shape
        if slot in ("row_var", "col_var", "variance") and kept:
            return _factor(kept, slot, shape)
        if slot in kept:
            return self._momentum(kept[slot], configured) if slot == "momentum_buffer" else kept[slot]
        if self._step:
            raise UnsupportedError(f"`{slot}` of `{name}` is not in the checkpoint, after {self._step} updates")
        start = configured.kind.initial.get(slot, 0.0)
        return _fill_like(self._tensors[name], configured.values[start] if isinstance(start, str) else start)

    def _momentum(self, tensor: Tensor, configured: ConfiguredOptimizer) -> Tensor:
        """RMSprop of optax has momentum after the learning rate, with its sign; SGD of Keras has the rate in it."""
        settings = configured.settings
        if configured.kind.name == "rmsprop":
            return with_sign(tensor, 1 if settings.variant == "torch" else -1)
        if settings.variant != "keras":
            return tensor
        if self._is_scheduled or not settings.lr:
            raise UnsupportedError(
                "momentum of Keras has the learning rates of earlier steps in it, which optax applies afterwards",
                hint="write it with a program of its own: `onward convert training.onnx --to jax`",
            )
        return ComputedTensor(
            tensor.dtype, tensor.shape, lambda: (tensor.array() / -settings.lr).astype(tensor.dtype, copy=False)
        )


def _counter(count: int) -> Tensor:
    return ArrayTensor(np.asarray(count, np.int32))


def _fill_like(like: Tensor, value: float) -> Tensor:
    return ComputedTensor(like.dtype, like.shape, lambda: np.full(like.shape, value, like.dtype))


def _factor(kept: Mapping[str, Any], slot: str, shape: tuple[int, ...]) -> Tensor:
    """Of Adafactor: optax has no axis where others have one of size 1, and a zero where there is nothing to keep."""
    if slot not in kept:
        return ArrayTensor(np.zeros(1, next(each for each in kept.values() if isinstance(each, Tensor)).dtype))
    small, large = np.argsort(shape)[-2:] if slot != "variance" else (-1, -1)
    axis = {"row_var": large, "col_var": small, "variance": len(shape)}[slot]
    return reshape(kept[slot], tuple(size for i, size in enumerate(shape) if i != axis))


# ---- chains ----------------------------------------------------------------------------------------------------------


def stages(spec: Spec, configured: ConfiguredOptimizer) -> list[str]:
    """The chain of optax for an optimizer of a recipe."""
    if difference_from_optax(spec.name, configured.settings) == ELSE:
        raise UnsupportedError(
            f"optax has no optimizer that goes on with the state of `{spec}`",
            hint="write it with a program of its own: `onward convert training.onnx --to jax`",
        )
    return _MAKERS[spec.name](configured.settings)


def _around(s: Settings, direction: list[str]) -> list[str]:
    if not s.weight_decay:
        return [*direction, _RATE]
    decoupled = s.variant == "keras" or getattr(s, "decoupled_weight_decay", False)
    return [*direction, "", _RATE] if decoupled else ["", *direction, _RATE]


def _sgd(s: Settings) -> Stages:
    return _around(s, ["trace" if s.momentum else ""])


def _sgdw(s: Settings) -> Stages:
    return ["trace" if s.momentum else "", "", _RATE]


def _adam(s: Settings) -> Stages:
    return _around(s, ["scale_by_amsgrad" if s.amsgrad else "scale_by_adam"])


def _adamw(s: Settings) -> Stages:
    made = _adam(Settings(**{**vars(s), "weight_decay": 0.0}))
    return [made[0], "", _RATE]


def _plain(direction: str) -> Callable[[Settings], Stages]:
    return lambda s: _around(s, [direction])


def _rmsprop(s: Settings) -> Stages:
    scale, momentum = "scale_by_stddev" if s.centered else "scale_by_rms", ["trace"] if s.momentum else []
    if s.variant == "torch":
        return _around(s, [scale, *momentum]) if momentum or s.weight_decay else [scale, _RATE, ""]
    return [*_around(s, [scale]), *(momentum or ([] if s.weight_decay else [""]))]


def _adadelta(s: Settings) -> Stages:
    return (
        ["scale_by_adadelta", "", _RATE]
        if s.variant == "keras" and s.weight_decay
        else ["", "scale_by_adadelta", _RATE]
    )


def _adafactor(s: Settings) -> Stages:
    decay = [""] if s.weight_decay else []
    return ["scale_by_factored_rms", "", _RATE, "", *decay, ""]


_MAKERS: dict[str, Callable[[Settings], Stages]] = {
    **dict.fromkeys(("sgd", "momentum", "nesterov"), _sgd),
    "sgdw": _sgdw,
    **dict.fromkeys(("adam", "amsgrad"), _adam),
    "adamw": _adamw,
    "adamax": _plain("scale_by_adamax"),
    "nadam": _plain("scale_by_adam"),
    "radam": _plain("scale_by_radam"),
    "adagrad": _plain("scale_by_rss"),
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "adafactor": _adafactor,
    "lion": lambda s: ["scale_by_lion", "", _RATE],
    "lamb": lambda s: ["scale_by_adam", "", "", _RATE],
}

_CORRECTED = ("adam", "adamw")
"""Optimizers whose epsilon stands before bias correction, in Keras and transformers."""


def _warn_of_epsilon(configured: ConfiguredOptimizer, step: int) -> None:
    """Say what of an optimizer's arithmetic, which is not stored, is another in optax."""
    settings, name = configured.settings, (configured.kind.name, configured.settings.variant)
    if difference_from_optax(name[0], settings) != EPSILON:
        return
    more = ""
    if name[0] in _CORRECTED:
        more = f"; {settings.eps / math.sqrt(1 - settings.beta2 ** (step + 1)):.3g} comes nearest at first"
    if settings.variant == "transformers" and settings.weight_decay:
        more += "; and weights decay before the step, not after it"
    warn(f"epsilon {settings.eps:g} is added at another place in optax than by `{' of '.join(name)}`{more}")
