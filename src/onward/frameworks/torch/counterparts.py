"""Which class of PyTorch, its own or one of ours, computes what an optimizer of a recipe does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import optim
from torch.optim import Optimizer

from onward.frameworks.torch.exact import matrices
from onward.frameworks.torch.exact.optimizer import ExactOptimizer
from onward.frameworks.torch.formulas import EXACT
from onward.recipe.optimizers import ConfiguredOptimizer
from onward.vocabulary.torch import NATIVE, Condition, Native


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
        return Native(self.optimizers, self.variants, "", self.when).fits(configured)


SUPPORT = [
    *(Support(row.optimizers, row.variants, getattr(optim, row.made), row.when) for row in NATIVE),
    Support(("sgd", "momentum", "nesterov", "sgdw"), ("keras",), EXACT["KerasSGD"]),
    Support(("sgdw",), ("torch", "optax"), EXACT["SGDW"]),
    Support(("adam", "adamw", "amsgrad"), ("optax",), EXACT["OptaxAMSGrad"]),
    Support(("adam", "adamw", "amsgrad"), ("keras",), EXACT["KerasAdam"]),
    Support(("adamw",), ("transformers",), EXACT["TransformersAdamW"]),
    Support(("adamax",), ("keras",), EXACT["KerasAdamax"]),
    Support(("nadam",), ("optax",), EXACT["OptaxNAdam"]),
    Support(("radam",), ("optax",), EXACT["OptaxRAdam"]),
    Support(("adagrad",), ("optax", "keras"), EXACT["RootEpsAdagrad"]),
    Support(("rmsprop",), ("optax", "keras"), EXACT["RootEpsRMSprop"]),
    Support(("adadelta",), ("keras",), EXACT["AdadeltaW"]),
    Support(("adafactor",), ("optax",), matrices.OptaxAdafactor),
    Support(("lion",), ("optax", "keras"), EXACT["Lion"]),
    Support(("lamb",), ("optax", "keras"), EXACT["Lamb"]),
    Support(("muon",), ("torch",), matrices.Muon),
]
"""The first row that fits counts."""


def counterpart(configured: ConfiguredOptimizer) -> type[Optimizer]:
    """The class that computes the same."""
    return next(row.made for row in SUPPORT if row.fits(configured))


# ---- the other way ---------------------------------------------------------------------------------------------------

Words = Callable[[Mapping[str, Any]], tuple[str, str]]
"""From the settings of a group to the optimizer's name and variant."""


def _always(name: str, variant: str) -> Words:
    return lambda settings: (name, variant)


def _by_decay(name: str) -> Words:
    """Keras and optax agree but for weight decay."""
    return lambda settings: (name, "keras" if settings["decoupled_weight_decay"] else "optax")


FROM_TORCH: dict[type[Optimizer], Words] = {
    **{row.made: _always(row.optimizers[0], row.variants[0]) for row in reversed(SUPPORT)},
    EXACT["OptaxAMSGrad"]: _always("amsgrad", "optax"),
    EXACT["Lamb"]: _by_decay("lamb"),
    EXACT["RootEpsAdagrad"]: _by_decay("adagrad"),
    EXACT["RootEpsRMSprop"]: _by_decay("rmsprop"),
}
"""What each class is in a recipe: the first optimizer and variant that it is made for, with some exceptions."""

_ANOTHER = "use an optimizer of one gradient for each update, such as AdamW"

REFUSED: dict[type[Optimizer], tuple[str, str]] = {
    optim.LBFGS: ("LBFGS evaluates the model several times for each step", _ANOTHER),
    optim.SparseAdam: ("a training model has no sparse gradients", "use Adam, and `sparse=False` in embeddings"),
    optim.Muon: (
        "PyTorch's Muon orthogonalises in bfloat16, a training model in the type of the parameter",
        "use `onward.frameworks.torch.exact.matrices.Muon`, or another optimizer",
    ),
}
"""What is wrong with them, and what to do."""
