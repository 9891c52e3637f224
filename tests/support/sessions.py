"""Sessions of ONNX Runtime for tests: silent, and with one thread, since more have nothing to do but wait."""

from collections.abc import Mapping
from typing import Any

import onnx
import onnxruntime as ort

from onward.model import Model


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model: Model, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a model, which is valid."""
    proto = model.to_proto()
    onnx.checker.check_model(proto, full_check=True)
    loaded = session(proto)
    names = [value.name for value in loaded.get_outputs()]
    return dict(zip(names, loaded.run(None, {v.name: feeds[v.name] for v in loaded.get_inputs()}), strict=True))
