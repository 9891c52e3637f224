"""Model files as bytes: what is refused on reading, where tensors go on writing, and that no failure loses anything."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import digits_mlp
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open

from onward.errors import ExternalDataError, InvalidModelError, WriteError
from onward.model import storage
from onward.model.storage import data as data_module
from onward.model.storage.tensor_sites import range_of

save_module = import_module("onward.model.storage.save")  # in the package, the function has this name

FORMS = ["auto", "none", "data", "safetensors"]

# ---- a model with tensors in every place ----------------------------------------------------------------------------


class Opened:
    """The least that can hold a training model: what `storage` needs of a model, and no meaning."""

    def __init__(self, proto: onnx.ModelProto, base_dir: Path | None = None, files: Any = None):
        storage.check_external(proto, base_dir)
        self.ir = ir.from_proto(proto)
        self.steps = [
            (ir.serde.deserialize_graph(info.initialization), ir.serde.deserialize_graph(info.algorithm))
            for info in proto.training_info
        ]
        if base_dir:
            storage.hold_data(self.sites(), base_dir, files or {})

    @classmethod
    def at(cls, path: Path) -> Opened:
        opened = storage.open_model(path)
        return cls(opened.proto, opened.folder, opened.files)

    @property
    def containers(self) -> list[storage.Container]:
        return [self.ir.graph, *self.ir.functions.values(), *itertools.chain.from_iterable(self.steps)]

    def to_proto(self) -> onnx.ModelProto:
        proto = ir.to_proto(self.ir)
        for initialization, algorithm in self.steps:
            info = proto.training_info.add()
            info.initialization.CopyFrom(ir.to_proto(initialization))
            info.algorithm.CopyFrom(ir.to_proto(algorithm))
        return proto

    def save(self, path: Path, **options: Any) -> None:
        storage.save(path, self.to_proto, self.sites(), **options)

    def sites(self) -> list[storage.TensorSite]:
        return storage.sites(*self.containers)

    def tensors(self) -> list[tuple[str, Any]]:
        return [(site.name, site.tensor) for site in self.sites()]

    def values(self) -> list[tuple[str, bytes]]:
        return [(name, tensor.numpy().tobytes()) for name, tensor in self.tensors()]

    def set(self, name: str, array: np.ndarray) -> None:
        for site in self.sites():
            if site.name == name:
                site.tensor = ir.tensor(array, name=name)


def tensor(name: str, *shape: int, seed: int = 0) -> TensorProto:
    values = np.random.default_rng([seed, *name.encode()]).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def graph(name: str, *tensors: TensorProto, nodes: tuple[onnx.NodeProto, ...] = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [], tensors)


def everywhere() -> onnx.ModelProto:
    """Tensors in the graph, its subgraphs and attributes, a function, two algorithms and initializations."""
    constant = helper.make_node("Constant", [], ["c"], name="constant", value=tensor("k", 20, 20))
    branch = helper.make_node("If", ["condition"], ["b"], name="if")
    branch.attribute.append(helper.make_attribute("then_branch", graph("then", tensor("then/w", 32, 32))))
    branch.attribute.append(helper.make_attribute("else_branch", graph("else", nodes=(constant,))))
    custom = helper.make_node("Custom", [], ["d"], name="custom", domain="test")
    custom.attribute.append(helper.make_attribute("many", [tensor("p", 18, 18), tensor("q", 17, 17)]))
    inner = helper.make_node("Constant", [], ["e"], name="inner", value=tensor("f", 19, 19))
    proto = helper.make_model(
        graph("main", tensor("w", 64, 64), tensor("lr"), nodes=(branch, custom)),
        functions=[helper.make_function("test", "F", [], ["e"], [inner], [helper.make_opsetid("", 21)])],
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("test", 1)],
        ir_version=10,
    )
    for step in range(2):  # the same names in both
        info = proto.training_info.add()
        info.algorithm.CopyFrom(graph(f"algorithm{step}", tensor("w/exp_avg", 64, 64, seed=step), tensor("step")))
        info.initialization.CopyFrom(graph(f"initialization{step}", tensor("seeds", 30, 30, seed=step)))
    proto.graph.initializer[0].metadata_props.add(key="train.role", value="parameter")
    proto.graph.initializer[0].doc_string = "a weight"
    return proto


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model with tensors in every place, and its data file."""
    path = tmp_path / "m.onnx"
    Opened(everywhere()).save(path, external="data")
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def written(path: Path) -> tuple[int, int, int]:
    """Stays the same as long as a file is only read."""
    info = path.stat()
    return info.st_ino, info.st_mtime_ns, info.st_size


def external(proto: onnx.ModelProto) -> dict[str, dict[str, str]]:
    found = {}
    for item in storage.walk_tensors(proto):
        if item.data_location == TensorProto.EXTERNAL:
            found[item.name] = {entry.key: entry.value for entry in item.external_data}
    return found


def point(item: TensorProto, location: str | None, offset: object = None, length: object = None) -> TensorProto:
    """Turn a tensor into a reference."""
    item.ClearField("raw_data")
    item.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        if value is not None:
            item.external_data.add(key=key, value=str(value))
    return item


def one(*tensors: TensorProto) -> onnx.ModelProto:
    return helper.make_model(graph("g", *tensors), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


# ---- parsing ---------------------------------------------------------------------------------------------------------


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'

NOT_MODELS = {
    "nothing": (b"", "is empty"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
    "zip": (zipped(), "a PyTorch file"),
    "pickle": (pickle.dumps({"a": [1]}), "a Python pickle"),
    "safetensors": (len(HEADER).to_bytes(8, "little") + HEADER + bytes(4), "a safetensors file"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(20), "a gzip archive"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(20), "a TensorFlow Lite model"),
    "ort": (b"\x1c\0\0\0ORTM" + bytes(20), "ONNX Runtime's own format"),
    "page": (b"<!DOCTYPE html><html>", "a web page"),
    "text": (b"ir_version: 8\n", "written as text"),
    "json": (b'{"irVersion": 8}', "a JSON file"),
    "cut short": (digits_mlp().SerializeToString()[:-100], "not valid protobuf"),
    "a tensor": (tensor("w", 3).SerializeToString(), "not an ONNX model"),
    "no graph": (onnx.ModelProto(ir_version=8).SerializeToString(), "it has no graph"),
    "no version": (onnx.ModelProto(graph=onnx.GraphProto(name="g")).SerializeToString(), "it has no version"),
    "ones": (b"\xff" * 1000, "not valid protobuf"),
    "noise": (np.random.default_rng(0).bytes(10_000), "not valid protobuf"),
}


@pytest.mark.parametrize("name", NOT_MODELS)
def test_says_what_it_is_instead(name: str, tmp_path: Path) -> None:
    data, message = NOT_MODELS[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(InvalidModelError, match=message):
        storage.read_proto(path)
    with pytest.raises(InvalidModelError, match=message):
        storage.parse_proto(data)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="is a folder"):
        storage.read_proto(tmp_path)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(InvalidModelError, match="does not exist") as raised:
        storage.read_proto(tmp_path / "mode.onnx")
    assert raised.value.hint == "did you mean `model.onnx`?"
    with pytest.raises(InvalidModelError, match="does not exist"):
        storage.read_proto(tmp_path / "no" / "model.onnx")
    with pytest.raises(InvalidModelError, match="could not read"):
        storage.read_proto(tmp_path / ("x" * 300))
    with pytest.raises(InvalidModelError, match="could not read"):
        storage.read_proto("a\0b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(InvalidModelError, match="is a pipe, not a file"):
        storage.read_proto(tmp_path / "model.onnx")


def test_refuses_more_than_protobuf_holds(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.write(b"\x08\x0a")
        file.truncate(3 * 2**30)
    with pytest.raises(InvalidModelError, match="larger than 2 GiB"):
        storage.read_proto(path)


def test_reads_what_was_written(tmp_path: Path) -> None:
    proto = everywhere()
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    assert storage.read_proto(tmp_path / "model.onnx") == proto
    assert storage.parse_proto(proto.SerializeToString()) == proto


@given(st.data())
def test_damaged_models_are_refused_or_read(data: st.DataObject) -> None:
    content = bytearray(everywhere().SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    try:
        storage.check_external(storage.parse_proto(bytes(content)), None)
    except (InvalidModelError, ExternalDataError) as error:
        assert str(error)


@given(st.binary(max_size=500))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidModelError):
        storage.parse_proto(data)


# ---- tensors in protobuf ---------------------------------------------------------------------------------------------


def test_walks_every_tensor() -> None:
    proto = everywhere()
    sparse = helper.make_sparse_tensor(tensor("values", 1), numpy_helper.from_array(np.array([2]), "indices"), [4])
    proto.graph.sparse_initializer.append(sparse)
    proto.functions[0].attribute_proto.append(helper.make_attribute("default", tensor("d", 1)))
    node = proto.graph.node[0].attribute[0].g.node.add(op_type="Constant")
    node.attribute.append(helper.make_attribute("sparse_value", sparse))
    names = sorted(item.name for item in storage.walk_tensors(proto))
    once = ["w", "lr", "then/w", "k", "p", "q", "f", "d"]
    twice = ["w/exp_avg", "step", "seeds", "values", "indices"]
    assert names == sorted(once + 2 * twice)


def test_walks_graphs_that_nest_deeply() -> None:
    proto = one()
    inner = proto.graph
    for _ in range(3000):
        inner = inner.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
    inner.initializer.append(tensor("deep", 1))
    assert [item.name for item in storage.walk_tensors(proto)] == ["deep"]


# ---- references that are refused -------------------------------------------------------------------------------------


def w(*arguments: Any, dims: list[int] | None = None, **changes: Any) -> TensorProto:
    """A reference named w, to 16 bytes unless `dims` says otherwise."""
    item = point(tensor("w", 1), *arguments)
    item.dims[:] = [4] if dims is None else dims
    for field, value in changes.items():
        setattr(item, field, value)
    return item


HOSTILE = {
    "absolute": (w("/etc/passwd"), "an absolute path"),
    "windows drive": (w("C:\\w.data"), "an absolute path"),
    "windows drive, slash": (w("c:/w.data"), "an absolute path"),
    "windows share": (w("\\\\host\\w.data"), "an absolute path"),
    "up": (w("../w.data"), "leaves the model's folder"),
    "up from below": (w("sub/../../w.data"), "leaves the model's folder"),
    "up and back": (w("sub/../w.data"), "leaves the model's folder"),
    "up, windows": (w("..\\w.data"), "leaves the model's folder"),
    "up, mixed": (w("sub\\../w.data"), "leaves the model's folder"),
    "backslash": (w("sub\\w.data"), "separates folders by `/`"),
    "empty": (w(""), "has no location"),
    "no location": (w(None), "has no location"),
    "missing": (w("none.data"), "does not exist"),
    "below a file": (w("w.data/w.data"), "cannot be read"),
    "folder": (w("sub"), "not a regular file"),
    "this folder": (w("."), "not a regular file"),
    "long": (w("x" * 5000), "cannot be read"),
    "nul": (w("w.data\0.png"), "cannot be read"),
    "newline": (w("w\n.data"), r"`'w\\n.data'`, which does not exist"),
    "link": (w("link.data"), "symbolic link"),
    "folder link": (w("linked/w.data"), "symbolic link"),
    "hard link": (w("hard.data"), "hard links"),
    "pipe": (w("pipe"), "not a regular file"),
    "beyond the end": (w("w.data", 4084), "ends at byte 4100 of `w.data`, which has 4096 bytes"),
    "far beyond the end": (w("w.data", 2**63 - 1), "ends at byte"),
    "negative offset": (w("w.data", -4), "not a number of bytes"),
    "negative length": (w("w.data", 0, -16), "not a number of bytes"),
    "word": (w("w.data", "four"), "not a number of bytes"),
    "python number": (w("w.data", "1_0"), "not a number of bytes"),
    "spaces": (w("w.data", " 4 "), "not a number of bytes"),
    "fraction": (w("w.data", "4.0"), "not a number of bytes"),
    "hexadecimal": (w("w.data", "0x4"), "not a number of bytes"),
    "other digits": (w("w.data", "٤"), "not a number of bytes"),
    "no digits": (w("w.data", ""), "not a number of bytes"),
    "huge number": (w("w.data", 2**63), "not a number of bytes"),
    "very many digits": (w("w.data", "9" * 100_000), "not a number of bytes"),
    "short length": (w("w.data", 0, 12), "a length of 12 bytes, but its type and shape need 16"),
    "long length": (w("w.data", 0, 17), "a length of 17 bytes"),
    "odd int4": (w("w.data", 0, 3, data_type=TensorProto.INT4, dims=[3]), "need 2"),
    "strings": (w("w.data", data_type=TensorProto.STRING), "holds strings"),
    "no type": (w("w.data", data_type=0), "holds data type 0"),
    "unknown type": (w("w.data", data_type=999), "holds data type 999"),
    "negative dimension": (w("w.data", dims=[-1]), "negative dimension"),
    "huge shape": (w("w.data", dims=[2**40, 2**40]), "larger than any file"),
    "many dimensions": (w("w.data", dims=[2**62] * 10_000), "larger than any file"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = tmp_path / "folder"
    (base / "sub").mkdir(parents=True)
    for path in (tmp_path / "w.data", base / "w.data", base / "sub" / "w.data"):
        path.write_bytes(bytes(4096))
    (base / "link.data").symlink_to("w.data")
    (base / "linked").symlink_to("sub")
    (base / "second.data").write_bytes(bytes(4096))
    os.link(base / "second.data", base / "hard.data")
    os.mkfifo(base / "pipe")
    return base


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses(name: str, folder: Path) -> None:
    item, message = HOSTILE[name]
    with pytest.raises(ExternalDataError, match=message) as raised:
        storage.check_external(one(item), folder)
    assert raised.value.hint
    assert len(str(raised.value)) < 6000


def test_refuses_a_key_that_is_there_twice(folder: Path) -> None:
    item = w("w.data")
    item.external_data.add(key="location", value="sub/w.data")
    with pytest.raises(ExternalDataError, match="has `location` twice"):
        storage.check_external(one(item), folder)


def test_refuses_names_that_are_not_text(folder: Path) -> None:
    content = one(w("missing.data")).SerializeToString().replace(b"missing", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9")
    with pytest.raises(ExternalDataError, match="has no location"):
        storage.check_external(storage.parse_proto(content), folder)


def test_refuses_data_without_a_folder() -> None:
    with pytest.raises(ExternalDataError, match="has no folder"):
        storage.check_external(one(w("w.data")), None)
    storage.check_external(everywhere(), None)


@pytest.mark.parametrize("at", range(8))
def test_looks_everywhere(at: int, folder: Path) -> None:
    proto = everywhere()
    items = [item for item in storage.walk_tensors(proto) if item.dims]
    point(items[at], "../w.data")
    with pytest.raises(ExternalDataError, match="leaves the model's folder"):
        storage.check_external(proto, folder)


def test_reports_all_problems_at_once(folder: Path) -> None:
    items = [w(f"none{i}.data") for i in range(30)]
    with pytest.raises(ExternalDataError) as raised:
        storage.check_external(one(w("/a"), w("../b"), *items), folder)
    lines = raised.value.message.splitlines()
    assert "absolute" in lines[1] and "leaves" in lines[2] and lines[-1] == "  and 12 more"


@pytest.mark.parametrize(
    ("ranges", "allowed"),
    [
        ([(0, 4), (16, 4)], True),
        ([(0, 4), (0, 4)], True),  # tied weights
        ([(0, 4), (12, 4)], False),
        ([(0, 16), (16, 4)], False),  # inside another
        ([(0, 4), (64, 16), (16, 4), (124, 4)], False),
        ([(0, 4), (0, 5)], False),
        ([(0, 4), (8, 0)], True),  # nothing overlaps nothing
    ],
)
def test_overlaps(ranges: list[tuple[int, int]], allowed: bool, folder: Path) -> None:
    items = [w("./w.data" if i % 2 else "w.data", offset, dims=[size]) for i, (offset, size) in enumerate(ranges)]
    if allowed:
        storage.check_external(one(*items), folder)
    else:
        with pytest.raises(ExternalDataError, match="overlaps"):
            storage.check_external(one(*items), folder)


def test_accepts(folder: Path) -> None:
    good = [
        w("w.data"),
        w("w.data", 16, 16),
        w("./w.data", 32),
        w("sub/w.data", 4080),
        w("sub//w.data", dims=[0, 2**62, 2**62]),
        w("w.data", 100, 2, data_type=TensorProto.INT4, dims=[3]),
        w("w.data", 200, 3, data_type=TensorProto.INT2, dims=[9]),
        w("w.data", 300, 4, dims=[]),
    ]
    storage.check_external(one(*good), folder)


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("again", FORMS)
def test_round_trip(form: str, again: str, tmp_path: Path) -> None:
    """Into one form, from there into another in place, and from there into another folder."""
    model = Opened(everywhere())
    values = model.values()
    path = tmp_path / "m.onnx"
    model.save(path, external=form)
    assert model.values() == values
    first = Opened.at(path)
    assert first.values() == values
    first.save(path, external=again)
    assert first.values() == values  # though the files that it was read from may be gone
    second = Opened.at(path)
    assert second.values() == values
    (tmp_path / "new").mkdir()
    second.save(tmp_path / "new" / "n.onnx", external=form)
    for file in tmp_path.glob("m.*"):
        file.unlink()
    third = Opened.at(tmp_path / "new" / "n.onnx")
    assert third.values() == values
    weight = third.ir.graph.initializers["w"].const_value
    assert weight is not None and weight.doc_string == "a weight"
    assert weight.metadata_props == {"train.role": "parameter"}
    if form == again == "data":
        assert {entry["location"] for entry in external(third.to_proto()).values()} == {"n.data"}


def test_goes_outside(tmp_path: Path) -> None:
    Opened(everywhere()).save(tmp_path / "m.onnx", external="data")
    proto = storage.read_proto(tmp_path / "m.onnx")
    found = external(proto)
    assert set(found) == {
        "w",
        "then/w",
        "w/exp_avg",
        "seeds",
    }  # not attributes, which runtimes want inside; not scalars
    assert all(int(entry["offset"]) % data_module.ALIGNMENT == 0 for entry in found.values())
    assert proto.training_info[0].algorithm.initializer[0].data_location == TensorProto.EXTERNAL
    assert proto.training_info[1].initialization.initializer[0].data_location == TensorProto.EXTERNAL


def test_large_tensors_begin_on_a_page(tmp_path: Path) -> None:
    Opened(one(tensor("a", 300), tensor("b", 512, 512), tensor("c", 300), tensor("d", 512, 513))).save(
        tmp_path / "m.onnx", external="data"
    )
    offsets = {
        name: int(entry["offset"])
        for name, entry in external(onnx.load(tmp_path / "m.onnx", load_external_data=False)).items()
    }
    assert offsets["b"] == 4096 and offsets["d"] % 4096 == 0
    assert offsets["c"] == 4096 + 512 * 512 * 4


def test_attributes_that_are_outside_stay_outside(tmp_path: Path) -> None:
    proto = everywhere()
    for item in storage.walk_tensors(proto):
        if item.name in ("k", "p", "f"):
            (tmp_path / f"{item.name}.bin").write_bytes(item.raw_data)
            point(item, f"{item.name}.bin")
    model = Opened(proto, tmp_path)
    assert model.values() == Opened(everywhere()).values()
    (tmp_path / "new").mkdir()
    model.save(tmp_path / "new" / "m.onnx")
    again = Opened.at(tmp_path / "new" / "m.onnx")
    assert again.values() == model.values()
    assert {"k", "p", "f"} <= set(external(again.to_proto()))


def test_auto_keeps_small_models_in_one_file(tmp_path: Path) -> None:
    Opened(everywhere()).save(tmp_path / "m.onnx")
    assert set(files(tmp_path)) == {"m.onnx"}


def test_auto_goes_outside_when_there_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "EMBED_LIMIT", 10_000)
    Opened(everywhere()).save(tmp_path / "m.onnx")
    assert set(files(tmp_path)) == {"m.onnx", "m.data"}
    monkeypatch.setattr(save_module, "PROTO_LIMIT", 10_000)
    with pytest.raises(WriteError, match="do not fit") as raised:
        Opened(everywhere()).save(tmp_path / "n.onnx", external="none")
    assert raised.value.hint and "external" in raised.value.hint
    monkeypatch.setattr(save_module, "EMBED_LIMIT", 1_000_000)
    with pytest.raises(WriteError, match="do not fit"):
        Opened(everywhere()).save(tmp_path / "n.onnx")
    assert set(files(tmp_path)) == {"m.onnx", "m.data"}


@pytest.mark.parametrize("form", FORMS[2:])
def test_auto_goes_on_as_the_replaced_model(form: str, tmp_path: Path) -> None:
    """A model whose every weight has been trained is in memory; it was outside and belongs there."""
    path = tmp_path / "m.onnx"
    Opened(everywhere()).save(path, external=form)
    Opened(everywhere()).save(path)
    assert set(files(tmp_path)) == {"m.onnx", f"m.1.{form}"}
    assert Opened.at(path).values() == Opened(everywhere()).values()


@pytest.mark.parametrize("form", FORMS[2:])
def test_shards(form: str, tmp_path: Path) -> None:
    Opened(everywhere()).save(tmp_path / "m.onnx", external=form, shard_bytes=20_000)
    assert len(files(tmp_path)) > 2
    for path in tmp_path.glob(f"*.{form}"):
        assert path.stat().st_size < 20_000 + 1000
    model = Opened.at(tmp_path / "m.onnx")
    assert model.values() == Opened(everywhere()).values()
    model.save(tmp_path / "m.onnx", external="none")
    assert set(files(tmp_path)) == {"m.onnx"}


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = Opened(one(tensor("a", 64, 64), tensor("b", 64, 64)))
    initializers = model.ir.graph.initializers
    initializers["b"].const_value = initializers["a"].const_value
    model.save(tmp_path / "m.onnx", external="data")
    assert (tmp_path / "m.data").stat().st_size == 64 * 64 * 4
    again = Opened.at(tmp_path / "m.onnx")
    assert [name for name, _ in again.tensors()] == ["a", "b"]
    again.save(tmp_path / "n.onnx", external="safetensors")
    with safe_open(tmp_path / "n.safetensors", "numpy") as stored:
        assert list(stored.keys()) == ["a"]
    assert Opened.at(tmp_path / "n.onnx").values() == again.values() == model.values()


def test_a_tensor_that_only_its_owner_can_write_is_left_alone(tmp_path: Path) -> None:
    class Special(ir.ExternalTensor):
        pass

    model = Opened(one(tensor("w", 64, 64)))
    special = Special("nowhere", 0, None, ir.DataType.FLOAT, shape=ir.Shape([2**40]), name="w")
    model.ir.graph.initializers["w"].const_value = special
    seen = []

    def to_proto() -> onnx.ModelProto:
        seen.append(model.ir.graph.initializers["w"].const_value)
        return one()

    for form in FORMS:
        storage.save(tmp_path / "m.onnx", to_proto, model.sites(), external=form)  # type: ignore[arg-type]
    assert seen == [special] * 4


# ---- other programs read it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_onnx_runtime_and_the_checker_read_it(form: str, tmp_path: Path) -> None:
    proto = digits_mlp(hidden=300)
    Opened(proto).save(tmp_path / "m.onnx", external=form)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    image = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    before = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    after = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(before.run(None, {"image": image}), after.run(None, {"image": image}))
    loaded = onnx.load(tmp_path / "m.onnx")
    for ours, theirs in zip(proto.graph.initializer, loaded.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(ours), numpy_helper.to_array(theirs))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    Opened(everywhere()).save(tmp_path / "m.onnx", external="safetensors")
    expected = {item.name: numpy_helper.to_array(item) for item in storage.walk_tensors(everywhere())}
    with safe_open(tmp_path / "m.safetensors", "numpy") as stored:
        assert set(stored.keys()) == {"w", "then/w", "w/exp_avg", "w/exp_avg#2", "seeds", "seeds#2"}
        np.testing.assert_array_equal(stored.get_tensor("w"), expected["w"])
        first, second = stored.get_tensor("w/exp_avg"), stored.get_tensor("w/exp_avg#2")
    values = dict(everywhere_step(0))
    np.testing.assert_array_equal(first, values["w/exp_avg"])
    assert not np.array_equal(first, second)


def everywhere_step(index: int) -> Iterator[tuple[str, np.ndarray]]:
    for item in everywhere().training_info[index].algorithm.initializer:
        yield item.name, numpy_helper.to_array(item)


INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NATIVE = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
EXTENDED = {
    "bfloat16": ir.DataType.BFLOAT16,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN,
    "float8_e4m3fnuz": ir.DataType.FLOAT8E4M3FNUZ,
    "float8_e5m2": ir.DataType.FLOAT8E5M2,
    "float8_e5m2fnuz": ir.DataType.FLOAT8E5M2FNUZ,
    "float8_e8m0fnu": ir.DataType.FLOAT8E8M0,
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "int2": ir.DataType.INT2,
    "uint2": ir.DataType.UINT2,
    "float4_e2m1fn": ir.DataType.FLOAT4E2M1,
    "float6_e2m3fn": ir.DataType.FLOAT6E2M3,
}


def array(dtype: str, shape: tuple[int, ...], seed: int) -> ir.TensorProtocol:
    rng = np.random.default_rng(seed)
    if dtype == "string":
        words = [rng.bytes(int(rng.integers(20))) for _ in range(int(np.prod(shape)))]
        return ir.StringTensor(words, shape=ir.Shape(shape))
    if dtype in EXTENDED:
        bits = EXTENDED[dtype].bitwidth
        raw = rng.integers(0, 2 ** min(bits, 8), size=(*shape, 2 if bits == 16 else 1), dtype=np.uint8)
        return ir.Tensor(raw.view(getattr(ml_dtypes, dtype)).reshape(shape), dtype=EXTENDED[dtype])
    if dtype == "bool":
        return ir.tensor(rng.integers(0, 2, size=shape).astype(bool))
    return ir.tensor(rng.normal(0, 50, size=shape).astype(dtype))


DTYPES = [*NATIVE, *EXTENDED, "string"]
SHAPES = st.one_of(
    st.just(()), st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), st.tuples(st.integers(100, 2000))
)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES, st.integers(0, 99)), max_size=8),
    st.sampled_from(FORMS),
    st.sampled_from(FORMS),
    st.sampled_from([0, 1, 64, 1024]),
    st.sampled_from([None, 1, 1000]),
)
def test_any_tensors_survive(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[str, tuple[int, ...], int]],
    form: str,
    again: str,
    threshold: int,
    shard: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    model = Opened(one())
    for i, (dtype, shape, seed) in enumerate(kinds):
        value = ir.Value(name=f"t{i}", const_value=array(dtype, shape, seed))
        model.ir.graph.register_initializer(value)
    before = contents(model)
    model.save(folder / "m.onnx", external=form, threshold_bytes=threshold, shard_bytes=shard)
    opened = Opened.at(folder / "m.onnx")
    assert contents(opened) == before
    opened.save(folder / "m.onnx", external=again, threshold_bytes=threshold, shard_bytes=shard)
    assert contents(opened) == contents(Opened.at(folder / "m.onnx")) == before
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as stored:
            assert stored.keys()


def contents(model: Opened) -> list[tuple[str, object, tuple[int, ...], object]]:
    found = []
    for name, item in model.tensors():
        value: object = item.numpy().tolist() if item.dtype == ir.DataType.STRING else item.numpy().tobytes()
        found.append((name, item.dtype, tuple(item.shape.numpy()), value))
    return found


# ---- saving over a model ---------------------------------------------------------------------------------------------


def test_what_is_unchanged_is_not_written_again(saved: Path, tmp_path: Path) -> None:
    before = written(tmp_path / "m.data")
    model = Opened.at(saved)
    model.set("lr", np.array(0.5, np.float32))
    model.save(saved)
    assert written(tmp_path / "m.data") == before
    assert set(files(tmp_path)) == {"m.onnx", "m.data"}
    assert dict(Opened.at(saved).values())["lr"] == np.float32(0.5).tobytes()


def test_what_is_changed_goes_into_a_new_file(saved: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    model = Opened.at(saved)
    model.set("w", np.ones((64, 64), np.float32))
    model.save(saved)
    after = files(tmp_path)
    assert set(after) == {"m.onnx", "m.data", "m.1.data"}
    assert after["m.data"] == before["m.data"] and len(after["m.1.data"]) == 64 * 64 * 4
    model = Opened.at(saved)
    assert dict(model.values())["w"] == np.ones((64, 64), np.float32).tobytes()
    for name in ("w/exp_avg", "seeds"):  # less than half of m.data is used now: it is given up
        model.set(name, np.ones((64, 64), np.float32))
    model.save(saved)
    assert set(files(tmp_path)) == {"m.onnx", "m.1.data", "m.2.data"}
    assert Opened.at(saved).values() == model.values()


def test_numbers_only_rise(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for number in range(4):
        Opened(everywhere()).save(path, external="data")
        assert set(files(tmp_path)) == {"m.onnx", f"m.{number}.data" if number else "m.data"}


def test_a_changed_format_replaces_the_file(saved: Path, tmp_path: Path) -> None:
    model = Opened.at(saved)
    model.save(saved, external="safetensors")
    assert set(files(tmp_path)) == {"m.onnx", "m.safetensors"}
    assert model.values() == Opened(everywhere()).values()
    assert all(where[0].name == "m.safetensors" for _, item in model.tensors() if (where := range_of(item)))


def test_foreign_files_are_used_but_never_deleted(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    item = tensor("w", 64, 64)
    (tmp_path / "weights.bin").write_bytes(bytes(100) + item.raw_data)
    path.write_bytes(one(point(item, "weights.bin", 100), tensor("lr")).SerializeToString())
    model = Opened.at(path)
    model.set("lr", np.array(0.5, np.float32))
    model.save(path)
    assert set(files(tmp_path)) == {"m.onnx", "weights.bin"}
    model.save(path, external="none")
    assert set(files(tmp_path)) == {"m.onnx", "weights.bin"}


def test_the_checksum_of_a_file_stays_as_long_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    inside, outside = tensor("v", 64, 64), tensor("w", 64, 64)
    (tmp_path / "weights.bin").write_bytes(outside.raw_data)
    point(outside, "./weights.bin").external_data.add(key="checksum", value="0123abcd")
    proto = one(inside, outside)
    path.write_bytes(proto.SerializeToString())
    for _ in range(2):
        Opened.at(path).save(path)
        found = external(storage.read_proto(path))
        assert found["w"]["location"] == "weights.bin" and found["w"]["checksum"] == "0123abcd"
        assert "checksum" not in found["v"]
    storage.save(path, lambda: proto, [])  # which has it already
    assert storage.read_proto(path) == proto
    Opened.at(path).save(path, external="safetensors")
    assert not any("checksum" in entry for entry in external(storage.read_proto(path)).values())


def test_a_checksum_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    (tmp_path / "w.data").write_bytes(bytes(16))
    item = w("w.data")
    item.external_data.add(key="checksum", value="?????")
    path.write_bytes(one(item).SerializeToString().replace(b"?????", b"\xff\xfe\xfd\xfc\xfb"))
    Opened.at(path).save(path)
    assert external(storage.read_proto(path))["w"] == {"location": "w.data", "offset": "0", "length": "16"}


@pytest.mark.parametrize("how", ["auto", "data"])
def test_files_of_another_model_are_referred_to_or_copied_and_not_touched(tmp_path: Path, how: str) -> None:
    Opened(everywhere()).save(tmp_path / "m.onnx", external="data")
    (tmp_path / "n.data").write_bytes(b"somebody's")
    before = files(tmp_path)
    model = Opened.at(tmp_path / "m.onnx")
    model.save(tmp_path / "n.onnx", external=how)
    after = files(tmp_path)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"n.onnx", *(["n.1.data"] if how == "data" else [])}
    Opened(everywhere()).save(tmp_path / "m.onnx", external="data")  # which deletes only what is nobody else's
    assert (tmp_path / "m.data").exists() == (how == "auto")
    assert Opened.at(tmp_path / "n.onnx").values() == Opened(everywhere()).values()


def test_a_copy_of_the_model_keeps_its_data(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.onnx").write_bytes(saved.read_bytes())
    Opened(everywhere()).save(saved, external="data")
    assert set(files(tmp_path)) == {"m.onnx", "copy.onnx", "m.data", "m.1.data"}
    Opened.at(tmp_path / "copy.onnx")


def test_replaces_what_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for content in (b"", b"location", HOSTILE["missing"][0].SerializeToString()):
        path.write_bytes(content)
        Opened(everywhere()).save(path)
        assert Opened.at(path).values() == Opened(everywhere()).values()


def test_the_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Opened(everywhere()).save(Path("m.onnx"), external="data")
    model = Opened.at(Path("m.onnx"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert model.values() == Opened(everywhere()).values()


def test_permissions_are_kept(saved: Path, tmp_path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert saved.stat().st_mode & 0o777 == (tmp_path / "m.data").stat().st_mode & 0o777 == 0o666 & ~umask
    saved.chmod(0o640)
    Opened(everywhere()).save(saved, external="data")
    assert saved.stat().st_mode & 0o777 == (tmp_path / "m.1.data").stat().st_mode & 0o777 == 0o640


def test_writes_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.onnx").symlink_to("real/m.onnx")
    for _ in range(2):
        Opened(everywhere()).save(tmp_path / "link.onnx", external="data")
        assert (tmp_path / "link.onnx").is_symlink()
        assert Opened.at(tmp_path / "link.onnx").values() == Opened(everywhere()).values()
    assert set(files(tmp_path / "real")) == {"m.onnx", "m.1.data"}


def test_refuses_to_write(tmp_path: Path) -> None:
    model = Opened(everywhere())
    with pytest.raises(WriteError, match=r"folder .* does not exist"):
        model.save(tmp_path / "no" / "m.onnx")
    with pytest.raises(WriteError, match="not a file"):
        model.save(tmp_path)
    with pytest.raises(WriteError, match="cannot be stored as `zip`"):
        model.save(tmp_path / "m.onnx", external="zip")
    assert not files(tmp_path)


def test_refuses_to_replace_what_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.touch(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write anything
    with pytest.raises(WriteError, match="read-only"):
        Opened(everywhere()).save(path)


def test_refuses_to_write_what_could_not_be_read(tmp_path: Path) -> None:
    """A tensor that the caller did not name points into the folder that the model came from."""
    proto = one(w("w.data"))
    with pytest.raises(WriteError, match=r"`w\.data`, which does not exist"):
        storage.save(tmp_path / "m.onnx", lambda: proto, [])
    assert not files(tmp_path)


def test_refuses_a_tensor_of_the_wrong_size(tmp_path: Path) -> None:
    item = tensor("w", 64, 64)
    item.dims[:] = [64, 65]
    model = Opened(one(tensor("v", 64, 64), item))
    with pytest.raises(WriteError, match="could not write"):
        model.save(tmp_path / "m.onnx", external="data")
    assert not files(tmp_path)


def test_data_that_was_cut_short(saved: Path, tmp_path: Path) -> None:
    model = Opened.at(saved)
    os.truncate(tmp_path / "m.data", 5000)
    with pytest.raises(ExternalDataError, match=r"of `m\.data`, which has 5000 bytes"):
        Opened.at(saved)
    (tmp_path / "new").mkdir()
    with pytest.raises(WriteError, match="could not write"):
        model.save(tmp_path / "new" / "m.onnx")
    with pytest.raises(WriteError, match="could not write"):
        model.save(saved, external="safetensors")
    assert not files(tmp_path / "new")
    assert set(files(tmp_path)) == {"m.onnx", "m.data"}


# ---- failures --------------------------------------------------------------------------------------------------------

STEPS = [
    (os, "fsync"),
    (os, "replace"),
    (os, "chmod"),
    (os, "open"),
    (data_module, "_copy"),
    (save_module, "_serialise"),
]


class Trap:
    """Fails at the nth call of anything that touches the disk, before the call or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int, after: bool):
        self.calls, self.sprung = 0, ""
        for owner, name in STEPS:
            monkeypatch.setattr(owner, name, self.guard(name, getattr(owner, name), error, at, after))

    def guard(
        self, name: str, do: Callable[..., Any], error: BaseException, at: int, after: bool
    ) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 != at:
                return do(*arguments, **options)
            self.sprung = name
            if after:
                do(*arguments, **options)
            raise error

        return call


@pytest.mark.slow("safetensors-KeyboardInterrupt()-after", "safetensors-OSError(28, 'No space left on device')-before")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("form", FORMS)
def test_a_failure_anywhere_loses_nothing(form: str, error: BaseException, after: bool, tmp_path: Path) -> None:
    sprung = []
    for at in range(100):
        folder = tmp_path / str(at)
        folder.mkdir()
        path = folder / "m.onnx"
        Opened(everywhere()).save(path, external="data")
        path.chmod(0o600)
        model = Opened.at(path)
        model.set("w", np.ones((64, 64), np.float32))
        before, values = files(folder), model.values()
        with pytest.MonkeyPatch.context() as monkeypatch:
            trap = Trap(monkeypatch, error, at, after)
            try:
                model.save(path, external=form)
            except WriteError as raised:
                assert isinstance(error, OSError) and raised.hint and "No space left" in str(raised)
            except KeyboardInterrupt:
                assert isinstance(error, KeyboardInterrupt)
        assert model.values() == values  # in memory, whatever happened
        if path.read_bytes() == before["m.onnx"]:
            assert files(folder) == before, f"{trap.sprung}, call {at}"
        else:  # the rename had happened: the new model is whole
            assert Opened.at(path).values() == values
            assert not list(folder.glob(".*"))
        if not trap.sprung:
            break
        sprung.append(trap.sprung)
    assert {"fsync", "replace", "chmod", "open", "_serialise"} <= set(sprung)
    assert form == "none" or "_copy" in sprung


def test_a_failure_of_the_caller_loses_nothing(saved: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    model = Opened.at(saved)
    held = [item for _, item in model.tensors()]

    def to_proto() -> onnx.ModelProto:
        raise RuntimeError("cannot do it")

    with pytest.raises(WriteError, match="cannot do it"):
        storage.save(saved, to_proto, model.sites(), external="safetensors")
    assert files(tmp_path) == before
    assert [item for _, item in model.tensors()] == held


def run(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process of its own, which can use everything that is defined in this file."""
    code = "from test_storage import *\n" + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits on file sizes")
@pytest.mark.parametrize("limit", [100, 1_000, 20_000, 50_000])
@pytest.mark.parametrize("form", FORMS[1:])
def test_files_that_cannot_grow(form: str, limit: int, saved: Path, tmp_path: Path) -> None:
    """The system refuses to write more, in the middle of a file."""
    import resource

    before = files(tmp_path)
    model = Opened(everywhere())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(WriteError, match="File too large") as raised:
            model.save(saved, external=form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert raised.value.hint and "shard_bytes" in raised.value.hint
    assert files(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("needs `mount`")
    if done.returncode:
        pytest.skip(f"needs the right to mount a small disk: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_full_disk(form: str, small_disk: Path) -> None:
    path = small_disk / "m.onnx"
    Opened(everywhere()).save(path, external="data")
    before = files(small_disk)
    with pytest.raises(WriteError, match="No space left on device") as raised:
        Opened(one(tensor("w", 256, 256))).save(path, external=form)
    assert raised.value.hint and "make room" in raised.value.hint
    assert files(small_disk) == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """Whenever it dies, a whole model is there: one whose tensors all have the same number."""
    child = """
        path, number = Path(sys.argv[1]), int(sys.argv[2])
        while True:
            model = Opened(one(*(numpy_helper.from_array(np.full((100, 100), number), f"t{i}") for i in range(8))))
            model.save(path, external="data")
            number += 1
            print(number, flush=True)
    """
    path = tmp_path / "m.onnx"
    for attempt in range(4):
        process = run(child, path, attempt * 1_000_000)
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(0.02 + 0.013 * attempt)
        process.kill()
        process.communicate()
        numbers = {int(number) for _, item in Opened.at(path).tensors() for number in item.numpy().ravel()}
        assert len(numbers) == 1


# ---- size ------------------------------------------------------------------------------------------------------------

PEAK = """
    def peak():  # not ru_maxrss, which a child inherits
        import re
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
"""


def huge(path: Path, gibibytes: int) -> None:
    """A model of so many GiB, half of them in the algorithm, that take no room on the disk."""
    size, count = 2**26, gibibytes * 16
    data = path.with_suffix(".data")
    items = [w(data.name, i * size, size, dims=[size // 4], name=f"t{i}") for i in range(count)]
    proto = one(tensor("lr"), *items[::2])
    proto.training_info.add().algorithm.CopyFrom(graph("algorithm", tensor("step"), *items[1::2]))
    path.write_bytes(proto.SerializeToString())
    data.touch()
    os.truncate(data, size * count)


def measure(code: str, *arguments: object) -> dict[str, float]:
    process = run(textwrap.dedent(PEAK) + textwrap.dedent(code), *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.slow
def test_four_gibibytes_open_and_save_quickly_and_small(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    huge(path, 4)
    before = written(tmp_path / "m.data")
    found = measure(
        """
        start = time.perf_counter()
        model = Opened.at(Path(sys.argv[1]))
        opened = time.perf_counter() - start
        assert sum(item.nbytes for _, item in model.tensors()) > 4 * 2**30
        assert model.tensors()[1][1].numpy()[-1] == 0
        start = time.perf_counter()
        model.set("lr", np.array(0.5, np.float32))
        model.set("t6", np.ones((512, 512), np.float32))
        model.save(Path(sys.argv[1]))
        print(json.dumps({"open": opened, "save": time.perf_counter() - start, "peak": peak()}))
        """,
        path,
    )
    assert found["open"] < 2
    assert found["save"] < 10  # little is written, but that waits for the disk, which others may be using
    assert found["peak"] < 300e6
    assert written(tmp_path / "m.data") == before
    assert (tmp_path / "m.1.data").stat().st_size == 2**20
    assert dict(Opened.at(path).tensors())["lr"].numpy() == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "safetensors"])
def test_streams_into_another_folder(form: str, tmp_path: Path) -> None:
    huge(tmp_path / "m.onnx", 1)
    (tmp_path / "new").mkdir()
    found = measure(
        """
        model = Opened.at(Path(sys.argv[1]))
        model.save(Path(sys.argv[2]), external=sys.argv[3])
        print(json.dumps({"peak": peak()}))
        """,
        tmp_path / "m.onnx",
        tmp_path / "new" / "m.onnx",
        form,
    )
    assert found["peak"] < 300e6
    assert sum(file.stat().st_size for file in (tmp_path / "new").iterdir()) > 2**30
