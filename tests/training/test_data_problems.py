"""Columns find their inputs, or an error lists both sides; bad data are named, with file, column and row."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs
from models import digits_mlp

import onward
from onward.agreement.inputs import fit_inputs
from onward.errors import DataError, Error, InvalidModelError, UnknownNameError, UnsupportedError
from onward.frameworks.run_files import restore
from onward.training.data import Batches, Column, dataset, match, open_data
from onward.training.data.matching import InputType, fit

FLOAT, INT64, INT32, STRING = ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.STRING


def inputs(**specs: tuple[ir.DataType, list[Any] | None]) -> dict[str, ir.Value]:
    return {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=None if dims is None else ir.Shape(dims))
        for name, (dtype, dims) in specs.items()
    }


def columns(**specs: str) -> dict[str, Column]:
    """columns(x="float32 1 8 8")"""
    found = {}
    for name, spec in specs.items():
        dtype, *dims = spec.split()
        found[name.lstrip("_")] = Column(np.dtype(dtype), tuple(map(int, dims)))
    return found


IMAGES = inputs(image=(FLOAT, ["N", 1, 8, 8]), label=(INT64, ["N"]))

# ---- columns and inputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "want", "found"),
    [
        (columns(label="int64", image="float32 1 8 8"), IMAGES, {"image": ["image"], "label": ["label"]}),
        (columns(y="int32", x="float64 64"), IMAGES, {"image": ["x"], "label": ["y"]}),
        (columns(x="uint8 8 8", y="uint8", extra="float32 3"), IMAGES, {"image": ["x"], "label": ["y"]}),
        (columns(label="int64", id="int64", x="float32 64"), IMAGES, {"image": ["x"], "label": ["label"]}),
        (
            columns(_0="float32 5", _1="float32 5"),
            inputs(x=(FLOAT, [None, 5]), y=(FLOAT, [None, 5])),
            {"x": ["0"], "y": ["1"]},
        ),
        (columns(arr_0="int64", arr_1="float32 1 8 8"), IMAGES, {"image": ["arr_1"], "label": ["arr_0"]}),
        (
            columns(a="float64", b="int64", species="int64", c="float64"),
            inputs(x=(FLOAT, [None, 3]), species=(INT64, [None])),
            {"x": ["a", "b", "c"], "species": ["species"]},
        ),
        (
            columns(a="float64", b="float64", y="int64"),
            inputs(x=(FLOAT, [None, 2]), target=(INT32, [None, 1])),
            {"x": ["a", "b"], "target": ["y"]},
        ),
        (columns(ids="int64 128"), inputs(tokens=(INT64, ["N", "length"])), {"tokens": ["ids"]}),
        (columns(x="float32 7 3"), inputs(anything=(FLOAT, None)), {"anything": ["x"]}),
        (columns(x="bool"), inputs(mask=(ir.DataType.BOOL, ["N"])), {"mask": ["x"]}),
        (columns(x="float32"), inputs(y=(ir.DataType.BFLOAT16, ["N"])), {"y": ["x"]}),
        (columns(x="U5"), inputs(text=(STRING, ["N"])), {"text": ["x"]}),
    ],
)
def test_match(have: dict[str, Column], want: dict[str, ir.Value], found: dict[str, list[str]]) -> None:
    assert {name: list(binding.columns) for name, binding in match(have, want).items()} == found


@pytest.mark.parametrize(
    ("have", "want", "why"),
    [
        (columns(x="float32 64"), IMAGES, "no column can be input `label`"),
        (columns(x="float32 64", a="int64", b="int64"), IMAGES, "input `label` could be `a` or `b`"),
        (columns(x="float32 8 4 2", y="int64"), IMAGES, "no column can be input `image`"),
        (columns(image="float32 63", other="float32 64", label="int64"), IMAGES, r"`image` is float32\[63\]"),
        (columns(image="float32 64", label="float64"), IMAGES, r"takes int64\[\], but column `label` is float64\[\]"),
        (columns(x="float32 64", y="float32"), IMAGES, "no column can be input `label`"),
        (columns(x="U7", y="int64"), IMAGES, "no column can be input `image`"),
        (columns(x="complex64 64", y="int64"), IMAGES, "no column can be input `image`"),
        ({"x": Column(np.dtype(np.int64), (), ("cat", "dog"))}, inputs(y=(FLOAT, ["N"])), "no column can be"),
        (columns(a="int64", b="int64", c="int64"), inputs(x=(FLOAT, [None, 2]), y=(INT64, [None])), "`y` could be `a`"),
    ],
)
def test_no_match(have: dict[str, Column], want: dict[str, ir.Value], why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        match(have, want)
    for name in (*have, *want):
        assert f"\n    {name}: " in str(caught.value)
    assert caught.value.hint


def test_the_user_says_which() -> None:
    have = columns(pixels="float32 64", kind="int64", id="int64", a1="float32", a2="float32", b="float32")
    matched = match(have, IMAGES, {"label": "kind"})
    assert matched["label"].columns == ("kind",)
    both = inputs(x=(FLOAT, [None, 2]), y=(FLOAT, [None, 2]))
    assert match(have, both, {"x": "a*", "y": ["b", "a1"]})["y"].columns == ("b", "a1")
    same = inputs(x=(FLOAT, [None, 64]), target=(FLOAT, [None, 64]))  # an autoencoder
    assert match(have, same, {"x": "pixels", "target": "pixels"})["target"].columns == ("pixels",)
    with pytest.raises(UnknownNameError, match="no input `lable`") as caught:
        match(have, IMAGES, {"lable": "kind"})
    assert caught.value.hint == "did you mean `label`?"
    with pytest.raises(UnknownNameError, match="no column `kin`"):
        match(have, IMAGES, {"label": "kin"})


def test_an_ambiguous_match_says_how_to_map() -> None:
    with pytest.raises(DataError) as caught:
        match(columns(x="float32 64", a="int64", b="int64"), IMAGES)
    assert caught.value.hint == 'name its column: --column label=a, or columns={"label": "a"}'


def test_hints_of_columns_that_do_not_fit_never_offer_noise() -> None:
    """Only the input of a generator may be noise, and only where no column is left for it."""
    rows = {"x": (FLOAT, [None, 4]), "y": (INT64, [None])}
    names = ("a", "b", "c", "d", "e")
    few, many = (columns(**dict.fromkeys(names[:n], "float32"), kind="int64") for n in (3, 5))
    hints = {"`x` takes 4 numbers, `y` 1: the data have 4 columns of numbers; add what is missing": few}
    hints['name 4 columns: columns={"x": ["a", "b", "c", ...]}, or --column \'x=PATTERN\''] = {
        **many, "text": columns(text="U5")["text"]
    }  # fmt: skip
    for hint, have in hints.items():
        for may_be_noise in ((), ("x",)):
            with pytest.raises(DataError) as caught:
                match(have, inputs(**rows), may_be_noise=may_be_noise)
            assert caught.value.hint == hint
    gan = inputs(image=(FLOAT, [None, 8, 8]), z=(FLOAT, [None, 16]))
    for may_be_noise, offers in (((), False), (("image", "z"), True)):
        with pytest.raises(DataError) as caught:
            match(columns(image="float32 8 8"), gan, may_be_noise=may_be_noise)
        assert ("--noise z=normal" in str(caught.value.hint)) == offers
    with pytest.raises(DataError) as caught:
        match(columns(image="float32 8 8", w="float32 15"), gan, may_be_noise=("image", "z"))
    assert "noise" not in str(caught.value.hint)


ROWS = inputs(features=(FLOAT, [None, 3]), labels=(INT64, [None]))
AMOUNTS = inputs(features=(FLOAT, [None, 3]), target=(FLOAT, [None, 3]))
AREAS = columns(area="float32", rooms="float32", age="float32")


@pytest.mark.parametrize(
    ("have", "want", "wrong", "hint"),
    [
        (AREAS | columns(kind="float64"), ROWS, "labels", "convert them, as in `y.astype(np.int64)`"),
        (columns(features="float32 3", y="float32"), ROWS, "labels", "if `y` holds the labels, they are floats"),
        (AREAS, ROWS, "labels", "`features` takes 3 numbers, `labels` 1: the data have 3 columns of numbers; add"),
        (AREAS | columns(kind="int64"), AMOUNTS, "target", "if `kind` holds class labels: `--loss cross_entropy`"),
        (columns(features="float32 3", y="int64"), AMOUNTS, "target", "if `y` holds class labels"),
        (columns(features="float32 3", y="float32"), AMOUNTS, "target", "the data have 1 column of numbers; add"),
    ],
)
def test_labels_of_another_kind(have: dict[str, Column], want: dict[str, ir.Value], wrong: str, hint: str) -> None:
    with pytest.raises(DataError, match=f"no column can be input `{wrong}`") as caught:
        match(have, want, targets=[list(want)[1]])
    assert hint in (caught.value.hint or "")


TEXT = {"text": Column(np.dtype(object)), "label": Column(np.dtype(np.int64))}
TOKENS = inputs(input_ids=(INT64, ["N", 64]), label=(INT64, ["N"]))


@pytest.mark.parametrize(
    ("have", "want", "options", "hint"),
    [
        (TEXT, TOKENS, {}, "--preprocess 'input_ids=tokenize:wordpiece,vocabulary=vocab.txt,length=64'"),
        ({**TEXT, "input_ids": TEXT["text"]}, TOKENS, {}, "from the text in `input_ids`: --preprocess"),
        (columns(labels="int64 16"), inputs(labels=(INT64, ["N", 50])), {"class_targets": ["labels"]}, "ce:axis=-1"),
        (columns(next="int64 16"), inputs(labels=(INT64, ["N", 50])), {"class_targets": ["labels"]}, "ce:axis=-1"),
    ],
)
def test_hints_for_text_and_language_models(
    have: dict[str, Column], want: dict[str, ir.Value], options: dict[str, list[str]], hint: str
) -> None:
    with pytest.raises(DataError) as caught:
        match(have, want, **options)
    assert hint in str(caught.value.hint)


def test_columns_side_by_side_keep_their_order() -> None:
    data = open_data({"a": np.arange(3.0), "y": np.arange(3), "b": np.arange(3) + 10})
    wanted = inputs(x=(FLOAT, [None, 2, 1]), y=(INT64, [None]))
    batch = next(Batches(data, match(data.columns, wanted), shuffle=False).epoch(0))
    np.testing.assert_array_equal(batch["x"], np.float32([[[0], [10]], [[1], [11]], [[2], [12]]]))


DTYPES = {FLOAT: "float32", INT64: "int64", ir.DataType.BOOL: "bool"}


def counted(have: dict[str, Column], want: dict[str, ir.Value]) -> list[dict[str, tuple[str, ...]]]:
    """All ways, by trying them: each input a column, or one of them all that are left."""
    found = []
    wanted = {name: InputType.by(value) for name, value in want.items()}
    for several in [None, *wanted]:
        singles = [name for name in wanted if name != several]
        for chosen in itertools.permutations(have, len(singles)):
            way: dict[str, tuple[str, ...]] = {name: (column,) for name, column in zip(singles, chosen, strict=True)}
            left = tuple(name for name in have if name not in chosen)
            if several is not None:
                way[several] = left
            if (several is None or len(left) > 1) and all(fit(c, have, wanted[name]) for name, c in way.items()):
                found.append(way)
    return found


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_matching_finds_the_only_way(draw: st.DataObject) -> None:
    kinds = st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from([(), (), (2,), (3,)]))
    have = {
        f"c{i}": Column(np.dtype(DTYPES[dtype]), shape)
        for i, (dtype, shape) in enumerate(draw.draw(st.lists(kinds, min_size=1, max_size=5)))
    }
    want = inputs(
        **{
            f"i{i}": (dtype, None if dims == (9,) else [None, *dims])
            for i, (dtype, dims) in enumerate(
                draw.draw(
                    st.lists(
                        st.tuples(
                            st.sampled_from(list(DTYPES)), st.sampled_from([(), (1,), (2,), (3,), (None,), (9,)])
                        ),
                        min_size=1,
                        max_size=4,
                    )
                )
            )
        }
    )
    ways = counted(have, want)
    if len(ways) == 1:
        assert {name: binding.columns for name, binding in match(have, want).items()} == ways[0]
    else:
        with pytest.raises(DataError, match="could be" if ways else "the data do not fit"):
            match(have, want)


def test_matching_many_columns_takes_no_time() -> None:
    have = {f"c{i}": Column(np.dtype(np.int64)) for i in range(60)}
    many = inputs(**{f"i{i}": (INT64, ["N"]) for i in range(5)})
    wide = {f"c{i}": Column(np.dtype(np.float32)) for i in range(2000)}
    start = time.process_time()
    with pytest.raises(DataError, match=r"input `i0` could be `c0` or `c1` or `c2` or `c3` or \.\.\."):
        match(have, many)
    with pytest.raises(DataError, match="could be"):
        match(wide, inputs(x=(FLOAT, ["N", 1999]), y=(FLOAT, ["N"])))
    assert match({**wide, "y": Column(np.dtype(bool))}, inputs(x=(FLOAT, ["N", 2000]), y=(ir.DataType.BOOL, ["N"])))
    assert time.process_time() - start < 5


# ---- bad files -------------------------------------------------------------------------------------------------------


def _npy(path: Path, array: Any, **options: Any) -> Path:
    np.save(path / "x.npy", array, **options)
    return path / "x.npy"


def _text(path: Path, text: str | bytes) -> Path:
    file = path / "x.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def _cut(path: Path, by: int) -> Path:
    os.truncate(path, path.stat().st_size - by)
    return path


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez(path / "x.npz", **arrays)
    return path / "x.npz"


def _damaged(path: Path) -> Path:
    np.savez_compressed(path / "x.npz", x=np.random.default_rng(0).random(1000))
    with open(path / "x.npz", "r+b") as file:
        file.seek(3000)
        file.write(bytes(100))
    return path / "x.npz"


class Explosive:
    """Something that says so if it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda p: p / "x.npz", "x.npz` does not exist"),
    "unknown kind": (lambda p: [(p / "x.xyz").write_text("1"), p / "x.xyz"][1], r"the format of .*x.xyz \(`.xyz`\)"),
    "nothing in it": (lambda p: _text(p, ""), "x.csv is empty"),
    "npy of objects": (lambda p: _npy(p, np.array([Explosive()]), allow_pickle=True), "holds Python objects"),
    "npz of objects": (lambda p: _npz(p, x=np.array([{}, {}])), "array `x` holds Python objects"),
    "pickle": (lambda p: [(p / "x.npy").write_bytes(pickle.dumps(Explosive())), p / "x.npy"][1], "not a .npy file"),
    "npy truncated": (lambda p: _cut(_npy(p, np.zeros(9)), 8), "x.npy is truncated: it has 192 of 200 bytes"),
    "npz truncated": (lambda p: _cut(_npz(p, x=np.zeros(99)), 50), "x.npz is not a complete .npz file"),
    "npz damaged": (lambda p: _damaged(p), "x.npz is not a complete .npz file: "),
    "no rows": (lambda p: _npy(p, np.zeros((0, 4))), "x.npy has no rows"),
    "no columns": (lambda p: _npz(p), "x.npz has no columns"),
    "one number": (lambda p: _npz(p, x=np.float32(3)), "column `x` of x.npz is a single value"),
    "other lengths": (lambda p: _npz(p, x=np.zeros(3), y=np.zeros(4)), "`x` has 3, `y` has 4"),
    "other array": (lambda p: [f"a={_npz(p, x=np.zeros(3))}:y"], "has no column `y`"),
    "list of arrays": (lambda p: [np.zeros(3), np.zeros(3)], "could be columns or samples"),
    "object": (lambda p: 7, "cannot train on an object of type `int`"),
    "ragged list": (lambda p: {"x": [[1, 2], [3]]}, "column `x` of the data is not an array"),
    "empty folder": (lambda p: p, "is empty"),
    "bytes": (lambda p: b"x.npz", "cannot train on bytes"),
    "no path": (lambda p: "", "the path of the data is empty"),
    "long path": (lambda p: "x" * 300 + ".npz", "xxx.npz` does not exist"),
    "long path with a name": (lambda p: [f"a={'x' * 300}.npz"], "xxx.npz` does not exist"),
    "name twice": (lambda p: {1: np.zeros(3), "1": np.ones(3)}, "has 2 columns named `1`"),
    "no batches": (lambda p: lambda: 5, "an object of type `int`, not batches"),
    "csv without rows": (lambda p: _text(p, "a,b\n"), "x.csv has no rows"),
    "csv without header": (lambda p: _text(p, "1,2\n3,4\n"), "x.csv has no header"),
    "csv with a name twice": (lambda p: _text(p, "a,a\n3,4\n"), "has a duplicate or empty name: `a`"),
    "csv with a short line": (lambda p: _text(p, "a,b\n1,2\n\n3\n"), "line 4 of .*x.csv has 1 cells"),
    "csv in Latin-1": (lambda p: _text(p, "größe,b\n1,2\n".encode("latin-1")), "not text in UTF-8"),
    "csv with an open quote": (lambda p: _text(p, 'a,b\n1,"2\n'), "is not CSV after line 1"),
    "safetensors": (lambda p: [(p / "x.safetensors").write_bytes(b"123"), p / "x.safetensors"][1], "not a complete"),
    "safetensors header": (
        lambda p: [(p / "x.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"), p / "x.safetensors"][1],
        "not a complete .safetensors file: its header is not a JSON object",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, tmp_path: Path) -> None:
    make, message = BAD_FILES[case]
    with pytest.raises(DataError, match=message):
        open_data(make(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@needs("pyarrow")
@needs("PIL")
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device has no end."""
    picture = tmp_path / "photos" / "cat" / "1.png"
    picture.parent.mkdir(parents=True)
    endings = ("csv", "tsv", "npz", "npy", "safetensors", "parquet", "arrow", "feather")
    for path in [*(tmp_path / f"x.{ending}" for ending in endings), picture]:
        source = tmp_path / "photos" if path == picture else path
        os.mkfifo(path)
        with pytest.raises(DataError, match=rf"{path.name} is a pipe, not a file") as caught:
            open_data(source)
        assert caught.value.hint
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(DataError, match=rf"{path.name} is a device, not a file"):
            open_data(source)
        path.unlink()
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}', encoding="utf-8")
    os.mkfifo(tmp_path / "data.arrow")
    with pytest.raises(DataError, match=r"data.arrow is a pipe"):
        open_data(tmp_path)
    os.mkfifo(tmp_path / "adapter.safetensors")
    with pytest.raises(InvalidModelError, match="holds no adapter: a pipe, not a file"):
        onward.lora.load(onward.lora.add(digits_mlp(), targets="*", rank=2), tmp_path / "adapter.safetensors")
    for framework, name in (("torch", "run.pt"), ("keras", "run.keras")):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(InvalidModelError, match=f"{name}`: a device, not a file"):
            restore(framework, tmp_path / name)


def header(dtype: str, shape: str, order: str = "False") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


HEADERS: dict[str, tuple[bytes, str]] = {
    "negative": (header("'<f4'", "(-1, 2)"), "is not a shape"),
    "huge": (header("'<f4'", "(2**62,)".replace("2**62", str(2**62))), "larger than any file"),
    "beyond numpy": (header("'<f4'", f"({10**30},)"), "is not a shape"),
    "floats are not rounded": (header("'<f4'", "(1.5,)"), "is not a shape"),
    "true": (header("'<f4'", "(True, 2)"), "is not a shape"),
    "many dimensions": (header("'<f4'", str((1,) * 99)), "is not a shape"),
    "a list": (header("'<f4'", "[2]"), "order and shape"),
    "order": (header("'<f4'", "(2,)", "None"), "order and shape"),
    "records": (header("[('a', '<f4'), ('b', '<i8')]", "(2,)"), "records of several fields"),
    "nothing": (header("'|V0'", "(2,)"), "not a type of numbers"),
    "code": (header("__import__('os')", "(2,)"), "does not say type"),
    "comma": (header("'f4,f4'", "(2,)"), "not a type of numbers"),
    "unknown": (header("'<q9'", "(2,)"), "not a type of numbers"),
    "deep": (header("[" * 5000, "(2,)"), "does not say type"),
    "unhashable": (b"\x93NUMPY\x01\x00\x06\x00{[]:1}", "does not say type"),
    "long": (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}", "cut off"),
    "version": (b"\x93NUMPY\x09\x00\x02\x00{}", "version 9.0"),
    "truncated": (header("'<f4'", "(9,)"), "truncated"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(case: str, tmp_path: Path) -> None:
    """The same in a file, in an archive that is data, and in one that is given to a command."""
    data, message = HEADERS[case]
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "x.npy")
    for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", packing) as archive:
            archive.writestr("x.npy", data)
        with pytest.raises(DataError, match=message):
            open_data(tmp_path / "x.npz")
        with pytest.raises(DataError, match=message):
            fit_inputs(tmp_path / "x.npz", {})


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    arrays = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
        "big": np.arange(6, dtype=">i4").reshape(3, 2),
        "flags": np.array([True, False, True]),
        "half": np.arange(3, dtype=np.float16),
        "empty": np.zeros((3, 0), np.float32),
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    known = {name: ir.Value(name=name) for name in arrays}
    given = fit_inputs(tmp_path / "x.npz", known)
    data = open_data(tmp_path / "x.npz").take(np.arange(3))
    with np.load(tmp_path / "x.npz") as theirs:
        for name in arrays:
            np.testing.assert_array_equal(given[name], theirs[name], strict=False)
            np.testing.assert_array_equal(data[name], theirs[name], strict=False)
            assert given[name].flags.c_contiguous and given[name].dtype.isnative


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TENSORS: dict[str, tuple[Any, str]] = {
    "no table": ([], "is not a JSON object"),
    "no entry": ({"x": 5}, "has an unknown type"),
    "type": ({"x": ENTRY | {"dtype": ["F32"]}}, "has an unknown type"),
    "negative": ({"x": ENTRY | {"shape": [-2]}}, "is not a shape"),
    "text": ({"x": ENTRY | {"shape": "2"}}, "does not say its shape"),
    "true": ({"x": ENTRY | {"shape": [True, 2]}}, "is not a shape"),
    "huge": ({"x": ENTRY | {"shape": [2**62, 2**62]}}, "larger than any file"),
    "offsets": ({"x": ENTRY | {"data_offsets": [0, 8, 9]}}, "does not say its shape"),
    "fraction": ({"x": ENTRY | {"data_offsets": [0.0, 8.0]}}, "does not say its shape"),
    "before": ({"x": ENTRY | {"data_offsets": [-8, 0]}}, "outside of the file"),
    "after": ({"x": ENTRY | {"data_offsets": [8, 16]}}, "outside of the file"),
    "other size": ({"x": ENTRY | {"data_offsets": [0, 4]}}, "has 4 bytes, and its type and shape need 8"),
    "overlap": ({"x": ENTRY, "y": ENTRY}, "overlap"),
    "twice": (f'{{"x": {json.dumps(ENTRY)}, "x": {json.dumps(ENTRY)}}}', "`x` twice"),
    "deep": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_bad_safetensors(case: str, tmp_path: Path) -> None:
    content, message = TENSORS[case]
    text = (content if isinstance(content, str) else json.dumps(content)).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DataError, match=message):
        open_data(tmp_path / "x.safetensors")


@needs("pyarrow")
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_bad_arrow_files(suffix: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / f"x.{suffix}"

    def write(**data: Any) -> Path:
        return write_table(pa.table(data))

    def write_table(table: Any) -> Path:
        if suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        return path

    cases = [
        ({"x": [1, None, 3]}, r"column `x` of x\.\w+ has no value in row 1"),
        ({"x": [[1.0, 2.0], [3.0]]}, "lists of different lengths: 2 and 1"),
        ({"x": [[1.0, 2.0], [3.0, None]]}, "lists with missing numbers"),
        ({"x": [datetime.date(2000, 1, 1)]}, r"cannot train on column `x` of x\.\w+: it is text\[\] \(date32\[day\]\)"),
    ]
    for data, message in cases:
        opened = open_data(write(**data))
        with pytest.raises(DataError, match=message):
            opened.take(np.arange(len(opened)))
    with pytest.raises(DataError, match="has no rows"):
        open_data(write(x=pa.array([], pa.int64())))
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataError, match="has 2 columns named `x`"):
        open_data(write_table(twice))
    with pytest.raises(DataError, match="has a column without a name"):
        open_data(write_table(pa.table({"": [1]})))
    with pytest.raises(DataError, match="not a complete"):
        open_data(_cut(write(x=[1, 2]), 20))


@needs("pyarrow")
def test_bad_saved_datasets(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    with pytest.raises(DataError, match="holds 2 datasets: train, test") as caught:
        open_data(tmp_path)
    assert caught.value.hint == f"pass one: {tmp_path / 'train'} or {tmp_path / 'test'}"
    (tmp_path / "dataset_dict.json").unlink()
    for state, message in [({}, "does not name the files"), ({"_data_files": []}, "has no rows")]:
        (tmp_path / "state.json").write_text(json.dumps(state), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            open_data(tmp_path)


@needs("PIL")
def test_bad_images(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"no images in .*cat"):
        open_data(tmp_path)
    Image.new("L", (4, 5)).save(tmp_path / "cat" / "0.png")
    bad = tmp_path / "dog" / "0.png"
    for image, message in [
        (Image.new("L", (4, 6)), "0.png is 4 x 6 pixels, but the first image is 4 x 5"),
        (Image.new("RGB", (4, 5)), "0.png is RGB, but the first image is L"),
        (Image.new("I;16", (4, 5)), "0.png has more than 8 bits"),
    ]:
        image.save(bad)
        with pytest.raises(DataError, match=f"dog.{message}"):
            open_data(tmp_path).take(np.array([0, 1]))
    data = open_data(tmp_path)
    _cut(bad, 30)
    with pytest.raises(DataError, match=r"dog.0.png is not a complete image"):
        data.take(np.array([1]))
    bad.unlink()
    with pytest.raises(DataError, match=r"cannot read .*dog.0.png: No such file"):
        data.take(np.array([1]))


@pytest.mark.parametrize("module", ["pyarrow", "PIL"])
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=r"reading things needs (pyarrow|Pillow), which is not") as caught:
        dataset.optional_package(module, "reading things")
    assert caught.value.hint == "pip install 'onward[data]'"


# ---- bad values ------------------------------------------------------------------------------------------------------


def _run(source: Any, want: dict[str, ir.Value], **options: Any) -> list[dict[str, np.ndarray]]:
    data = open_data(source)
    return list(Batches(data, match(data.columns, want), size=2, seed=1, **options).epoch(0))


def test_bad_values_name_their_row(tmp_path: Path) -> None:
    x, y = np.ones((9, 3), np.float32), np.arange(9)
    want = inputs(x=(FLOAT, ["N", 3]), y=(INT32, ["N"]))
    _run({"x": np.where(x == 1, -np.inf, x), "y": y}, want, classes={"y": 9})  # as masks of attention have it
    for number, why in ((np.nan, r"NaN \(not a number\) in row 7"), (np.inf, "infinite in row 7")):
        for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
            wrong = x.astype(dtype)
            wrong[7, 1] = number
            with pytest.raises(DataError, match=f"column `x` is {why}"):
                _run({"x": wrong, "y": y}, want)
    large = x.astype(np.float64)
    large[7, 1] = -1e300
    with pytest.raises(DataError, match=r"column `x` is -1e\+300 in row 7 of the data, too large for float32"):
        _run({"x": large, "y": y}, want)

    x[7, 1] = np.nan
    with pytest.raises(DataError, match=r"column `x` is NaN \(not a number\) in row 7 of x.npz"):
        _run(_npz(tmp_path, x=x, y=y), want)
    x[7, 1] = 1
    with pytest.raises(DataError, match="label 8 in row 8 of the data is out of range: input `y` has 8 classes"):
        _run({"x": x, "y": y}, want, classes={"y": 8})
    with pytest.raises(DataError, match="label -100 in row 3"):
        _run({"x": x, "y": np.where(y == 3, -100, y)}, want, classes={"y": 9})
    assert len(_run({"x": x, "y": np.where(y == 3, -100, y)}, want, classes={"y": 9}, ignore=-100)) == 5
    with pytest.raises(DataError, match="column `y` is 4294967296 in row 5 of the data, too large for int32"):
        _run({"x": x, "y": np.where(y == 5, 2**32, y)}, want)
    with pytest.raises(DataError, match="sample 1 of batch 2"):
        bad = [(x[:2], y[:2]), (x[:2], y[:2]), (x[:2], np.array([0, 70]))]
        _run(lambda: iter(bad), want, classes={"y": 9})
    with pytest.raises(DataError, match="batch 1 of the stream has no column `y`"):
        _run(lambda: iter([{"x": x, "y": y}, {"x": x}]), want)


def test_bad_cells_name_their_line(tmp_path: Path) -> None:
    rows = ["x,y,comment"] + [f"{row}.5,{row},text" for row in range(5000)]
    want = inputs(x=(FLOAT, ["N"]), y=(INT64, ["N"]))
    rows[4321] = ",4319,text"
    path = _text(tmp_path, "\n".join(rows))
    with pytest.raises(DataError, match=r"line 4,322 of .*x.csv has no value in column `x`"):
        _run(path, want)
    data = open_data(path)
    assert len(list(Batches(data, {"y": "y"}).epoch(0))) == 157  # what is not used may have gaps
    rows[4321] = "nan,4319,text"
    with pytest.raises(DataError, match=r"NaN .* in line 4,322 of x.csv"):
        _run(_text(tmp_path, "\n".join(rows)), want)
    rows[4321] = "?,4319,text"
    with pytest.raises(DataError, match=r"column `x` is int64\[\] \(5000 classes, text: `\?` on line 4,322\)"):
        _run(_text(tmp_path, "\n".join(rows)), want)  # that most are numbers does not make classes amounts


def test_samples_must_be_alike() -> None:
    good = (np.zeros(3, np.float32), 1)
    for bad, message in [
        ((np.zeros(4, np.float32), 1), r"`0` is float32\[4\] in sample 1, but float32\[3\] in sample 0"),
        ((np.zeros(3, np.float32), 1.5), r"`1` is float64\[\] in sample 1, but int64\[\]"),
        ((np.zeros(3, np.float32),), "sample 1 has no `1`"),
    ]:
        with pytest.raises(DataError, match=message):
            open_data([good, bad]).take(np.array([0, 1]))


def test_other_classes_are_noticed(tmp_path: Path) -> None:
    training = open_data(_text(tmp_path, "x,kind\n1,cat\n2,dog\n"))
    matched = match(training.columns, inputs(x=(FLOAT, ["N"]), kind=(INT64, ["N"])))
    validation = open_data(_text(tmp_path, "x,kind\n1,dog\n2,eel\n"))
    with pytest.raises(DataError, match="the classes of column `kind` have changed: dog, eel, not cat, dog"):
        Batches(validation, matched)


# ---- files that change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "npz", pytest.param("arrow", marks=needs("pyarrow"))])
def test_a_file_that_shrinks_is_an_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the end of the process: that would be a SIGBUS."""
    monkeypatch.setattr("onward.training.data.files.LIMIT", 0)
    values = np.zeros((1000, 100))
    path = tmp_path / f"x.{kind}"
    if kind == "npy":
        np.save(path, values)
    elif kind == "npz":
        np.savez(path, x=values)
    else:
        import pyarrow as pa

        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values.ravel(), 100)})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    batches = Batches(open_data(path), {"x": "x"}, size=100, ahead=0).epoch(0)
    next(batches)
    path.rename(tmp_path / "moved")  # what is open stays readable
    next(batches)
    (tmp_path / "moved").rename(path)
    os.truncate(path, 1000)
    with pytest.raises(DataError, match=f"x.{kind}.* has shrunk since it was opened"):
        next(batches)


def test_a_csv_that_changes_is_an_error(tmp_path: Path) -> None:
    for other, message in [("x\n1\n", "it has another number of rows"), ("x\n1\nb\n", "has changed since")]:
        data = open_data(_text(tmp_path, "x\n1\n2\n"))
        _text(tmp_path, other)
        with pytest.raises(DataError, match=message):
            data.take(np.array([0]))


def test_nothing_is_loaded_that_is_not_used() -> None:
    code = "import sys, onward.training.data; print({'pyarrow', 'PIL', 'torch', 'pandas'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_settings_are_checked() -> None:
    data = open_data({"x": np.arange(5)})
    wrong: list[Callable[[], Any]] = [
        lambda: Batches(data, {"x": "x"}, 0),
        lambda: Batches(data, {"x": "x"}, last="cut"),  # type: ignore[arg-type]
        lambda: Batches(data, {"x": "y"}),
        lambda: data.take(np.array([0]), ["y"]),
    ]
    for make in wrong:
        with pytest.raises(Error):
            make()
