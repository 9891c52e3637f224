"""Which class of PyTorch, its own or one of ours, computes what an optimizer of a recipe does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import optim
from torch.optim import Optimizer

from onward.convert.torch.exact import adam, descent, matrices, squares
from onward.convert.torch.exact.optimizer import ExactOptimizer
from onward.recipe.optimizers import ConfiguredOptimizer


class Condition(NamedTuple):
    """Settings for which a row is meant."""

    words: str
    holds: Callable[[Mapping[str, Any]], bool]


class Support(NamedTuple):
    """A row: optimizers of a recipe, whose arithmetic they have, and the class that computes the same."""

    optimizers: tuple[str, ...]
    variants: tuple[str, ...]
    made: type[Optimizer]
    when: Condition | None = None

    @property
    def way(self) -> str:
        return "exact subclass" if issubclass(self.made, ExactOptimizer) else "native"

    def fits(self, configured: ConfiguredOptimizer) -> bool:
        named = configured.kind.name in self.optimizers and configured.options["variant"] in self.variants
        return named and (self.when is None or self.when.holds({**configured.values, **configured.options}))


_SGD = ("sgd", "momentum", "nesterov")
_PLAIN = Condition("without momentum and weight decay", lambda s: not s["momentum"] and not s["weight_decay"])
_NO_AMSGRAD = Condition("without amsgrad", lambda s: not s["amsgrad"])
_NO_DECAY = Condition("without weight decay", lambda s: not s["weight_decay"])

SUPPORT = [
    Support(_SGD, ("torch", "optax"), optim.SGD),
    Support((*_SGD, "sgdw"), ("keras",), optim.SGD, _PLAIN),
    Support((*_SGD, "sgdw"), ("keras",), descent.KerasSGD),
    Support(("sgdw",), ("torch", "optax"), descent.SGDW),
    Support(("adam", "amsgrad"), ("torch",), optim.Adam),
    Support(("adam", "amsgrad"), ("optax",), optim.Adam, _NO_AMSGRAD),
    Support(("adamw",), ("torch",), optim.AdamW),
    Support(("adamw",), ("optax",), optim.AdamW, _NO_AMSGRAD),
    Support(("adam", "adamw", "amsgrad"), ("optax",), adam.OptaxAMSGrad),
    Support(("adam", "adamw", "amsgrad"), ("keras",), adam.KerasAdam),
    Support(("adamw",), ("transformers",), adam.TransformersAdamW),
    Support(("adamax",), ("torch", "optax"), optim.Adamax),
    Support(("adamax",), ("keras",), adam.KerasAdamax),
    Support(("nadam",), ("torch", "keras"), optim.NAdam),
    Support(("nadam",), ("optax",), adam.OptaxNAdam),
    Support(("radam",), ("torch",), optim.RAdam),
    Support(("radam",), ("optax",), adam.OptaxRAdam),
    Support(("adagrad",), ("torch",), optim.Adagrad),
    Support(("adagrad",), ("optax", "keras"), squares.RootEpsAdagrad),
    Support(("rmsprop",), ("torch",), optim.RMSprop),
    Support(("rmsprop",), ("optax", "keras"), squares.RootEpsRMSprop),
    Support(("adadelta",), ("torch", "optax"), optim.Adadelta),
    Support(("adadelta",), ("keras",), optim.Adadelta, _NO_DECAY),
    Support(("adadelta",), ("keras",), squares.AdadeltaW),
    Support(("adafactor",), ("torch",), optim.Adafactor),
    Support(("adafactor",), ("optax",), matrices.OptaxAdafactor),
    Support(("lion",), ("optax", "keras"), adam.Lion),
    Support(("lamb",), ("optax", "keras"), adam.Lamb),
    Support(("muon",), ("torch",), matrices.Muon),
]
"""The first row that fits counts."""


def counterpart(configured: ConfiguredOptimizer) -> type[Optimizer]:
    """The class that computes the same."""
    return next(row.made for row in SUPPORT if row.fits(configured))


# ---- the other way ---------------------------------------------------------------------------------------------------

Words = Callable[[Mapping[str, Any]], tuple[str, str]]
"""From the settings of a group to the optimizer's name and variant."""


def _always(name: str, variant: str = "torch") -> Words:
    return lambda settings: (name, variant)


def _by_decay(name: str) -> Words:
    """Keras and optax agree but for weight decay."""
    return lambda settings: (name, "keras" if settings["decoupled_weight_decay"] else "optax")


FROM_TORCH: dict[type[Optimizer], Words] = {
    optim.SGD: _always("sgd"),
    optim.Adam: _always("adam"),
    optim.AdamW: _always("adamw"),
    optim.Adagrad: _always("adagrad"),
    optim.Adadelta: _always("adadelta"),
    optim.Adamax: _always("adamax"),
    optim.NAdam: _always("nadam"),
    optim.RAdam: _always("radam"),
    optim.RMSprop: _always("rmsprop"),
    optim.Adafactor: _always("adafactor"),
    descent.KerasSGD: _always("sgd", "keras"),
    descent.SGDW: _always("sgdw"),
    adam.KerasAdam: _always("adam", "keras"),
    adam.TransformersAdamW: _always("adamw", "transformers"),
    adam.OptaxAMSGrad: _always("amsgrad", "optax"),
    adam.KerasAdamax: _always("adamax", "keras"),
    adam.OptaxNAdam: _always("nadam", "optax"),
    adam.OptaxRAdam: _always("radam", "optax"),
    adam.Lion: _always("lion", "optax"),
    adam.Lamb: _by_decay("lamb"),
    squares.RootEpsAdagrad: _by_decay("adagrad"),
    squares.RootEpsRMSprop: _by_decay("rmsprop"),
    squares.AdadeltaW: _always("adadelta", "keras"),
    matrices.OptaxAdafactor: _always("adafactor", "optax"),
    matrices.Muon: _always("muon"),
}

_ANOTHER = "use an optimizer of one gradient for each update, such as AdamW"

REFUSED: dict[type[Optimizer], tuple[str, str]] = {
    optim.LBFGS: ("LBFGS evaluates the model several times for each step", _ANOTHER),
    optim.SparseAdam: ("a training model has no sparse gradients", "use Adam, and `sparse=False` in embeddings"),
    optim.Muon: (
        "PyTorch's Muon orthogonalises in bfloat16, a training model in the type of the parameter",
        "use `onward.convert.torch.exact.matrices.Muon`, or another optimizer",
    ),
}
"""What is wrong with them, and what to do."""
