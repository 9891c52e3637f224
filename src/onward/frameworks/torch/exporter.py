"""PyTorch's exporter: configured, silenced, and with errors that suggest what to do."""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import logging
import re
import sys
import sysconfig
import traceback
import unittest.mock
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from onward.build import Names
from onward.errors import DataError, Error, UnknownNameError, UnsupportedError, first_line, suggest_or_list, warn
from onward.frameworks.randomness import refuse_random_draws
from onward.frameworks.torch.arguments import Flat
from onward.frameworks.torch.rewrites import rewrite
from onward.frameworks.torch.sequences import give_lengths, traceable_sequences
from onward.frameworks.torch.translations import CHANGE, CTC, define_functions, translations_for
from onward.lowering.runtime import widen_node
from onward.model import Model


class FixedSizeError(UnsupportedError):
    """An axis of any size that can have one size only, other than 1."""


def explain(error: Exception, subject: str = "the module") -> UnsupportedError:
    """Return an error that suggests what to do about a failure of the exporter."""
    causes = _causes(error)
    line = _user_line(causes)
    frames = (frame for cause in causes for frame, _ in traceback.walk_tb(cause.__traceback__))
    if any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values()):
        return UnsupportedError(
            "the module packs sequences (`pack_padded_sequence`), which a graph cannot",
            hint="run over padded sequences, and mask the padding in the result",
        )
    if any(isinstance(cause, GuardOnDataDependentSymNode) for cause in causes):
        return UnsupportedError(
            f"the forward pass branches on values of tensors ({line or first_line(error)}), which a graph cannot",
            hint="choose by `torch.where`, or write both branches with `torch.cond`",
        )
    where = f" ({line})" if line else ""
    if names := [match[1] for cause in causes for match in _MISSING.finditer(str(cause))]:
        return UnsupportedError(
            f"ONNX has no operators for `{names[0]}` of PyTorch, which {subject} calls",
            hint="compute it by other operations, or outside of the module, and pass it as an input",
        )
    unwritten = next((cause for cause in causes if isinstance(cause, NotImplementedError) and _is_ours(cause)), None)
    if unwritten is not None:
        return UnsupportedError(
            f"{subject} calls {unwritten}, which is not carried over", hint="compute it by other operations"
        )
    if raised := next(
        (cause for cause in causes if _is_users(traceback.extract_tb(cause.__traceback__)[-1].filename)), None
    ):
        return UnsupportedError(
            f"{subject} fails while it is traced, where sizes are symbols: {first_line(raised)}{where}",
            hint="fix all sizes: `dynamic_shapes={}`; and let no Python code depend on values of tensors",
        )
    return UnsupportedError(
        f"PyTorch cannot trace {subject}" + (f" at this line: {line}" if line else ""),
        hint="fix all sizes: `dynamic_shapes={}`; see PyTorch's own message: "
        "`torch.onnx.export(module, example_inputs, dynamo=True, optimize=False)`",
    )


_MISSING = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


def _is_ours(error: BaseException) -> bool:
    """True if a translation of Onward raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(last.filename).is_relative_to(_PACKAGES[1])


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return causes


def fault_of_example(flat: Flat) -> DataError | None:
    """Return an error if the module itself fails with the example."""
    try:
        with torch.random.fork_rng():
            copy.deepcopy(flat)(*flat.inputs.values())
    except Exception as error:
        inputs = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in flat.inputs.items()}
        shown = ", ".join(f"`{name}` {description}" for name, description in inputs.items())
        return DataError(
            f"the module fails with the example: {first_line(error)}",
            hint=f"check shapes and types of the example: {shown}",
        )
    return None


def _user_line(causes: Sequence[BaseException]) -> str:
    """Return the last line of the user's code in the traceback of an error or its causes, or ""."""
    return _last_user_line([frame for cause in causes for frame in traceback.extract_tb(cause.__traceback__)])


def _last_user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in frames if _is_users(frame.filename)]
    in_files = [frame for frame in own if not frame.filename.startswith("<")]  # `<string>`: generated by a library
    return next((f"{frame.filename}, line {frame.lineno}" for frame in (in_files or own)[-1:]), "")


_PACKAGES = [Path(str(torch.__file__)).parent, Path(__file__).parents[2]]
"""Folders of the packages of PyTorch and Onward."""
_LIBRARY = Path(sysconfig.get_path("stdlib"))


def _is_users(filename: str) -> bool:
    """True if a file is not of Onward, PyTorch or Python's standard library."""
    path = Path(filename)
    of_python = path.is_relative_to(_LIBRARY) and "site-packages" not in path.relative_to(_LIBRARY).parts
    return not of_python and not any(path.is_relative_to(home) for home in _PACKAGES)


_READS = (
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.item, torch.Tensor.tolist),
    *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.is_nonzero),
)
"""Functions that return Python's values of tensors."""


class Readings(TorchFunctionMode):  # type: ignore[misc]
    """Mode that remembers which truth values and integers a module reads from tensors, and where."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, list[Any]] = {}
        self.lines: dict[str, None] = {}
        """Lines at which an example decided."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _READS:
            self._values.setdefault(_last_user_line(traceback.extract_stack()), []).append(result)
        return result

    def replay(self) -> Callable[[], Any]:
        """Return a function that returns the value read next at this line, or None for a float."""
        values = {line: iter(values) for line, values in self._values.items()}

        def read() -> Any:
            line = _last_user_line(traceback.extract_stack())
            value = next(values.get(line, iter(())), None)
            if value is None or np.asarray(value).dtype.kind == "f":
                return None
            self.lines[line] = None
            return value

        return read


class Traceable(TorchFunctionMode):  # type: ignore[misc]
    """Mode that replaces what the exporter cannot trace.

    `torch.rand(()) < 0` is False, as in layer drop with probability 0. The exporter takes it for a branch on values.
    """

    def __init__(self, readings: Readings | None = None) -> None:
        super().__init__()
        self._read = readings.replay() if readings is not None else None
        self._drawn: dict[int, torch.Tensor] = {}
        self._selected: dict[int, tuple[torch.Tensor, ...]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_comparison = function is torch.Tensor.lt and id(args[0]) in self._drawn
        if is_comparison and isinstance(args[1], int | float) and args[1] <= 0:
            return False
        if function is F.l1_loss:
            _refuse_weight()
        if function is F.ctc_loss:
            return self._ctc(*args, **(kwargs or {}))
        if function is F.instance_norm:
            return _instance_norm(*args, **(kwargs or {}))
        if self._read is not None and function in _READS and (value := self._read()) is not None:
            return value
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and result.ndim == 0:
            self._drawn[id(result)] = result  # so that its id is not used again
        if function in (torch.Tensor.masked_select, torch.masked_select) and len(args) == 2:
            self._selected[id(result)] = (*args, result)
        return result

    def _ctc(
        self,
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        lengths, counts = (torch.as_tensor(x).reshape(-1) for x in (input_lengths, target_lengths))
        batched = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
        losses = CTC(batched, self._rows(targets, counts), lengths, counts, blank)
        if zero_infinity:
            losses = torch.where(losses.isinf(), 0.0, losses)
        if reduction == "mean":
            return (losses / counts.clamp(min=1).to(losses)).mean()
        return losses.sum() if reduction == "sum" else losses.reshape(log_probs.shape[1:-1])

    def _rows(self, targets: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return labels with a row for each sequence."""
        if targets.ndim == 2:
            return targets
        labels, mask, _ = self._selected.get(id(targets), (targets, None, None))
        if mask is not None and labels.ndim == 2 and labels.shape == mask.shape:
            return labels.gather(1, torch.argsort(torch.where(mask, 0, 1), dim=1, stable=True))
        positions = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(targets.shape[0])
        return targets[positions.clamp(max=targets.shape[0] - 1)]


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalize each sample, with the updates of running statistics that the exporter drops."""
    if running_mean is not None and running_var is not None:
        if not use_input_stats:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        moments = torch.var_mean(input.detach(), tuple(range(2, input.ndim)))
        for running, own in zip((running_var, running_mean), moments, strict=True):
            running.mul_(1 - momentum).add_(own.mean(0), alpha=momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """Let `len(x)` of a traced tensor be its dynamic size, which Python's own would make constant."""
    before = builtins.len

    def length(x: Any, /) -> Any:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.ndim and type(x.shape[0]) is not int else before(x)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = before


def _refuse_weight() -> None:
    """Refuse the `weight` of an `l1_loss` on the stack. PyTorch does not pass it to modes.

    Its exporter and our comparison use modes, so both would drop it.
    """
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is F.l1_loss.__code__ and frame.f_locals.get("weight") is not None:
            raise UnsupportedError(
                "PyTorch drops the `weight` of `l1_loss` while it traces",
                hint="write it out: `((x - y).abs() * weight).sum() / weight.sum()`",
            )


_NOISE = ("pkg.torch.onnx.stack_trace", "pkg.torch.onnx.fx_node")
"""Metadata of nodes with source code of the module and local paths."""
_NORMALIZATIONS = ("GroupNormalization", "InstanceNormalization", "LayerNormalization")


def export(
    flat: Flat, dynamic_shapes: Mapping[str, Any] | None, what: str = "the module", may_be_fixed: Collection[str] = ()
) -> tuple[Model, list[str]]:
    """Return the graph of a module, and the buffers that its forward pass changes.

    The graph is not optimized, which would merge equal parameters. `what` names the module in
    errors. Sizes of the inputs `may_be_fixed` may be constant though they are named.
    """
    for name in dynamic_shapes or ():
        if name not in flat.inputs:
            raise UnknownNameError(f"{what} has no input `{name}`", hint=suggest_or_list(name, flat.inputs))
    axes: dict[str, dict[int, Any]] = {}
    for name, tensor in flat.inputs.items():
        sizes: Any = {0: "batch"} if tensor.ndim and dynamic_shapes is None else (dynamic_shapes or {}).get(name) or {}
        axes[name] = dict(sizes.items() if isinstance(sizes, Mapping) else enumerate(sizes))
    dims = [{axis: Dim.AUTO if isinstance(size, str) else size for axis, size in axes[name].items()} for name in axes]
    with _exporting(what, flat):
        with refuse_random_draws(what):
            program, lines = _trace(flat, tuple(dims))
        rewrite(program)
        if any(node.target is torch.ops.onward.change.default for node in program.graph.nodes):
            raise UnsupportedError(
                f"{what} has an autograd function whose `backward` is not linear in the gradient",
                hint="clip or change gradients in the training loop, after `loss.backward()`",
            )
        translations = translations_for(program)
        onnx_program = _to_onnx(program, input_names=list(flat.inputs), custom_translation_table=translations)
    for line in lines:
        warn(f"{what} branches on values of tensors ({line}): the example decides, for all batches")
    program = onnx_program.exported_program
    model = Model(onnx_program.model)
    define_functions(model)
    give_lengths(model)
    # Not the exporter, which merges equal values: `prepare` would undo that.
    model.ir.producer_name, model.ir.producer_version = "onward", None
    _name_axes(model, axes)
    _widen_normalizations(model)
    _name_outputs(model, program.call_spec.out_spec.context)
    varying = {name: {} if name in may_be_fixed else sizes for name, sizes in axes.items()}
    _check_axes(model, varying, what, all_must_vary=dynamic_shapes is not None)
    for node in model.graph.all_nodes():
        for key in _NOISE:
            node.metadata_props.pop(key, None)
    return model, list(program.graph_signature.buffers_to_mutate.values())


def _trace(flat: Flat, dims: tuple[Any, ...]) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Trace a module. Return also the lines that branch on values of tensors, where the example decides.

    Models of transformers compute other masks when they are traced, with which some of them fail.
    """
    try:
        return _trace_with_example(flat, dims)
    except Exception as error:
        if not any(type(layer).__module__.startswith("transformers.") for layer in flat.modules()):
            raise
        failure = error
    try:
        with _untraced():
            return _trace_with_example(flat, dims)
    except Exception as error:
        failure = error if _depends_on_values(error) else failure
    raise failure


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Let modules of transformers compute what they do when they are not traced."""
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]:
            for name in _ASKS & vars(module).keys():
                stack.enter_context(unittest.mock.patch.object(module, name, lambda *_: False))
        yield


_ASKS = {"is_torchdynamo_compiling", "is_torchdynamo_exporting", "is_tracing"}


def _to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Return a module that has this type and device already. The exporter cannot replace its tensors by themselves."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    tensors = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    if all(dtype in (None, x.dtype) and device in (None, x.device) for x in tensors):
        return module
    return _MODULE_TO(module, *args, **kwargs)


_MODULE_TO = torch.nn.Module.to


def _trace_with_example(flat: Flat, dims: tuple[Any, ...]) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Trace a module; the example decides where it branches on values of tensors."""

    def trace(readings: Readings | None = None) -> torch.export.ExportedProgram:
        # PyTorch prints graphs that it cannot complete.
        silence = contextlib.redirect_stderr(io.StringIO())
        moves = unittest.mock.patch.object(torch.nn.Module, "to", _to)
        with silence, moves, Traceable(readings), symbolic_lengths(), traceable_sequences(), _own_derivatives():
            return torch.export.export(flat, tuple(flat.inputs.values()), dynamic_shapes=(dims,), strict=False)

    try:
        return trace(), []
    except Exception as error:
        if not _depends_on_values(error):
            raise
    readings = Readings()
    with readings, torch.no_grad():
        copy.deepcopy(flat)(*flat.inputs.values())
    try:
        program = trace(readings)
    except Exception as error:
        if not _depends_on_values(error):
            raise

        def decide(*_: Any) -> None:
            readings.lines[_last_user_line(traceback.extract_stack())] = None

        with (
            torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True),
            unittest.mock.patch.object(ShapeEnv, "_log_real_tensor_propagation", decide),
        ):
            program = trace(readings)
    return program, list(readings.lines)


@contextlib.contextmanager
def _own_derivatives() -> Iterator[None]:
    """Replace functions that define `backward` by operators with the same derivative."""
    apply = torch.autograd.Function.apply

    def replaced(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_operator = function.__name__.startswith("GeneratedBackwardFor_")  # of torch.library, translated or refused
        is_counted = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if is_operator or not is_counted:
            return apply.__func__(function, *args, **kwargs)
        try:
            return _with_derivative(function, *args)
        except Exception as error:
            line = _last_user_line(traceback.extract_stack())
            raise UnsupportedError(
                f"no graph has the derivative that `{function.__name__}` defines" + (f" ({line})" if line else ""),
                hint="call operations of PyTorch in its place; a part without gradient is `x.detach()`",
            ) from error

    with unittest.mock.patch.object(torch.autograd.Function, "apply", classmethod(replaced)):
        yield


def _with_derivative(function: Any, *args: Any) -> Any:
    """Return the result y of an autograd function as y + J (x - x), where only the last x has a gradient.

    `backward` computes Jᵀg. J u is the gradient of (Jᵀg) u by g, and does not depend on g.
    """
    context = _Context([isinstance(x, torch.Tensor) and x.requires_grad for x in args])
    with torch.no_grad():
        if function.setup_context is torch.autograd.function._SingleLevelFunction.setup_context:
            result = function.forward(context, *args)
        else:
            result = function.forward(*args)
            function.setup_context(context, args, result)
    results = list(result) if isinstance(result, tuple) else [result]
    smooth = [
        i
        for i, y in enumerate(results)
        if isinstance(y, torch.Tensor) and y.is_floating_point() and not any(y is x for x in context.constants)
    ]
    gradients = [CHANGE(y.detach()).requires_grad_() if i in smooth else None for i, y in enumerate(results)]
    with torch.enable_grad():
        pulled = function.backward(context, *gradients)
        pulled = pulled if isinstance(pulled, tuple) else (pulled,)
        pairs = [
            (back, x - x.detach())
            for back, x, is_needed in zip(pulled, args, context.needs_input_grad, strict=False)
            if is_needed and back is not None
        ]
        backs, changes = zip(*((back, change) for back, change in pairs if back.requires_grad), strict=True)
        pushed = torch.autograd.grad(
            backs, [gradients[i] for i in smooth], changes, create_graph=True, allow_unused=True
        )
    for i, change in zip(smooth, pushed, strict=True):
        y = results[i].detach()
        results[i] = y if change is None else y + change
    return tuple(results) if isinstance(result, tuple) else results[0]


class _Context:
    """Context that `forward` of an autograd function leaves to its `backward`."""

    def __init__(self, needs_input_grad: Sequence[bool]):
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Any, ...] = ()
        self.constants: tuple[Any, ...] = ()
        """Results without a gradient."""

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in tensors)

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.constants = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _depends_on_values(error: Exception) -> bool:
    return any(isinstance(cause, GuardOnDataDependentSymNode) for cause in _causes(error))


class _Function(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self._function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._function(*tensors)


def export_function(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], what: str) -> Model:
    """Export the graph of a function of tensors of these shapes; `what` names it in errors."""
    with _exporting(what):
        with torch.no_grad():
            program = torch.export.export(_Function(function), inputs, strict=False)
        return Model(_to_onnx(program).model)


def _to_onnx(program: torch.export.ExportedProgram, **options: Any) -> Any:
    return torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, **options)


@contextlib.contextmanager
def _exporting(what: str, flat: Flat | None = None) -> Iterator[None]:
    """Silence the exporter and explain its errors. Errors of the module itself come first."""
    with quiet(), torch.random.fork_rng():
        try:
            yield
        except Error:
            raise
        except Exception as error:
            if isinstance(error, StopIteration):  # contextlib would raise it again in place of the explanation
                error = RuntimeError("StopIteration").with_traceback(error.__traceback__)
            raise (fault_of_example(flat) if flat is not None else None) or explain(error, what) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and logs of the exporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


# ---- names -----------------------------------------------------------------------------------------------------------


def free_names(model: Model, names: Collection[str]) -> Names:
    """Rename computed values with one of these names, and return all names in use."""
    names_in_use = model.names()
    names_in_use.take(names)
    for value in [value for node in model.graph.all_nodes() for value in node.outputs]:
        if value.name and value.name in names:
            value.name = names_in_use.fresh(value.name)
    return names_in_use


def _name_outputs(model: Model, names: Sequence[str]) -> None:
    """Rename outputs to the names of the module."""
    used = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    names_in_use = free_names(model, names)
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = names_in_use.fresh(name) if name in used else name


def _name_axes(model: Model, axes: Mapping[str, Mapping[int, Any]]) -> None:
    """Rename variable sizes, which the exporter numbers, and replace symbols that are digits."""
    names: dict[str, str] = {}
    for _, _, dim, name in _named_axes(model, axes):
        if isinstance(dim, ir.SymbolicDim) and dim.value and not dim.value.isdigit():
            names.setdefault(dim.value, name)

    def renamed(dim: int | ir.SymbolicDim) -> int | str | ir.SymbolicDim:
        if isinstance(dim, int) or dim.value is None:
            return dim
        return int(dim.value) if dim.value.isdigit() else re.sub(r"\w+", lambda m: names.get(m[0], m[0]), dim.value)

    for value in (*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)):
        if value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])


def _widen_normalizations(model: Model) -> None:
    """Widen 16-bit normalizations with float32 weights, as PyTorch does: ONNX takes one type."""
    names = model.names()
    for node in list(model.graph.all_nodes()):
        types = {value.dtype for value in node.inputs if value is not None}
        if node.op_type in _NORMALIZATIONS and ir.DataType.FLOAT in types:
            for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                widen_node(node, dtype, names, {})


def _named_axes(
    model: Model, axes: Mapping[str, Mapping[int, Any]]
) -> Iterator[tuple[str, int, int | ir.SymbolicDim, str]]:
    """Yield the input, axis, size and name of axes that the user, or we, named."""
    for value in model.graph.inputs:
        assert value.shape is not None and value.name is not None
        for axis, name in axes[value.name].items():
            if isinstance(name, str):
                yield value.name, axis, value.shape[axis], name


def _check_axes(model: Model, axes: Mapping[str, Mapping[int, Any]], what: str, *, all_must_vary: bool) -> None:
    """Refuse fixed sizes that the user named, or if all axes that we named are fixed."""
    named = list(_named_axes(model, axes))
    fixed = [(name, axis, size) for name, axis, size, _ in named if isinstance(size, int)]
    if fixed and (all_must_vary or len(fixed) == len(named)):
        name, axis, size = fixed[0]
        raise (UnsupportedError if size == 1 else FixedSizeError)(
            f"{what} takes `{name}` only with a size of {size} along axis {axis}",
            hint="use an example in which it is at least 2, or fix all sizes: `dynamic_shapes={}`",
        )
