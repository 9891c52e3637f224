"""Bytes of model files: parse hostile input, check external data, write crash-safe.

Here, protobuf and `onnx_ir` graphs are only containers of tensors.

A save creates new files beside the model. Renaming the new `.onnx` over the old one is the commit:
before it the old model is whole, after it the new one is. Data files of the old one are deleted
last.
"""

from onward.model.storage.checksums import verify_checksums
from onward.model.storage.external import Fault, bits_of, check_external, external_faults, walk_tensors
from onward.model.storage.opening import folder_of, open_model, parse_proto, read_proto
from onward.model.storage.save import External, data_files_of, form_of, goes_outside, save
from onward.model.storage.tensor_sites import Container, TensorSite, describe_tensor, hold_data, is_external, sites
from onward.model.storage.transaction import write_file

__all__ = [
    "Container",
    "External",
    "Fault",
    "TensorSite",
    "bits_of",
    "check_external",
    "data_files_of",
    "describe_tensor",
    "external_faults",
    "folder_of",
    "form_of",
    "goes_outside",
    "hold_data",
    "is_external",
    "open_model",
    "parse_proto",
    "read_proto",
    "save",
    "sites",
    "verify_checksums",
    "walk_tensors",
    "write_file",
]
