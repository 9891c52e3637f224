"""Sessions of ONNX Runtime for tests: silent, and with one thread, since more have nothing to do but wait."""

import onnx
import onnxruntime as ort


def session(proto: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
