"""HDF5 files of Keras: groups of arrays, and the variables that these are.

A file has a group of arrays for each layer, named after its class, with the layer's name as an
attribute. The class tells which array is the kernel, which are trained, and their order in an
optimizer.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from onward.checkpoint.pytorch.contents import mapping
from onward.errors import UnsupportedError
from onward.model.storage.files import blame_file
from onward.model.storage.hdf5 import BFLOAT16, DAMAGED, read_hdf5
from onward.run_state.tensors import ArrayTensor, StoredTensor, Tensor, contiguous_strides
from onward.vocabulary.keras import is_named_after, snake_case

_LARGE = 1 << 16
"""Size in bytes from which on an array is written in blocks."""

Groups = Mapping[str, Mapping[str, Any]]
"""Path -> the attributes of a group, and its arrays."""


def read_h5(path: Path, start: int = 0, length: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the groups of a file, or of a section of it. Arrays are locations."""
    with (
        blame_file(f"`{path}` is not a whole HDF5 file of Keras", *DAMAGED),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        groups = read_hdf5(data, start, length)
        for group in groups.values():
            group["arrays"] = {
                key: ArrayTensor(item)
                if isinstance(item, np.ndarray)
                else StoredTensor(path, item.offset, item.dtype, item.shape, contiguous_strides(item.shape))
                for key, item in group["arrays"].items()
            }
        return groups


def h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise UnsupportedError("files of Keras are HDF5, which h5py writes", hint="pip install h5py") from error
    return h5py


def write_h5(path: Path, groups: Groups) -> None:
    """Write groups. Large arrays are allocated first, and their elements written in blocks."""
    library, offsets = h5py(), []
    early = library.h5p.create(library.h5p.DATASET_CREATE)
    early.set_alloc_time(library.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(library.h5d.FILL_TIME_NEVER)
    with library.File(path, "w") as opened:
        for name, group in groups.items():
            created = opened.require_group(f"/{name}")
            for attribute, value in group["attributes"].items():
                created.attrs[attribute] = value
            for key, tensor in group["arrays"].items():
                is_large = tensor.nbytes > _LARGE
                options = {"shape": tensor.shape, "dtype": tensor.dtype, "dcpl": early}
                written = created.create_dataset(key, **(options if is_large else {"data": tensor.array()}))
                if tensor.dtype == ml_dtypes.bfloat16:
                    written.attrs.update(BFLOAT16)
                if is_large:
                    offsets.append((written.id.get_offset(), tensor))
    with open(path, "r+b") as file:
        for offset, tensor in offsets:
            file.seek(offset)
            tensor.write_to(file)


# ---- variables by name and in order ----------------------------------------------------------------------------------


_AFFINE, _CELL = ("kernel", "bias"), ("kernel", "recurrent_kernel", "bias")
_NORM, _SEPARATE = ("gamma", "beta"), ("depthwise_kernel", "pointwise_kernel", "bias")
_CONVOLUTIONS = [f"{class_name}{rank}D" for class_name in ("Conv", "DepthwiseConv") for rank in (1, 2, 3)]
_TRANSPOSED = [f"Conv{rank}DTranspose" for rank in (1, 2, 3)]
TRAINED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(["Dense", "EinsumDense", *_CONVOLUTIONS, *_TRANSPOSED], _AFFINE),
    **dict.fromkeys(["SeparableConv1D", "SeparableConv2D"], _SEPARATE),
    **dict.fromkeys(["LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell"], _CELL),
    **dict.fromkeys(["BatchNormalization", "LayerNormalization", "GroupNormalization"], _NORM),
    "Embedding": ("embeddings",),
    "RMSNormalization": ("scale",),
    "PReLU": ("alpha",),
    "Normalization": (),
}
"""Trainable variables of layers, in order."""
_OTHERS = {"BatchNormalization": ("moving_mean", "moving_variance"), "Normalization": ("mean", "variance", "count")}
"""Other variables of layers."""
_SWITCHES = {"bias": "use_bias", "beta": "center", "gamma": "scale"}
"""Optional variables of a layer -> the setting that includes them."""
_RECURRENT = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell",
              **{f"ConvLSTM{rank}D": "ConvLSTMCell" for rank in (1, 2, 3)}}  # fmt: skip
_ATTENTION = ("query_dense", "key_dense", "gate_dense", "value_dense", "output_dense")
PARTS: dict[str, dict[str, str]] = {
    **{class_name: {"cell": cell} for class_name, cell in _RECURRENT.items()},
    **dict.fromkeys(["MultiHeadAttention", "GroupQueryAttention"], dict.fromkeys(_ATTENTION, "EinsumDense")),
    "Bidirectional": {"forward_layer": "layer", "backward_layer": "layer"},
    "TimeDistributed": {"layer": "layer"},
}
"""Inner layers in the order of their variables -> a class, or the setting with it."""
_MODELS = ("Functional", "Model")
_VARS = "vars"


@dataclasses.dataclass(frozen=True)
class H5Variable:
    name: str
    group: str
    key: str
    tensor: Tensor
    is_trained: bool
    is_sure: bool
    """True if its order, and whether it is trained, is known."""


def variables_of(groups: Groups, config: Mapping[str, Any] | None) -> list[H5Variable]:
    """Return the variables of a model in order. The file names its layers by default."""
    names = _Names(groups)
    if config is None:
        root = str(groups.get(_VARS, {}).get("attributes", {}).get("name", ""))
        class_name = "Sequential" if re.fullmatch(r"sequential(_\d+)?", root) else "Functional"
        return list(names.model("", {"class_name": class_name, "config": {"name": root}}, [], True))
    return list(names.model("", config, [], True))


class _Names:
    def __init__(self, groups: Groups):
        self._groups = groups
        self._children: dict[str, list[str]] = {}
        """Groups in a group, without that of its own arrays."""
        self._filled: set[str] = set()
        """Groups with arrays at any depth."""
        for path, group in sorted(groups.items()):
            parent, _, key = path.rpartition("/")
            if key != _VARS and path:
                self._children.setdefault(parent, []).append(key)
            while group["arrays"] and path not in self._filled:
                self._filled.add(path)
                path = path.rpartition("/")[0]

    def model(self, path: str, spec: Mapping[str, Any], names: list[str], trains: bool) -> Iterator[H5Variable]:
        """Return the variables of a model. Functional models have names without their own."""
        config = mapping(spec.get("config"))
        trains = trains and config.get("trainable") is not False
        name = config.get("name") or self._name(path)
        names = [] if spec.get("class_name") in _MODELS else [*names, str(name)]
        folder = f"{path}/layers".lstrip("/")
        layers = config.get("layers")
        listed = [mapping(layer) for layer in layers] if isinstance(layers, list) else None
        counts: dict[str, int] = {}
        for layer in listed if listed is not None else self._stored_layers(folder):
            class_name = snake_case(str(layer.get("class_name", "")))
            number = counts.get(class_name, -1) + 1
            counts[class_name] = number
            group = str(layer.get("group") or f"{folder}/{class_name}" + (f"_{number}" if number else ""))
            yield from self._layer(group, layer, names, trains, listed is not None)
        if listed is None and not self._stored_layers(folder):
            yield from self._others(path, names, trains)

    def _stored_layers(self, folder: str) -> list[dict[str, Any]]:
        """Return the layers of a file, whose keys are named after their classes."""
        classes = {snake_case(class_name): class_name for class_name in (*TRAINED, *PARTS, "Sequential", "Functional")}
        layers = []
        for key in self._children.get(folder, ()):
            class_name = classes.get(re.sub(r"_\d+$", "", key), "")
            name = self._name(f"{folder}/{key}") or key
            layers.append({"class_name": class_name, "config": {"name": name}, "group": f"{folder}/{key}"})
        return layers

    def _name(self, group: str) -> str:
        return str(self._groups.get(f"{group}/{_VARS}".lstrip("/"), {}).get("attributes", {}).get("name", ""))

    def _layer(
        self, group: str, spec: Mapping[str, Any], names: list[str], trains: bool, is_sure: bool
    ) -> Iterator[H5Variable]:
        config, class_name = mapping(spec.get("config")), str(spec.get("class_name", ""))
        if f"{group}/layers" in self._groups:
            yield from self.model(group, spec, names, trains)
            return
        trains = trains and config.get("trainable") is not False
        name = str(self._name(group) or config.get("name") or group.rpartition("/")[2])
        class_name = class_name or next((candidate for candidate in TRAINED if is_named_after(name, candidate)), "")
        names = [*names, name]
        yield from self._own(group, class_name, config, names, trains, is_sure)
        parts = PARTS.get(class_name, {})
        children = [child for child in self._children.get(group, ()) if f"{group}/{child}" in self._filled]
        position = {name: at for at, name in enumerate(parts)}
        order = sorted(children, key=lambda child: position.get(child.lstrip("_"), len(parts)))
        sure = is_sure and (len(children) < 2 or all(child.lstrip("_") in parts for child in children))
        for child in order:
            inner = parts.get(child.lstrip("_"), "")
            inner_spec = {"class_name": inner, "config": config} if inner in TRAINED else mapping(config.get(inner))
            child_config = {**mapping(inner_spec.get("config")), "name": child, "trainable": trains}
            yield from self._layer(f"{group}/{child}", {**inner_spec, "config": child_config}, names, trains, sure)

    def _own(
        self, group: str, class_name: str, config: Mapping[str, Any], names: list[str], trains: bool, is_sure: bool
    ) -> Iterator[H5Variable]:
        arrays = self._groups.get(f"{group}/{_VARS}", {}).get("arrays", {})
        trained = [name for name in TRAINED.get(class_name, ()) if config.get(_SWITCHES.get(name, "")) is not False]
        own = [*trained, *_OTHERS.get(class_name, ())]
        is_known = class_name in TRAINED and len(own) == len(arrays)
        for at, key in enumerate(sorted(filter(str.isdecimal, arrays), key=int)):
            name = own[at] if is_known else key
            learns = trains and (not is_known or at < len(trained))
            yield H5Variable(
                "/".join([*names, name]), f"{group}/{_VARS}".lstrip("/"), key, arrays[key], learns, is_sure
            )

    def _others(self, path: str, names: list[str], trains: bool) -> Iterator[H5Variable]:
        """Return the variables of a subclassed model: its layers are attributes, without order."""
        yield from self._own(path, "", {}, names, trains, False)
        for child in self._children.get(path, ()):
            if child != "optimizer":
                yield from self._layer(f"{path}/{child}".lstrip("/"), {}, names, trains, False)
