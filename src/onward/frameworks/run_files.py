"""Runs as files of other frameworks, and back, for `onward convert`.

The written files need no Onward. Files that are read are never executed: their state fills a
training model. `load_into` writes results into objects of a user, reads them again as `from_*`
does, and refuses objects that are then not the training model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnsupportedError, list_names
from onward.frameworks.inference import open_parameters
from onward.frameworks.program.source_text import program_beside
from onward.model import Model, Source, load
from onward.model.state import STEP, states
from onward.model.storage.files import reason, regular
from onward.run_state.completeness import differences
from onward.run_state.problems import Problems
from onward.run_state.standard_steps import adopt
from onward.run_state.state import RunState
from onward.run_state.training_models import from_training_model, only_step_of, to_training_model
from onward.transform.opset import of_one_opset

Framework = Literal["torch", "keras", "jax", "tensorflow"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


ENDINGS: dict[Framework, str] = {"torch": ".pt", "keras": ".keras", "jax": "", "tensorflow": ""}
"""Suffix of the state file, or none for a folder."""


def written_paths(framework: Framework, path: Path) -> list[Path]:
    """Return the paths that are written for a run: a file and its program, or a folder."""
    return [path, program_beside(path)] if ENDINGS[framework] else [path]


def write(model: Model, framework: Framework, path: Path) -> list[Path]:
    """Write the run of a training model for a framework, and return the paths."""
    paths: list[Path] = _files_of(framework).write(_with_known_names(framework, of_one_opset(model)), path)
    return paths


def restore(framework: Framework, path: Path, like: Model | None = None) -> Model:
    """Return the training model, or the inference model, `like` with the state of a framework's files."""
    try:
        if not path.is_dir():
            regular(path)
    except (OSError, ValueError) as error:
        raise InvalidModelError(f"could not read `{path}`: {reason(error)}") from error
    files = _files_of(framework)
    if like is not None and not like.steps:
        like, _ = open_parameters(like)
    if like is None and framework != "tensorflow":
        raise UnsupportedError(
            f"`{path}` holds the state of a run, but no graph",
            hint="give its training model: `--like training.onnx`",
        )
    model: Model = files.restore(path, None if like is None else _with_known_names(framework, like))
    return model


def _with_known_names(framework: Framework, model: Model) -> Model:
    """Return the model with state names that converters know. TensorFlow executes any step."""
    return model if framework == "tensorflow" else adopt(model)


def _files_of(framework: Framework) -> Any:
    try:
        return importlib.import_module(f"onward.frameworks.{framework}.program")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("onward"):
            raise
        extra = "tensorflow" if framework == "keras" else framework
        raise UnsupportedError(
            f"this needs `{error.name}`, which is not installed", hint=f"pip install 'onward[{extra}]'"
        ) from error


def recognize(path: Path) -> Framework | None:
    """Return the framework of a file or folder, judged by its name and content."""
    if path.is_dir():
        return "tensorflow" if (path / "saved_model.pb").exists() else "jax"
    return next((name for name, ending in ENDINGS.items() if ending and path.suffix == ending), None)


def with_state(like: Model, state: Mapping[str, np.ndarray], of: str) -> Model:
    """Return a copy of a training model with other state, and refuse names that it lacks.

    `of` is the source of the values, such as a path.
    """
    model, problems = like.copy(), Problems(f"the state of `{of}`")
    tensors = tensors_of(model, state)
    compare(problems, state, tensors)
    problems.refuse()
    check_numbers(problems, state, tensors)
    problems.refuse()
    for name, array in state.items():
        model.set(name, array)
    return model


def tensors_of(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """Return the tensors of these names that a training model has."""
    tensors = {}
    for name in names:
        with contextlib.suppress(LookupError):
            tensors[name] = model.initializer(name).const_value
    return tensors


def compare(problems: Problems, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Note differences between tensors of a file and of a training model."""
    for name in {**theirs, **ours}:
        if name not in theirs or name not in ours:
            problems.add(f"{'the training model' if name not in theirs else 'it'} has no `{name}`", OTHER)
        elif _type_and_shape(ours[name]) != _type_and_shape(theirs[name]):
            problems.add(f"`{name}` is {_type_and_shape(ours[name])}, not {_type_and_shape(theirs[name])}", OTHER)


def check_numbers(problems: Problems, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Note NaN and infinite elements, and negative counts."""
    for name, tensor in ours.items():
        if not _is_finite(tensor) and _is_finite(theirs[name]):
            problems.add(f"`{name}` has infinite or NaN elements", "restore an earlier state")
    if STEP in ours and int(ours[STEP]) < 0:
        problems.add(f"it has made {int(ours[STEP])} updates", OTHER)


def _is_finite(tensor: Any) -> bool:
    array = np.asarray(tensor.numpy() if isinstance(tensor, ir.TensorProtocol) else tensor)
    return array.dtype.kind in "biuSUO" or bool(np.isfinite(array.astype(np.float64)).all())


def _type_and_shape(tensor: Any) -> str:
    """Return the type and shape of a tensor of any framework."""
    dtype = tensor.dtype.numpy() if isinstance(tensor.dtype, ir.DataType) else tensor.dtype
    return f"{str(dtype).removeprefix('torch.')}{list(tensor.shape)}"


OTHER = "give the training model of this run"


# ---- objects of a user -----------------------------------------------------------------------------------------------


@checked(types=False)
def load_into(
    target: Any, training: Source, *, optimizer: Any = None, scheduler: Any = None, statistics: Any = None
) -> Any:
    """Put the results of a training model into your own objects, and return them.

        onward.load_into(module, "trained.onnx", optimizer=optimizer)              # PyTorch, in place
        params, opt_state = onward.load_into(params, "trained.onnx", optimizer=tx)    # JAX: new trees

    The run then continues there with the same losses. Objects and training model must come from
    one another: names are those of `from_torch`, `from_keras`, `from_jax` or `from_tensorflow`.
    Nothing is changed unless all of it fits.

    - `target`: a `torch.nn.Module`, Keras model or `tf.Module`, changed in place; a module of Flax
      NNX, changed in place; a `TrainState` of Flax linen or a tree of parameters, such as an
      Equinox module, which are returned with new values
    - `training`: a training model
    - `optimizer`: the optimizer of the loop, with the settings of the training model: of
      `torch.optim`, of Keras, of optax, or an `nnx.Optimizer`. A compiled Keras model and a
      `TrainState` have theirs (default: load weights only)
    - `scheduler`: the scheduler of PyTorch
    - `statistics`: for JAX, the tree of arrays that the loss changes

    With an optax optimizer or statistics, returns a tuple: parameters, then `opt_state`, then
    statistics.
    """
    model = adopt(of_one_opset(load(training)))
    index = only_step_of(model)
    name = _framework_of(target)
    for option, value, frameworks in (("scheduler", scheduler, ("torch",)), ("statistics", statistics, ("jax",))):
        if value is not None and name not in frameworks:
            raise UnsupportedError(f"a target of {name} takes no `{option}`", hint=f"leave out `{option}`")
    results = TrainedResults(model, from_training_model(model, index, forward=False))
    options = {"scheduler": scheduler} if name == "torch" else {"statistics": statistics} if name == "jax" else {}
    return importlib.import_module(f"onward.frameworks.{name}.forward").load_into(
        target, results, optimizer=optimizer, **options
    )


def _framework_of(target: Any) -> str:
    roots = {base.__module__.partition(".")[0] for base in type(target).__mro__}
    return next((name for name in ("torch", "keras", "tensorflow") if name in roots), "jax")


@dataclasses.dataclass(frozen=True)
class TrainedResults:
    """Training model and its run."""

    model: Model
    run: RunState

    def arrays(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Return the tensors of the model for objects with these names and shapes.

        Raises: UnsupportedError if a trained tensor is missing, or a shape differs.
        """
        changed = [state.name for state in states(self.model) if state.role in ("parameter", "statistics")]
        if missing := [name for name in changed if name not in shapes]:
            raise UnsupportedError(
                f"the target has no {list_names(missing, 3)}, which the training model trains",
                hint=f"give the objects that it was captured from; these have {list_names([*shapes], 3)}",
            )
        initializers = self.model.graph.initializers
        arrays = {name: self.model.array(name) for name in shapes if name in initializers}
        for name, array in arrays.items():
            if array.shape != tuple(shapes[name]):
                raise UnsupportedError(
                    f"`{name}` has the shape {list(shapes[name])}, and {list(array.shape)} in the training model",
                    hint="give the objects that it was captured from",
                )
        return arrays

    def confirm(self, again: RunState) -> None:
        """Refuse an optimizer that was read again and differs: in settings, schedule or state."""
        anything = [{v.name: "mse"} for v in self.run.model.outputs if v.dtype and v.dtype.is_floating_point()]
        fields = {key: getattr(again, key) for key in ("groups", "schedule", "clip", "recipe")}
        other = to_training_model(dataclasses.replace(self.run, **fields, state={}, loss=anything, step=again.step))
        wrong = [name for name in differences(self.model, 0, other, forward=False) if not name.startswith("the metric")]
        if wrong:
            raise _unlike(wrong, "settings")
        both = {**self.run.state, **again.state}
        wrong = [f"`{name}`" for name in both if not _same(self.run.state.get(name), again.state.get(name))]
        if wrong or self.run.step != again.step:
            raise _unlike(wrong or ["the count of updates"], "state")


def _unlike(names: Iterable[str], what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer has other {what} for {', '.join([*names][:3])}",
        hint="create it with the settings of the training model, which `onward show` lists",
    )


def _same(ours: Any, theirs: Any) -> bool:
    """True if a slot is the same. A missing slot is one of zeros."""
    if ours is None or theirs is None:
        return not np.any(ours if theirs is None else theirs)
    return np.shape(ours) == np.shape(theirs) and bool(np.allclose(ours, theirs, rtol=1e-6, atol=0, equal_nan=True))
