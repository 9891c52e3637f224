"""ONNX training, made real.

    import onward

    model = onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw:lr=1e-3")
    onward.check(model)
    model.save("training.onnx")

Names are loaded when they are first used, so that `import onward` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onward.lazy_sympy import defer_sympy

if TYPE_CHECKING:
    from onward.checker import Finding, check
    from onward.checkpoint import diff, from_checkpoint, open_checkpoint, to_checkpoint
    from onward.convert.jax import from_jax, to_jax
    from onward.convert.keras import from_keras, to_keras
    from onward.convert.tensorflow import from_tensorflow, to_tensorflow
    from onward.convert.torch import from_torch, to_torch
    from onward.differentiate import gradient, jvp, vjp
    from onward.engines.initialization import reset
    from onward.errors import Error
    from onward.gradcheck import check_gradients
    from onward.inspect import describe
    from onward.lowering import lower
    from onward.model import Model, Step, read
    from onward.recipe import Recipe, add_lora, load_adapter, merge_lora, prepare, replace_head, save_adapter
    from onward.training.api import find_lr, resume, train
    from onward.training.report import report
    from onward.transform import add_prefix, convert_opset, declare, extract, inline, merge, refresh, rename, strip

defer_sympy()

_HOME = {
    "Error": "errors",
    "Finding": "checker",
    "LightningCallback": "checkpoint.torch_lightning",
    "Model": "model",
    "Recipe": "recipe",
    "Step": "model",
    "TrainerCallback": "checkpoint.torch_trainer",
    "add_lora": "recipe",
    "add_prefix": "transform",
    "check": "checker",
    "check_gradients": "gradcheck",
    "convert_opset": "transform",
    "declare": "transform",
    "describe": "inspect",
    "diff": "checkpoint",
    "extract": "transform",
    "find_lr": "training.api",
    "from_checkpoint": "checkpoint",
    "from_jax": "convert.jax",
    "from_keras": "convert.keras",
    "from_tensorflow": "convert.tensorflow",
    "from_torch": "convert.torch",
    "gradient": "differentiate",
    "inline": "transform",
    "jvp": "differentiate",
    "load_adapter": "recipe",
    "lower": "lowering",
    "merge": "transform",
    "merge_lora": "recipe",
    "open_checkpoint": "checkpoint",
    "prepare": "recipe",
    "read": "model",
    "refresh": "transform",
    "rename": "transform",
    "replace_head": "recipe",
    "report": "training.report",
    "reset": "engines.initialization",
    "resume": "training.api",
    "save_adapter": "recipe",
    "strip": "transform",
    "to_checkpoint": "checkpoint",
    "to_jax": "convert.jax",
    "to_keras": "convert.keras",
    "to_tensorflow": "convert.tensorflow",
    "to_torch": "convert.torch",
    "train": "training.api",
    "verify": "verification",
    "vjp": "differentiate",
}

__all__ = [
    "Error",
    "Finding",
    "LightningCallback",
    "Model",
    "Recipe",
    "Step",
    "TrainerCallback",
    "add_lora",
    "add_prefix",
    "check",
    "check_gradients",
    "convert_opset",
    "declare",
    "describe",
    "diff",
    "extract",
    "find_lr",
    "from_checkpoint",
    "from_jax",
    "from_keras",
    "from_tensorflow",
    "from_torch",
    "gradient",
    "inline",
    "jvp",
    "load_adapter",
    "lower",
    "merge",
    "merge_lora",
    "open_checkpoint",
    "prepare",
    "read",
    "refresh",
    "rename",
    "replace_head",
    "report",
    "reset",
    "resume",
    "save_adapter",
    "strip",
    "to_checkpoint",
    "to_jax",
    "to_keras",
    "to_tensorflow",
    "to_torch",
    "train",
    "verify",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name in ("engines", "backend"):  # the engines, as `onward.engines.load`, `onward.backend.prepare`
        return importlib.import_module(f"onward.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'onward' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"onward.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    globals()[name] = value
    return value


def _missing(name: str, error: ModuleNotFoundError) -> Exception:
    """What to say of a name that needs a framework which is not there."""
    if not _HOME[name].startswith(("convert.", "checkpoint.")) or str(error.name).startswith("onward"):
        return error
    from onward.errors import UnsupportedError

    framework = _HOME[name].split(".")[1].partition("_")[0]
    extra = "tensorflow" if framework == "keras" else framework
    package = f"onward[{extra}]" if _HOME[name].startswith("convert.") or error.name == "torch" else error.name
    return UnsupportedError(
        f"`onward.{name}` needs `{error.name}`, which is not installed", hint=f"pip install '{package}'"
    )


def __dir__() -> list[str]:
    return sorted(__all__)
