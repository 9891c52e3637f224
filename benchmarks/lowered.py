"""A lowered step on ONNX Runtime without the rest of the engine, for passes.py and hotspots.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import onnxruntime as ort
from workloads import Workload
from workloads.on_onward import training_model

from onward.kernels import PASSES, library
from onward.lowering.contract import contract_of
from onward.lowering.runtime import for_onnxruntime
from onward.lowering.step import LoweringOptions, lower_for_engine


class LoweredStep:
    """The lowered step of a workload. Each call trains on the next batch and returns the loss.

    The step has native kernels (default: yes), as in the engine.
    """

    def __init__(self, workload: Workload, folder: Path, options: ort.SessionOptions, *, kernels: bool = True):
        model = training_model(workload, folder)
        native = library().path if kernels else None
        lowering_options = LoweringOptions(passes=PASSES if native is not None else None)
        lowered = for_onnxruntime(lower_for_engine(model, options=lowering_options))
        if native is not None:
            options.register_custom_ops_library(str(native))
        contract = contract_of(lowered)
        proto = lowered.to_proto()
        for node in proto.graph.node:
            node.name = node.output[0]
        self.nodes = len(proto.graph.node)
        self.content = proto.SerializeToString(deterministic=True)
        path = folder / "lowered.onnx"  # beside the external data, to which frozen weights refer
        path.write_bytes(self.content)
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        stored = {value.name: value.const_value for value in model.initializers()}
        self._state = {name: ort.OrtValue.ortvalue_from_numpy(stored[name].numpy()) for name in contract.state}
        self._batches = itertools.cycle(workload.batches())
        self._inputs = [value.name for value in self.session.get_inputs()]
        self._outputs = [contract.loss, *contract.update.values()]
        self._updated = list(contract.update)

    def __call__(self) -> float:
        x, labels = (ort.OrtValue.ortvalue_from_numpy(array) for array in next(self._batches))
        feeds = {"x": x, "labels": labels, **self._state}
        loss, *new = self.session.run_with_ort_values(self._outputs, {name: feeds[name] for name in self._inputs})
        self._state |= dict(zip(self._updated, new, strict=True))
        return float(loss.numpy())
