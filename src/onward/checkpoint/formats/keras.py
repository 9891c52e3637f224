"""Keras, without Keras: `.keras` files, `.weights.h5`, and folders of BackupAndRestore."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint.format import Checkpoint, Format
from onward.checkpoint.pytorch.contents import has
from onward.checkpoint.safetensors_files import read_json, write_json
from onward.checkpoint.tf.h5 import PARTS, TRAINED, Groups, read_h5, write_h5
from onward.checkpoint.tf.keras_training import KerasTraining
from onward.errors import UnsupportedError, list_names
from onward.model.storage.containers import BAD_ZIP, members_of, stored_range
from onward.model.storage.files import blame_file, regular
from onward.model.storage.hdf5 import HDF5
from onward.run_state.tensors import StoredTensor
from onward.vocabulary.keras import snake_case

CONFIG, _WEIGHTS, _METADATA = "config.json", "model.weights.h5", "metadata.json"
_BACKUP, _PROGRESS = "latest.weights.h5", "training_metadata.json"
_ENDING = ".weights.h5"
_LARGEST_JSON = 1 << 28
_is_backup = has(_BACKUP)


def matches(path: Path) -> bool:
    if path.is_dir():
        return _is_backup(path)
    try:
        regular(path)
        if path.name.endswith(".h5"):
            with open(path, "rb") as file:
                return file.read(len(HDF5)) == HDF5
        with zipfile.ZipFile(path) as archive:
            return {CONFIG, _METADATA} <= set(archive.namelist())
    except BAD_ZIP:
        return False


def read(path: Path) -> Checkpoint:
    if path.is_dir():
        return _read_backup(path)
    if not path.name.endswith(".h5"):
        return _read_archive(path)
    groups = read_h5(path)
    if "model_config" in groups[""]["attributes"]:
        return _read_whole_h5(path, groups)
    if "model_weights" in groups or not any(name.endswith("vars") for name in groups):
        raise UnsupportedError(
            f"`{path}` is of Keras before version 3, or not of Keras",
            hint='load it with Keras, and save it again: `model.save("model.keras")`',
        )
    facts = KerasTraining(groups, None).facts()
    return Checkpoint(path=path, format=FORMAT.name, title="Keras, weights", trees={path.name: groups}, **facts)


def _read_backup(folder: Path) -> Checkpoint:
    groups = read_h5(folder / _BACKUP)
    progress = read_json(folder / _PROGRESS) if (folder / _PROGRESS).exists() else {}
    facts = {"title": "Keras, backup of a run", "data": progress, **KerasTraining(groups, None).facts()}
    facts["progress"] = {**facts.get("progress", {}), **progress}
    trees = {_BACKUP: groups, **({_PROGRESS: progress} if progress else {})}
    return Checkpoint(path=folder, format=FORMAT.name, trees=trees, **facts)


def _read_archive(path: Path) -> Checkpoint:
    with blame_file(f"`{path}` is not a whole .keras file", *BAD_ZIP), zipfile.ZipFile(path) as archive:
        members = members_of(archive)
        config, metadata = (read_zipped_json(archive, members[name]) for name in (CONFIG, _METADATA))
        ranges = {name: stored_range(archive, info) for name, info in members.items() if not info.is_dir()}
    if _WEIGHTS not in ranges:
        raise UnsupportedError(f"`{path}` has its weights in several files", hint="save it with `model.save` as one")
    groups = read_h5(path, *ranges[_WEIGHTS])
    trees: dict[str, Any] = {CONFIG: config, _METADATA: metadata, _WEIGHTS: groups}
    for name, (start, length) in ranges.items():
        if name not in trees:
            trees[name] = StoredTensor(path, start, np.dtype(np.uint8), (length,), (1,))
    return _of_model(path, trees)


def _of_model(path: Path, trees: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint in the content of a `.keras` file."""
    config = trees[CONFIG]
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        title=f"Keras {trees[_METADATA].get('keras_version', '')}".strip(),
        configuration={key: value for key, value in config.items() if key != "compile_config"},
        trees=trees,
        executes=tuple(dict.fromkeys(_code(config))),
        **KerasTraining(trees[_WEIGHTS], config).facts(),
    )


def _read_whole_h5(path: Path, groups: Groups) -> Checkpoint:
    """Read a file of `model.save("model.h5")` as the `.keras` file that Keras 3 would write.

    It has the arrays of a layer by name, without the modules of classes.
    """
    attributes = groups[""]["attributes"]
    with blame_file(f"`{path}` is not a whole file of Keras", KeyError, ValueError, TypeError, RecursionError):
        model, compiled = (json.loads(attributes.get(name, "{}")) for name in ("model_config", "training_config"))
        version, layers = str(attributes.get("keras_version", "")), model["config"].get("layers")
        classes = [str(layer["class_name"]) for layer in layers or ()]
        nested = [name for name in classes if name not in TRAINED and name in (*PARTS, "Sequential", "Functional")]
        if not version.startswith("3") or not layers or nested or "inner_optimizer" in str(compiled):
            raise UnsupportedError(
                f"`{path}` is of Keras {version or 'before version 3'}"
                + (f", with parts in its layers: {list_names(nested, 3)}" if nested else ""),
                hint='load it with Keras, and save it again: `model.save("model.keras")`',
            )
        stored: dict[str, Any] = {}
        for number, layer in enumerate(layers):
            class_name = snake_case(classes[number])
            count = [snake_case(name) for name in classes[:number]].count(class_name)
            group = f"layers/{class_name}" + (f"_{count}" if count else "")
            arrays = _listed(groups, f"model_weights/{layer['config']['name']}")
            stored |= {group: _group({}), f"{group}/vars": _group(arrays, name=layer["config"]["name"])}
        optimizer = compiled.pop("optimizer_config", None)
        if optimizer is not None:
            compiled["optimizer"] = {**optimizer, "module": "keras.optimizers", "registered_name": None}
            stored["optimizer/vars"] = _group(_listed(groups, "optimizer_weights"), name=optimizer["config"]["name"])
        if isinstance(compiled.get("loss"), dict):
            compiled["loss"] = {**compiled["loss"], "module": "keras.losses", "registered_name": None}
        inside = [{**layer, "module": "keras.layers", "registered_name": None} for layer in layers]
        module = "keras" if model["class_name"] == "Sequential" else "keras.src.models.functional"
        whole = {**model, "module": module, "registered_name": None, "config": {**model["config"], "layers": inside}}
        config = {**whole, "compile_config": compiled} if compiled else whole
        return _of_model(path, {CONFIG: config, _METADATA: {"keras_version": version}, _WEIGHTS: stored})


def _group(arrays: Mapping[str, Any], **attributes: str) -> dict[str, Any]:
    return {"attributes": attributes, "arrays": arrays}


def _listed(groups: Groups, group: str) -> dict[str, Any]:
    """Return the arrays that an attribute lists, by number."""
    attributes = groups.get(group, _group({}))["attributes"]
    pieces = [attributes[key] for key in sorted(attributes, key=len) if key.startswith("weight_names")]
    paths = [f"{group}/{name}".rpartition("/") for names in pieces for name in names]
    return {str(at): groups[inner]["arrays"][key] for at, (inner, _, key) in enumerate(paths)}


def read_zipped_json(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    """Return the object of a JSON file in an archive."""
    if info.file_size > _LARGEST_JSON:
        raise ValueError(f"`{info.filename}` is too large")
    try:
        content = json.loads(archive.read(info))
    except RecursionError as error:
        raise ValueError(f"`{info.filename}` is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{info.filename}` is not a JSON object")
    return content


def _code(tree: Any) -> Iterator[str]:
    """Return what Keras needs or executes to load a model: functions, and classes of others."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            class_name, module = node.get("class_name"), node.get("module")
            if class_name in ("__lambda__", "Lambda"):
                yield "Python bytecode of a Lambda layer"
            elif isinstance(class_name, str) and "registered_name" in node and not _is_of_keras(module):
                yield f"{module or node['registered_name']}.{class_name}"
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


def _is_of_keras(module: Any) -> bool:
    return isinstance(module, str) and module.startswith(("keras", "builtins"))


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the original file or folder with current numbers. Only Keras files hold the model."""
    trees = checkpoint.trees
    weights = next((name for name in trees if name.endswith(".h5")), None)
    if checkpoint.format != FORMAT.name or weights is None:
        raise UnsupportedError(
            "a Keras file needs the layers of a model, which are missing",
            hint="`onward convert training.onnx --to keras --program` writes an equal model; or import its .keras file "
            "and write that",
        )
    groups = KerasTraining(trees[weights], trees.get(CONFIG)).renew(checkpoint)
    if CONFIG in trees:
        _write_archive(path, {**trees, _WEIGHTS: groups})
    elif weights == _BACKUP:
        path.mkdir(parents=True, exist_ok=True)
        write_h5(path / _BACKUP, groups)
        if _PROGRESS in trees:
            progress = {key: checkpoint.progress.get(key, value) for key, value in trees[_PROGRESS].items()}
            write_json(path / _PROGRESS, progress)
    else:
        write_h5(path, groups)


def _write_archive(path: Path, trees: Mapping[str, Any]) -> None:
    weights = path.with_name(f"{path.name}{_ENDING}")
    try:
        write_h5(weights, trees[_WEIGHTS])
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, tree in trees.items():
                if name == _WEIGHTS:
                    archive.write(weights, name)
                elif isinstance(tree, Mapping):
                    archive.writestr(name, json.dumps(tree))
                else:
                    with archive.open(name, "w", force_zip64=True) as member:
                        tree.write_to(member)
    finally:
        weights.unlink(missing_ok=True)


FORMAT = Format(
    "keras", "Keras", matches, read, write, is_folder=False, ending=".keras", needs_names=False,
    keeps=(
        "tensors", "optimizers", "schedules", "step", "progress", "scaler", "averages", "clip", "loss",
        "configuration", "arguments", "data",
    ),
)  # fmt: skip
