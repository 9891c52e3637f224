"""Model and weights that all contenders start from: `python -m workloads.on_torch.export WORKLOAD FOLDER`."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

from workloads import LAYERS, MODEL, WEIGHTS, WORKLOADS, Workload
from workloads.on_torch import MODELS


def export(workload: Workload, folder: Path) -> None:
    """Write the weights, and the model as an ONNX file.

    The export is not optimized: folding normalizations into convolutions would make another model to train.
    """
    torch.manual_seed(0)
    module = MODELS[workload.model]().eval()
    with torch.no_grad():  # the exporter merges equal tensors, such as biases of zeros
        for parameter in module.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    example = torch.from_numpy(workload.batches()[0][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.onnx.export(
            module, (example,), folder / MODEL, input_names=["x"], output_names=["logits"],
            dynamo=True, verbose=False, optimize=False,
        )  # fmt: skip
        logging.disable(logging.NOTSET)
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    if workload.adapters:
        from workloads.on_onward import initial_adapters

        weights |= initial_adapters(workload.adapters, folder)
    np.savez(folder / WEIGHTS, **weights)


if __name__ == "__main__":
    export((WORKLOADS | LAYERS)[sys.argv[1]], Path(sys.argv[2]))
