"""Files of adapters, as PEFT writes them: `base_model.model.<module>.lora_A.weight`, [rank, in],
...

A path that ends in `.safetensors` is one file with the configuration in its header, and
`.onnx_adapter` is the format of ONNX Runtime for optional inputs of a model. Any other is a folder
with `adapter_model.safetensors` and `adapter_config.json`, which PEFT reads.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.arguments import checked
from onward.errors import InvalidModelError, UnknownNameError, UnsupportedError, first_line, suggest_or_list
from onward.model import Model, Source, serde
from onward.model.storage import write_file
from onward.model.storage.files import reason, regular
from onward.recipe.layers import Layer
from onward.recipe.lora.adapters import A, Adapter, B, adaptable, adapters, array, attach, by_weight, detach
from onward.recipe.trainable import ADAPTERS
from onward.runtime.devices import to_array
from onward.transform.bodies import return_to_bodies

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<letter>[AB])(?:\.default)?\.weight")
_METADATA = "adapter_config"
_UNSUPPORTED = ("use_dora", "modules_to_save", "layer_replication")


@checked()
def save(model: Source, path: str | os.PathLike[str]) -> Path:
    """Write only the adapters of a model, in the format of PEFT or ONNX Runtime; return the path.

        onward.lora.save(trained, "adapter")

    - `model`: a model with adapters
    - `path`: a folder or one file that ends in `.safetensors`, for PEFT; a file that ends in
      `.onnx_adapter`, for ONNX Runtime with the model of `onward.lora.as_inputs`
    """
    source, target = serde.load(model), Path(path)
    to_save = adapters(source)
    if not to_save:
        raise UnknownNameError("the model has no adapters to save", hint="add some: `onward.lora.add`")
    if target.suffix == _OF_ONNXRUNTIME:
        write_file(target, _onnxruntime_file(to_save))
        return target
    tensors = {key: array for adapter in to_save for key, array in _tensors(adapter).items()}
    config = json.dumps(_config(source, to_save), indent=2)
    if target.suffix == ".safetensors":
        write_file(target, _serialize(tensors, {"format": "pt", _METADATA: config}))
        return target
    target.mkdir(parents=True, exist_ok=True)
    write_file(target / _WEIGHTS, _serialize(tensors, {"format": "pt"}))
    write_file(target / _CONFIG, config)
    return target


@checked()
def load(model: Source, path: str | os.PathLike[str]) -> Model:
    """Return a copy with the adapters of a file by `save`, PEFT or ONNX Runtime; they replace others.

        adapted = onward.lora.load("bert.onnx", "adapter")

    - `model`: an inference model
    - `path`: the folder or file

    Modules match weights by name, or by the end of a name if only one weight fits.
    """
    is_of_onnxruntime = Path(path).suffix == _OF_ONNXRUNTIME  # which knows weights, not modules
    pairs, config = (_read_onnxruntime if is_of_onnxruntime else _read)(Path(path))
    changed = adaptable(model)
    candidates = by_weight(changed)
    names = {weight: weight if is_of_onnxruntime else sharing[0].module for weight, sharing in candidates.items()}
    placed = {module: _weight_of(module, names) for module in pairs}
    for adapter in adapters(changed):
        if adapter.weight in placed.values():
            detach(changed, adapter)
    taken, candidates = changed.names(), by_weight(changed)
    for module, (a, b) in pairs.items():
        layer = candidates[placed[module]][0]
        inner, outer = _as_stored(module, layer, a, b)
        rank = b.shape[1]
        patterns = config.get("alpha_pattern") or {}
        alpha = next((v for key, v in patterns.items() if module == key or module.endswith(f".{key}")), None)
        alpha = config["lora_alpha"] if alpha is None else alpha
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        attach(changed, taken, candidates[placed[module]], inner, outer, scale, float(config.get("lora_dropout", 0.0)))
    return_to_bodies(changed)
    return changed


def names_in_peft(model: Model, keys: Iterable[str]) -> dict[str, str]:
    """Return keys of a file of PEFT -> tensors of the adapters of a model."""
    own = {adapter.weight: adapter for adapter in adapters(model)}
    modules, names = {weight: adapter.module for weight, adapter in own.items()}, {}
    for key, match in ((key, _KEY.fullmatch(key)) for key in keys):
        if match is not None:
            adapter = own[_weight_of(match["module"], modules)]
            names[key] = str((adapter.a if match["letter"] == "A" else adapter.b).name)
    return names


_OF_ONNXRUNTIME = ".onnx_adapter"


def _onnxruntime_file(adapters_of: list[Adapter]) -> bytes:
    """Return the content of a file for `LoraAdapter` of ONNX Runtime. Parameters are inputs of the model."""
    import onnxruntime as ort

    parameters, stored = {}, []
    for adapter in adapters_of:
        a, b = array(adapter.a), array(adapter.b)
        scaled = (b.astype(np.float64) * float(array(adapter.scale))).astype(b.dtype)  # the format has no scalars
        for value, numbers in ((adapter.a, a), (adapter.b, scaled)):
            assert value.const_value is not None
            bits = numbers.view(np.uint16) if numbers.itemsize == 2 else numbers  # numpy has no bfloat16
            stored.append(bits)  # ONNX Runtime reads the memory later
            kind = int(value.const_value.dtype)
            parameters[value.name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, kind)
    form = ort.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters(parameters)
    with tempfile.TemporaryDirectory() as folder:  # ONNX Runtime writes to paths only
        path = Path(folder) / "adapter"
        form.export_adapter(os.fspath(path))
        return path.read_bytes()


# ---- writing ---------------------------------------------------------------------------------------------------------


def _tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    a, b = array(adapter.a), array(adapter.b)
    a, b = (a, b) if adapter.is_convolution else (a.T, b.T)
    return {f"base_model.model.{adapter.module}.lora_{letter}.weight": x for letter, x in (("A", a), ("B", b))}


def _config(model: Model, saved: list[Adapter]) -> dict[str, Any]:
    """Return the configuration of PEFT: common rank and alpha, and deviations by module."""
    rank = Counter(adapter.rank for adapter in saved).most_common(1)[0][0]
    alpha = Counter(adapter.alpha for adapter in saved).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": model.path.name if model.path else None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(_dropout(adapter) for adapter in saved),
        "target_modules": [adapter.module for adapter in saved],
        "rank_pattern": {adapter.module: adapter.rank for adapter in saved if adapter.rank != rank},
        "alpha_pattern": {adapter.module: adapter.alpha for adapter in saved if adapter.alpha != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
    }


def _dropout(adapter: Adapter) -> float:
    for reader in adapter.a.consumers():
        before = reader.inputs[0].producer() if reader.inputs[0] is not None else None
        if before is not None and before.op_type == "Transpose" and before.inputs[0] is not None:
            before = before.inputs[0].producer()
        ratio = before.inputs[1] if before is not None and before.op_type == "Dropout" else None
        constant = ratio.producer() if ratio is not None else None
        if constant is not None and constant.op_type == "Constant":
            return round(float(constant.attributes["value"].as_tensor().numpy()), 6)
    return 0.0


def _serialize(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    from safetensors.numpy import save

    return save({key: np.ascontiguousarray(array) for key, array in tensors.items()}, metadata)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Return A and B of each module, as stored, and the configuration."""
    import safetensors

    file = path / _WEIGHTS if path.is_dir() else path
    try:
        regular(file)
        entries = dict(safetensors.deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
        config = _read_config(path, file)
    except (OSError, ValueError, RecursionError, OverflowError, safetensors.SafetensorError) as error:
        raise InvalidModelError(f"`{file}` holds no adapter: {reason(error)}") from error
    if wrong := [key for key in entries if not _KEY.fullmatch(key)]:
        raise UnsupportedError(f"`{file}` holds `{wrong[0]}`, which is not an adapter of a layer")
    if refused := [name for name in _UNSUPPORTED if config.get(name)]:
        raise UnsupportedError(f"the adapter in `{path}` uses `{refused[0]}`, which is not supported")
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for key, entry in entries.items():
        match = _KEY.fullmatch(key)
        assert match is not None
        if entry["dtype"] not in _DTYPES:
            hint = f"convert it to one of {', '.join(_DTYPES)}"
            raise InvalidModelError(f"`{key}` of `{file}` is {entry['dtype']}, not floating-point", hint=hint)
        dtype = ir.DataType[_DTYPES[entry["dtype"]]].numpy()
        numbers = np.frombuffer(bytes(entry["data"]), dtype).reshape(entry["shape"])
        pairs.setdefault(match["module"], {})[match["letter"]] = numbers
    if not pairs or any(len(pair) != 2 for pair in pairs.values()):
        raise InvalidModelError(f"`{file}` lacks an A or a B of some module")
    return {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}, config


def _read_onnxruntime(path: Path) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Return A and B of each weight, as PEFT stores them, and the configuration for a scale of 1."""
    import onnxruntime as ort

    try:
        regular(path)
        form = ort.AdapterFormat.read_adapter(os.fspath(path))  # owns the memory of its parameters
        parameters = {name: np.array(to_array(value)) for name, value in form.get_parameters().items()}
    except Exception as error:  # RuntimeError, or what the binding raises for files that are no adapters
        raise InvalidModelError(f"`{path}` holds no adapter: {first_line(error)}") from error
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, numbers in parameters.items():
        weight, _, slot = name.rpartition("/")
        if slot not in ADAPTERS:
            raise UnsupportedError(f"`{path}` holds `{name}`, which is not an adapter of a layer")
        pairs.setdefault(weight, {})[slot] = numbers if numbers.ndim > 2 else numbers.T
    if not pairs or any(len(pair) != 2 for pair in pairs.values()):
        raise InvalidModelError(f"`{path}` lacks an A or a B of some weight")
    ranks = {weight: pair[B].shape[1] for weight, pair in pairs.items()}
    return {weight: (pair[A], pair[B]) for weight, pair in pairs.items()}, {"lora_alpha": 1, "alpha_pattern": ranks}


_DTYPES = {"F64": "DOUBLE", "F32": "FLOAT", "F16": "FLOAT16", "BF16": "BFLOAT16"}


def _read_config(path: Path, file: Path) -> dict[str, Any]:
    beside = file.with_name(_CONFIG)
    if path.is_dir() or beside.exists():
        regular(beside)
        config = json.loads(beside.read_text(encoding="utf-8"))
    else:
        from safetensors import safe_open

        with safe_open(file, "numpy") as opened:
            config = json.loads((opened.metadata() or {}).get(_METADATA, "{}"))
    if not isinstance(config, dict) or "lora_alpha" not in config:
        raise ValueError("its configuration lacks `lora_alpha`")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_number, (config["lora_alpha"], *patterns.values()))):
        raise ValueError("`lora_alpha` and those of `alpha_pattern` must be numbers")
    if not _is_number(dropout := config.get("lora_dropout", 0.0)) or not 0 <= dropout < 1:
        raise ValueError("`lora_dropout` must be a number from 0 to 1")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _weight_of(module: str, names: dict[str, str]) -> str:
    """Return the weight of a module: by name, or the only match of endings."""
    exact = [weight for weight, other in names.items() if other == module]
    ends = [w for w, other in names.items() if f".{other}".endswith(f".{module}") or f".{module}".endswith(f".{other}")]
    matches = exact or ends
    if len(matches) != 1:
        problem = "matches several weights" if matches else "matches no layer of the model"
        raise UnknownNameError(f"`{module}` of the adapter {problem}", hint=suggest_or_list(module, names.values()))
    return matches[0]


def _as_stored(module: str, layer: Layer, a: np.ndarray, b: np.ndarray) -> tuple[ir.Tensor, ir.Tensor]:
    """Return A and B in the layout and type of the layer; raise if their shapes do not fit."""
    dtype = layer.dtype
    if layer.is_convolution:
        groups = layer.node.attributes.get_int("group", 1)
        ones = (1,) * len(layer.shape[2:])
        fits = a.shape[1:] == layer.shape[1:] and b.shape == (layer.units, a.shape[0] // groups, *ones)
    else:
        inputs = layer.shape[1] if layer.units_first else layer.shape[0]
        fits = a.ndim == b.ndim == 2 and a.shape[1] == inputs and b.shape == (layer.units, a.shape[0])
        a, b = a.T, b.T
    if not fits or not a.size:
        raise InvalidModelError(
            f"the adapter of `{module}` does not fit `{layer.weight.name}` of shape {list(layer.shape)}"
        )
    inner, outer = (ir.Tensor(np.ascontiguousarray(x).astype(dtype.numpy()), dtype=dtype) for x in (a, b))
    return inner, outer
