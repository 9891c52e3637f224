"""The formats of checkpoints, a file each."""

from onward.checkpoint.format import Format
from onward.checkpoint.formats import (
    accelerate,
    bundle,
    dcp,
    deepspeed,
    h5_files,
    lightning,
    megatron,
    msgpack_tree,
    nemo,
    ort,
    pytorch,
    raytrain,
    safetensors,
    trainer,
    zarr_tree,
)

FORMATS: tuple[Format, ...] = (
    raytrain.FORMAT,
    deepspeed.FORMAT,
    trainer.FORMAT,
    accelerate.FORMAT,
    megatron.FORMAT,
    dcp.FORMAT,
    ort.FORMAT,
    bundle.FORMAT,
    h5_files.FORMAT,
    safetensors.FOLDER,
    safetensors.FORMAT,
    nemo.FORMAT,
    lightning.FORMAT,
    pytorch.FORMAT,
    zarr_tree.FORMAT,
    msgpack_tree.FORMAT,
)
"""The first that matches a file or folder is what it is taken for: what is more particular stands before."""


def writable() -> dict[str, Format]:
    """The formats that can be written, by all their names."""
    return {name: format for format in FORMATS if format.write for name in (format.name, *format.also)}
