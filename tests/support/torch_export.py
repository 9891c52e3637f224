"""PyTorch's two exporters: that of torch.export, and the one that traces, which files in the wild are from.

`axes` says of an input which of its first axes may vary, one letter each.
"""

import contextlib
import inspect
import io
import logging
import warnings

import onnx
import torch


@contextlib.contextmanager
def quiet():
    """Exporters have much to say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def by_dynamo(module, inputs, axes, output="loss", opset=None):
    """Unoptimized: the exporter's optimizer merges parameters that are equal, and transposes or folds others away."""
    dynamic = {name: dict.fromkeys(range(len(letters)), torch.export.Dim.DYNAMIC) for name, letters in axes.items()}
    shapes = tuple(dynamic.get(name) for name in inputs)
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(module.forward).parameters.values()):
        shapes = (shapes,)
    return torch.onnx.export(
        module, tuple(inputs.values()), dynamo=True, verbose=False, optimize=False, opset_version=opset,
        input_names=list(inputs), output_names=[output], dynamic_shapes=shapes if axes else None,
    ).model_proto  # fmt: skip


def by_torchscript(module, inputs, axes, output="loss", opset=None):
    file = io.BytesIO()
    torch.onnx.export(
        module, tuple(inputs.values()), file, dynamo=False, verbose=False, do_constant_folding=False,
        opset_version=opset, input_names=list(inputs), output_names=[output], training=torch.onnx.TrainingMode.PRESERVE,
        dynamic_axes={name: dict(enumerate(letters)) for name, letters in axes.items()},
    )  # fmt: skip
    return onnx.load_from_string(file.getvalue())
