"""The HDF5 files of Keras: groups of arrays, which are places in them, and the variables that these are.

A file has a group of arrays for each layer, under the name of its class, with the name of the layer as an attribute;
which array is the kernel, what is trained, and in which order an optimizer has them is known by class.
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

from onward.checkpoint.pytorch.trees import mapping
from onward.errors import UnsupportedError
from onward.model.storage.containers import Stored
from onward.model.storage.files import blame_file
from onward.model.storage.hdf5 import BFLOAT16, DAMAGED, read_hdf5
from onward.run_state.tensors import ArrayTensor, StoredTensor, Tensor, contiguous_strides
from onward.vocabulary.keras import is_named_after, snake_case

_LARGE = 1 << 16
"""Bytes of an array from which on it is written a part at a time."""

Groups = Mapping[str, Mapping[str, Any]]
"""By path: the attributes of a group, and its arrays."""


def read_h5(path: Path, start: int = 0, length: int | None = None) -> dict[str, dict[str, Any]]:
    """The groups of a file, or of the part of it that begins at `start`; arrays are places in it."""
    with (
        blame_file(f"`{path}` is not a whole HDF5 file of Keras", *DAMAGED),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        groups = read_hdf5(data, start, length)
        for group in groups.values():
            group["arrays"] = {key: _tensor(path, array) for key, array in group["arrays"].items()}
        return groups


def _tensor(path: Path, found: Stored | np.ndarray) -> Tensor:
    if isinstance(found, np.ndarray):
        return ArrayTensor(found)
    return StoredTensor(path, found.offset, found.dtype, found.shape, contiguous_strides(found.shape))


def h5py() -> ModuleType:
    try:
        import h5py
    except ImportError as error:
        raise UnsupportedError("files of Keras are HDF5, which h5py writes", hint="pip install h5py") from error
    return h5py


def write_h5(path: Path, groups: Groups) -> None:
    """Write groups. Large arrays get their place first, and then their elements, a part at a time."""
    library, places = h5py(), []
    early = library.h5p.create(library.h5p.DATASET_CREATE)
    early.set_alloc_time(library.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(library.h5d.FILL_TIME_NEVER)
    with library.File(path, "w") as opened:
        for name, group in groups.items():
            made = opened.require_group(f"/{name}")
            for attribute, value in group["attributes"].items():
                made.attrs[attribute] = value
            for key, tensor in group["arrays"].items():
                is_large = tensor.nbytes > _LARGE
                given = {"shape": tensor.shape, "dtype": tensor.dtype, "dcpl": early}
                written = made.create_dataset(key, **(given if is_large else {"data": tensor.array()}))
                if tensor.dtype == ml_dtypes.bfloat16:
                    written.attrs.update(BFLOAT16)
                if is_large:
                    places.append((written.id.get_offset(), tensor))
    with open(path, "r+b") as file:
        for offset, tensor in places:
            file.seek(offset)
            tensor.write_to(file)


# ---- variables by name and in order ----------------------------------------------------------------------------------


_AFFINE, _CELL = ("kernel", "bias"), ("kernel", "recurrent_kernel", "bias")
_NORM, _SEPARATE = ("gamma", "beta"), ("depthwise_kernel", "pointwise_kernel", "bias")
_CONVOLUTIONS = [f"{kind}{rank}D" for kind in ("Conv", "DepthwiseConv") for rank in (1, 2, 3)]
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
"""What layers train, in order."""
_OTHERS = {"BatchNormalization": ("moving_mean", "moving_variance"), "Normalization": ("mean", "variance", "count")}
"""What they keep beside."""
_SWITCHES = {"bias": "use_bias", "beta": "center", "gamma": "scale"}
"""Variables that a layer may do without, and the setting that says so."""
_RECURRENT = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell",
              **{f"ConvLSTM{rank}D": "ConvLSTMCell" for rank in (1, 2, 3)}}  # fmt: skip
_ATTENTION = ("query_dense", "key_dense", "gate_dense", "value_dense", "output_dense")
PARTS: dict[str, dict[str, str]] = {
    **{kind: {"cell": cell} for kind, cell in _RECURRENT.items()},
    **dict.fromkeys(["MultiHeadAttention", "GroupQueryAttention"], dict.fromkeys(_ATTENTION, "EinsumDense")),
    "Bidirectional": {"forward_layer": "layer", "backward_layer": "layer"},
    "TimeDistributed": {"layer": "layer"},
}
"""Layers that others are made of, in the order in which these have their variables: a class, or a setting with it."""
_MODELS = ("Functional", "Model")
_VARS = "vars"


@dataclasses.dataclass(frozen=True)
class Variable:
    name: str
    group: str
    key: str
    tensor: Tensor
    is_trained: bool
    is_sure: bool
    """Whether its place in the order, and that it is trained or not, is known."""


def variables_of(groups: Groups, config: Mapping[str, Any] | None) -> list[Variable]:
    """The variables of a model in its order. Without a configuration, layers are as the file names them."""
    names = _Names(groups)
    if config is None:
        root = str(groups.get(_VARS, {}).get("attributes", {}).get("name", ""))
        kind = "Sequential" if re.fullmatch(r"sequential(_\d+)?", root) else "Functional"
        return list(names.model("", {"class_name": kind, "config": {"name": root}}, [], True))
    return list(names.model("", config, [], True))


class _Names:
    def __init__(self, groups: Groups):
        self._groups = groups
        self._children: dict[str, list[str]] = {}
        """The groups in a group, but for that of its own arrays."""
        self._filled: set[str] = set()
        """Groups that have arrays somewhere inside."""
        for path, group in sorted(groups.items()):
            around, _, key = path.rpartition("/")
            if key != _VARS and path:
                self._children.setdefault(around, []).append(key)
            while group["arrays"] and path not in self._filled:
                self._filled.add(path)
                path = path.rpartition("/")[0]

    def model(self, path: str, spec: Mapping[str, Any], way: list[str], trains: bool) -> Iterator[Variable]:
        """The layers of a model. One of Keras's functional models builds them by themselves, without its own name."""
        config = mapping(spec.get("config"))
        trains = trains and config.get("trainable") is not False
        named = config.get("name") or self._name(path)
        way = [] if spec.get("class_name") in _MODELS else [*way, str(named)]
        folder = f"{path}/layers".lstrip("/")
        layers = config.get("layers")
        known = [mapping(layer) for layer in layers] if isinstance(layers, list) else None
        taken: dict[str, int] = {}
        for layer in known if known is not None else self._found(folder):
            kind = snake_case(str(layer.get("class_name", "")))
            number = taken.get(kind, -1) + 1
            taken[kind] = number
            place = str(layer.get("place") or f"{folder}/{kind}" + (f"_{number}" if number else ""))
            yield from self._layer(place, layer, way, trains, known is not None)
        if known is None and not self._found(folder):
            yield from self._others(path, way, trains)

    def _found(self, folder: str) -> list[dict[str, Any]]:
        """Layers by what the file has, whose names are those of their classes."""
        classes = {snake_case(kind): kind for kind in (*TRAINED, *PARTS, "Sequential", "Functional")}
        found = []
        for key in self._children.get(folder, ()):
            kind = classes.get(re.sub(r"_\d+$", "", key), "")
            name = self._name(f"{folder}/{key}") or key
            found.append({"class_name": kind, "config": {"name": name}, "place": f"{folder}/{key}"})
        return found

    def _name(self, place: str) -> str:
        """Of a layer, as the file has it."""
        return str(self._groups.get(f"{place}/{_VARS}".lstrip("/"), {}).get("attributes", {}).get("name", ""))

    def _layer(
        self, place: str, spec: Mapping[str, Any], way: list[str], trains: bool, is_sure: bool
    ) -> Iterator[Variable]:
        config, kind = mapping(spec.get("config")), str(spec.get("class_name", ""))
        if f"{place}/layers" in self._groups:
            yield from self.model(place, spec, way, trains)
            return
        trains = trains and config.get("trainable") is not False
        named = str(self._name(place) or config.get("name") or place.rpartition("/")[2])
        kind = kind or next((known for known in TRAINED if is_named_after(named, known)), "")
        way = [*way, named]
        yield from self._own(place, kind, config, way, trains, is_sure)
        parts = PARTS.get(kind, {})
        children = [child for child in self._children.get(place, ()) if f"{place}/{child}" in self._filled]
        order = sorted(children, key=lambda child: _index(list(parts), child.lstrip("_")))
        sure = is_sure and (len(children) < 2 or all(child.lstrip("_") in parts for child in children))
        for child in order:
            inner = parts.get(child.lstrip("_"), "")
            given = {"class_name": inner, "config": config} if inner in TRAINED else mapping(config.get(inner))
            own = {**given, "config": {**mapping(given.get("config")), "name": child, "trainable": trains}}
            yield from self._layer(f"{place}/{child}", own, way, trains, sure)

    def _own(
        self, place: str, kind: str, config: Mapping[str, Any], way: list[str], trains: bool, is_sure: bool
    ) -> Iterator[Variable]:
        arrays = self._groups.get(f"{place}/{_VARS}", {}).get("arrays", {})
        trained = [name for name in TRAINED.get(kind, ()) if config.get(_SWITCHES.get(name, "")) is not False]
        names = [*trained, *_OTHERS.get(kind, ())]
        known = kind in TRAINED and len(names) == len(arrays)
        for at, key in enumerate(sorted(filter(str.isdecimal, arrays), key=int)):
            name = names[at] if known else key
            learns = trains and (not known or at < len(trained))
            yield Variable("/".join([*way, name]), f"{place}/{_VARS}".lstrip("/"), key, arrays[key], learns, is_sure)

    def _others(self, path: str, way: list[str], trains: bool) -> Iterator[Variable]:
        """A model that is a class of its own: layers are under the names of its attributes, in no order."""
        yield from self._own(path, "", {}, way, trains, False)
        for child in self._children.get(path, ()):
            if child != "optimizer":
                yield from self._layer(f"{path}/{child}".lstrip("/"), {}, way, trains, False)


def _index(names: list[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
