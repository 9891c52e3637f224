"""onnxruntime-training 1.19: its flatbuffers, and its graphs as models again."""
