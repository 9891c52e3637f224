"""Trees of JAX in files of Python: pickles, `.npz` with paths as names, and leaves of Equinox."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.contents import executed_names, mapping
from onward.checkpoint.pytorch.pickle_objects import Object
from onward.checkpoint.pytorch.pickle_reader import Maker, read_pickle
from onward.checkpoint.pytree import leaves, nest, with_lists
from onward.checkpoint.pytree.train_states import LEAVES, checkpoint_of_tree
from onward.errors import UnsupportedError
from onward.model.storage.containers import BAD_ZIP
from onward.model.storage.files import blame_file, regular
from onward.run_state.tensors import ArrayTensor, StoredTensor, Tensor, contiguous_strides

_NPY = b"\x93NUMPY"


# ---- pickles and .npz ------------------------------------------------------------------------------------------------


def _is_tree(path: Path) -> bool:
    if path.suffix in (".pkl", ".pickle", ".pdparams") and path.is_file():
        with open(path, "rb") as file:
            return file.read(2)[:1] == b"\x80"
    if path.suffix != ".npz":
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(re.search(r"[/\[]", name) for name in archive.namelist())
    except BAD_ZIP:
        return False


def _read(path: Path) -> Checkpoint:
    regular(path)
    if path.suffix == ".npz":
        with blame_file(f"`{path}` is not a whole .npz file", *BAD_ZIP), np.load(path, allow_pickle=False) as arrays:
            tree = with_lists(nest((_path_of(name), _tensor(arrays[name])) for name in arrays.files))
            return checkpoint_of_tree(path, FORMAT.name, "arrays of numpy", tree)
    pickled = read_pickle(path.read_bytes(), str(path), makers=_MAKERS)
    tree = _plain(pickled)
    if isinstance(pickled, list | tuple):  # `(params, opt_state)`
        tree = dict(zip(map(_key, pickled, tree), tree, strict=True))
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves(tree)):
        raise UnsupportedError(f"`{path}` holds no arrays", hint="save a tree of arrays: `pickle.dump(params, file)`")
    return checkpoint_of_tree(path, FORMAT.name, "pickle", tree, executes=executed_names(pickled))


def _key(item: Any, plain: Any) -> str:
    """Return the usual name of an item of a saved tuple."""
    is_state = any(name.startswith("optax.") for name in executed_names(item))
    return "opt_state" if is_state else "params" if isinstance(plain, Mapping) else "step"


def _path_of(name: str) -> list[str]:
    """Return the keys of a name: `params/dense/kernel`, `['params']['dense']['kernel']`."""
    return re.findall(r"[^\[\]'\"]+", name) if name.startswith("[") else name.split("/")


def _tensor(array: np.ndarray) -> ArrayTensor:
    return ArrayTensor(array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array)


def _array_of_jax(make: Any, arguments: Any, state: Any, *_: Any) -> Any:
    array = make(*arguments)
    array.__setstate__(state)
    return array


_MAKERS: dict[tuple[str, str], Maker] = {
    ("jax._src.array", "_reconstruct_array"): _array_of_jax,
    ("collections", "OrderedDict"): dict,
}

_FIELDS = {
    "ScaleByAdamState": "count mu nu",
    "ScaleByAmsgradState": "count mu nu nu_max",
    "ScaleByBeliefState": "count mu nu",
    "ScaleByLionState": "count mu",
    "ScaleByRmsState": "nu",
    "ScaleByRStdDevState": "mu nu",
    "ScaleByRssState": "sum_of_squares",
    "ScaleByAdaDeltaState": "e_g e_x",
    "FactoredState": "count v_row v_col v",
    "TraceState": "trace",
    "ScaleByScheduleState": "count",
    "MaskedState": "inner_state",
    "PartitionState": "inner_states",
    "InjectStatefulHyperparamsState": "count hyperparams hyperparams_states inner_state",
    "MultiStepsState": "mini_step gradient_step inner_opt_state acc_grads skip_state",
}
"""Fields of optax's named tuples, which pickles store without their names."""


def _plain(node: Any) -> Any:
    """Return a tree without the classes of JAX."""
    if isinstance(node, Object):
        fields, content = _FIELDS.get(node.of.name, "").split(), node.arguments
        if node.of.name == "FrozenDict" and content:
            return _plain(content[0])
        named = zip(fields, content, strict=True) if len(fields) == len(content) else enumerate(content)
        return {str(name): _plain(child) for name, child in named} or _plain(mapping(node.state))
    if isinstance(node, Mapping):
        return {key: _plain(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(child) for child in node]
    return _tensor(np.asarray(node)) if isinstance(node, np.ndarray | np.generic) else node


FORMAT = Format("tree", "tree of arrays", _is_tree, _read)


# ---- Equinox ---------------------------------------------------------------------------------------------------------


def _is_of_equinox(path: Path) -> bool:
    if path.suffix != ".eqx" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_NPY)) == _NPY or (file.seek(0) == 0 and file.readline(1 << 16).endswith(b"}\n"))


def _read_leaves(path: Path) -> Checkpoint:
    """Read leaves, which have numbers instead of names; `with_names_of` names them."""
    with blame_file(f"`{path}` is not a whole file of Equinox", OSError, ValueError, SyntaxError, EOFError):
        tensors = {str(at): tensor for at, tensor in enumerate(_leaves(path))}
    remarks = ("its leaves have no names: they come from the training model that you give",)
    title = "Equinox, leaves"
    return Checkpoint(path=path, format=LEAVES, title=title, tensors=tensors, keeps_order=True, remarks=remarks)


def _leaves(path: Path) -> Iterator[Tensor]:
    size = regular(path).st_size
    with open(path, "rb") as file:
        if file.read(1) == b"{":  # hyper-parameters in the first line
            file.readline()
        else:
            file.seek(0)
        while file.tell() < size:
            version = np.lib.format.read_magic(file)
            length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
            header = ast.literal_eval(file.read(min(length, 1 << 16)).decode("latin-1"))
            dtype, shape = np.dtype(header["descr"]), tuple(map(int, header["shape"]))
            dtype = np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype
            strides = contiguous_strides(shape[::-1])[::-1] if header["fortran_order"] else contiguous_strides(shape)
            tensor = StoredTensor(path, file.tell(), dtype, shape, strides)
            if dtype.hasobject or tensor.end > size:
                raise ValueError("an array is cut off, or not of numbers")
            file.seek(tensor.nbytes, 1)
            yield tensor


EQUINOX = Format(LEAVES, "Equinox, leaves", _is_of_equinox, _read_leaves)
