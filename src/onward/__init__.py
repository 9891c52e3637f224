"""ONNX training: one .onnx file holds a model and its training.

    import onward

    model = onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw:lr=1e-3")
    onward.check(model)
    model.save("training.onnx")

The public names are those of `dir(onward)` and of its namespaces `backend`, `engines`, `lora`,
`pipelines`, `rules` and `transform`. All other modules are private and may change in any release.

Names are imported when they are first used, which keeps `import onward` fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onward.lazy_sympy import defer_sympy

if TYPE_CHECKING:  # `_NAMES` for type checkers; a test compares the two
    # isort: off
    from onward import backend as backend, engines as engines, pipelines as pipelines, rules as rules
    from onward import transform as transform
    from onward.agreement.gradient_check import check_gradients as check_gradients
    from onward.agreement.verification import verify as verify
    from onward.checker import Finding as Finding, check as check
    from onward.checkpoint.comparison import diff as diff
    from onward.checkpoint.exporting import to_checkpoint as to_checkpoint
    from onward.checkpoint.formats import open_checkpoint as open_checkpoint
    from onward.importing.torch_lightning import LightningCallback as LightningCallback
    from onward.importing.torch_trainer import TrainerCallback as TrainerCallback
    from onward.frameworks.jax import from_jax as from_jax, to_jax as to_jax
    from onward.frameworks.keras import from_keras as from_keras, to_keras as to_keras
    from onward.frameworks.tensorflow import from_tensorflow as from_tensorflow, to_tensorflow as to_tensorflow
    from onward.frameworks.run_files import load_into as load_into
    from onward.frameworks.torch import from_torch as from_torch, to_torch as to_torch
    from onward.differentiate import gradient as gradient, jvp as jvp, vjp as vjp
    from onward.engines.initialization import reset as reset
    from onward.errors import Error as Error
    from onward.importing import from_checkpoint as from_checkpoint
    from onward.inspect import describe as describe
    from onward.lowering import lower as lower
    from onward.model import Model as Model, Step as Step, load as load
    from onward.model.sharding import Sharding as Sharding
    from onward.options import TrainConfig as TrainConfig
    from onward.planning import plan as plan
    from onward.recipe import lora as lora
    from onward.recipe.head import replace_head as replace_head
    from onward.recipe.prepare import Recipe as Recipe, prepare as prepare
    from onward.training.api import find_lr as find_lr, resume as resume, train as train
    from onward.training.callbacks import Callback as Callback
    from onward.training.cross_validation import CrossValidation as CrossValidation, cross_validate as cross_validate
    from onward.training.evaluation import Evaluation as Evaluation, evaluate as evaluate
    from onward.training.prediction import Predictions as Predictions, predict as predict
    from onward.training.report import report as report
    from onward.training.run import Run as Run
    from onward.web import page as page
    # isort: on

defer_sympy()

_NAMES = {
    "": ("backend", "engines", "pipelines", "rules", "transform"),
    "agreement.gradient_check": ("check_gradients",),
    "agreement.verification": ("verify",),
    "checker": ("Finding", "check"),
    "checkpoint.comparison": ("diff",),
    "checkpoint.exporting": ("to_checkpoint",),
    "checkpoint.formats": ("open_checkpoint",),
    "importing.torch_lightning": ("LightningCallback",),
    "importing.torch_trainer": ("TrainerCallback",),
    "frameworks.jax": ("from_jax", "to_jax"),
    "frameworks.keras": ("from_keras", "to_keras"),
    "frameworks.tensorflow": ("from_tensorflow", "to_tensorflow"),
    "frameworks.run_files": ("load_into",),
    "frameworks.torch": ("from_torch", "to_torch"),
    "differentiate": ("gradient", "jvp", "vjp"),
    "engines.initialization": ("reset",),
    "errors": ("Error",),
    "importing": ("from_checkpoint",),
    "inspect": ("describe",),
    "lowering": ("lower",),
    "model": ("Model", "Step", "load"),
    "model.sharding": ("Sharding",),
    "options": ("TrainConfig",),
    "planning": ("plan",),
    "recipe": ("lora",),
    "recipe.head": ("replace_head",),
    "recipe.prepare": ("Recipe", "prepare"),
    "training.api": ("find_lr", "resume", "train"),
    "training.callbacks": ("Callback",),
    "training.cross_validation": ("CrossValidation", "cross_validate"),
    "training.evaluation": ("Evaluation", "evaluate"),
    "training.prediction": ("Predictions", "predict"),
    "training.report": ("report",),
    "training.run": ("Run",),
    "web": ("page",),
}
"""Module -> the public names in it."""
_FORMER = {"pipeline": "make", "run_pipeline": "run", "join_pipeline": "join", "detach_pipeline": "detach"}
"""Former names -> names in `onward.pipelines`. They work until the next release."""
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # which know the names above, and no others

    def __getattr__(name: str) -> Any:
        if name in _FORMER:
            return getattr(importlib.import_module("onward.pipelines"), _FORMER[name])
        if name not in _HOME:
            raise AttributeError(f"module 'onward' has no attribute {name!r}")
        home = _HOME[name]
        try:
            module = importlib.import_module(f"onward.{home or name}")
            if home and not hasattr(module, name):
                importlib.import_module(f"onward.{home}.{name}")  # a module of a package
        except ModuleNotFoundError as error:
            raise _missing(name, error) from error
        value = globals()[name] = getattr(module, name) if home else module
        return value


def __dir__() -> list[str]:
    return __all__


def _missing(name: str, error: ModuleNotFoundError) -> Exception:
    """Return the error for a name whose framework is not installed."""
    home = _HOME[name]
    if not home.startswith(("frameworks.", "importing.")) or str(error.name).startswith("onward"):
        return error
    from onward.errors import UnsupportedError

    framework = home.split(".")[1].partition("_")[0]
    extra = "tensorflow" if framework == "keras" else framework
    package = f"onward[{extra}]" if home.startswith("frameworks.") or error.name == "torch" else error.name
    return UnsupportedError(
        f"`onward.{name}` needs `{error.name}`, which is not installed", hint=f"pip install '{package}'"
    )
