"""Losses and saved optimizers of PyTorch in words of a recipe, without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from onward.recipe.spec import Spec
from onward.vocabulary.optimizers import TORCH_ROWS

# ---- optimizers ------------------------------------------------------------------------------------------------------

FLAGS = {"foreach": None, "differentiable": False, "capturable": False, "fused": None}
"""Settings without effect on numbers -> defaults."""
REFUSED_OPTIMIZERS = {
    "LBFGS": (
        "LBFGS evaluates the model several times for each step",
        "use an optimizer of one gradient for each update, such as AdamW",
    ),
    "SparseAdam": ("a training model has no sparse gradients", "use Adam, and `sparse=False` in embeddings"),
    "Muon": (
        "PyTorch's Muon orthogonalizes in bfloat16, a training model in the type of the parameter",
        "use `onward.frameworks.torch.exact.Muon`, or another optimizer",
    ),
}
"""Class of torch.optim -> problem and hint."""

# ---- saved optimizers ------------------------------------------------------------------------------------------------

FAMILIES: dict[frozenset[str], tuple[str, ...]] = {
    **{state: row.optimizers[:1] for row in reversed(TORCH_ROWS) for state in row.states},
    frozenset({"eta", "mu", "ax"}): ("asgd",),
    frozenset({"prev", "step_size"}): ("rprop",),
}
"""Slots of a parameter without `step` -> optimizers. Adam, AdamW and RAdam have the same."""
_ADAMS = {state for row in TORCH_ROWS if row.name == "Adam" for state in row.states}


def families_of(states: Collection[frozenset[str]], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the possible optimizers of a saved state.

    Args:
        states: the slots of each parameter, without `step`
        settings: the settings of the first group
    """
    if set(states) <= {frozenset()}:
        if {"momentum", "dampening", "nesterov"} <= settings.keys():
            return ("sgd",)
        return _adams(settings) if {"betas", "amsgrad"} <= settings.keys() else ()
    families = {_adams(settings) if state in _ADAMS else FAMILIES.get(state, ()) for state in states}
    if families == {("sgd",)} and "ns_coefficients" in settings:
        return ("muon",)
    return families.pop() if len(families) == 1 else ()


def _adams(settings: Mapping[str, Any]) -> tuple[str, ...]:
    if "momentum_decay" in settings:
        return ("nadam",)
    if "decoupled_weight_decay" not in settings:  # older versions of PyTorch
        return ("adam", "adamw", "radam")
    if "amsgrad" not in settings:
        return ("radam",)
    return ("adamw",) if settings["decoupled_weight_decay"] else ("adam",)


OF_ADAFACTOR = {"decay_rate": "beta2_decay", "clip_threshold": "d"}
"""Settings that only Adafactor of transformers has -> names in recipes."""


def saved_words(family: str, settings: Mapping[str, Any], rate: float, number: Callable[[Any], Any]) -> Spec | None:
    """Return the words of a recipe for a group of a saved optimizer; None if there are none."""
    rows = [row for row in TORCH_ROWS if family in row.optimizers]
    if settings.keys() >= OF_ADAFACTOR.keys():
        rows = [row for row in rows if row.variants == ("transformers",)]
    row = next(iter(rows), None)
    settings = {OF_ADAFACTOR.get(name, name): value for name, value in settings.items()}
    if row is None or row.name in REFUSED_OPTIMIZERS:
        return None
    variant = row.variants[0] if row.states else "torch"
    return row.words(family, settings, number=number, lr=rate, variant=variant)


# ---- losses ----------------------------------------------------------------------------------------------------------


class LossRow(NamedTuple):
    """Loss of a recipe and its counterparts in PyTorch."""

    name: str
    module: str
    """The class in torch.nn; without a function, a class of Onward."""
    function: str = ""
    """The function in torch.nn.functional."""


LOSSES = [
    LossRow("cross_entropy", "CrossEntropyLoss", "cross_entropy"),
    LossRow("nll", "NLLLoss", "nll_loss"),
    LossRow("mse", "MSELoss", "mse_loss"),
    LossRow("l1", "L1Loss", "l1_loss"),
    LossRow("smooth_l1", "SmoothL1Loss", "smooth_l1_loss"),
    LossRow("huber", "HuberLoss", "huber_loss"),
    LossRow("binary_cross_entropy", "BCELoss", "binary_cross_entropy"),
    LossRow("bce_with_logits", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits"),
    LossRow("kl_div", "KLDivLoss", "kl_div"),
    LossRow("poisson_nll", "PoissonNLLLoss", "poisson_nll_loss"),
    LossRow("gaussian_nll", "GaussianNLLLoss", "gaussian_nll_loss"),
    LossRow("ctc", "CTCLoss", "ctc_loss"),
    LossRow("triplet", "TripletMarginLoss", "triplet_margin_loss"),
    LossRow("hinge", "Hinge"),
    LossRow("squared_hinge", "SquaredHinge"),
    LossRow("cosine", "CosineDistance"),
    LossRow("binary_cross_entropy", "ClippedBCELoss"),
    LossRow("ctc", "CTC"),
]
"""The first row of a name counts, unless options require another."""
