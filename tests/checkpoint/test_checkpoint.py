"""Checkpoints of others: what Onward reads without executing anything is what their own loaders give."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from campaign.checkpoints import pickled
from marks import needs
from paths import CHECKPOINTS
from typer.testing import CliRunner

import onward
from onward.checkpoint.embedded import FACT
from onward.checkpoint.exporting import checkpoint_of_model
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats import is_checkpoint
from onward.checkpoint.formats.pytorch import FORMAT
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.checkpoint.pytorch.pickle_objects import Attributed, Name, Object, write_pickle
from onward.checkpoint.pytorch.pickle_reader import read_pickle
from onward.cli.commands import app
from onward.recipe.spec import parse
from onward.run_state.tensors import ArrayTensor, ScatteredTensor, StoredTensor


def same(ours: Any, theirs: Any) -> None:
    """Ours is what PyTorch makes of a file, as data."""
    torch = pytest.importorskip("torch")
    if isinstance(theirs, torch.Tensor):
        bits = {2: torch.int16, 1: torch.int8}.get(theirs.element_size())
        narrow = bits is not None and theirs.is_floating_point()
        array = ours.array()
        assert np.array_equal(
            array.view(f"i{array.itemsize}") if narrow else array,
            (theirs.view(bits) if narrow else theirs).detach().numpy(),
        )
    elif isinstance(theirs, Mapping):
        assert isinstance(ours, dict) and list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value)
        if hasattr(theirs, "_metadata"):
            assert isinstance(ours, Attributed) and ours.attributes["_metadata"] == theirs._metadata
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same(mine, other)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    else:
        assert ours == theirs and type(ours) is type(theirs)


@needs("torch")
def test_what_torch_saves(tmp_path: Path) -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.named_parameters(), lr=1e-3)
    module(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    base = torch.arange(12.0)
    tree = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generators": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
        "shared": (base, base[3:7], base.reshape(3, 4).T, torch.zeros(0, 3), torch.tensor(3)),
        "types": [torch.ones(3).to(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8,
                  torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)],
        "parameter": torch.nn.Parameter(torch.rand(2)),
        "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(2, 3)), np.arange(3, dtype=">f4")],
        "plain": [1, 2.5, "text", b"bytes", None, True, {1, 2}, frozenset({3}), 1j, np.float32(2), OrderedDict(a=1)],
    }  # fmt: skip
    path = tmp_path / "x.pt"
    torch.save(tree, path)
    found = read_torch_file(path)
    same(found, torch.load(path, weights_only=False))
    whole, part = found["shared"][:2]
    assert (part.path, part.offset) == (whole.path, whole.offset + 12)
    assert whole.is_contiguous and not found["shared"][2].is_contiguous
    checkpoint = onward.open_checkpoint(path)
    assert list(checkpoint.tensors) == list(module.state_dict())
    (kept,) = checkpoint.optimizers
    assert kept.families == ("adamw",) and kept.has_names
    assert checkpoint.missing == ("schedule", "loss", "gradient clipping", "gradient accumulation")
    assert checkpoint.step == 1


@needs("torch")
def test_classes_become_data_and_nothing_runs(tmp_path: Path) -> None:
    import torch

    class Harm:
        def __init__(self, *call: Any):
            self._call = call

        def __reduce__(self) -> Any:
            return self._call

    marker = tmp_path / "executed"
    path = tmp_path / "x.pt"
    harm = Harm(os.system, (f"touch {marker}",))
    evaluated = Harm(eval, (f"open({str(marker)!r}, 'w')",))
    torch.save({"a": harm, "b": evaluated, "c": argparse.Namespace(rate=1), "d": defaultdict(list, k=[1])}, path)
    found = read_torch_file(path)
    assert str(found["a"].of).endswith(".system") and found["a"].arguments == (f"touch {marker}",)
    assert isinstance(found["c"], Object) and found["c"].state == {"rate": 1}
    assert found["d"] == {"k": [1]}
    names = onward.open_checkpoint(path).executes
    assert any(name.endswith(".system") for name in names) and any(name.endswith(".eval") for name in names)
    said = CliRunner().invoke(app, ["show", str(path)]).stdout
    assert ".system" in said and not marker.exists()


def test_what_a_trusting_loader_would_execute(tmp_path: Path) -> None:
    """Also what a pickle calls and throws away, and what it calls before it breaks off."""
    call = b"cposix\nsystem\n(X\x04\x00\x00\x00\x1b[2mtR0"
    whole = pickled({"epoch": 1})
    for name, content, code in (("a.pt", whole[:2] + call + whole[2:], 0), ("b.pt", whole[:2] + call + b"\xff", 1)):
        path = tmp_path / name
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", content)
        said = CliRunner().invoke(app, ["show", "--unsafe", str(path)])
        assert said.exit_code == code and said.stdout == f"{name}  posix.system('\\x1b[2m')\n"
        found = json.loads(CliRunner().invoke(app, ["show", "--unsafe", "--json", str(path)]).stdout)
        assert found == [{"file": name, "name": "posix.system", "call": "('\\x1b[2m')"}]
    assert onward.open_checkpoint(tmp_path / "a.pt").executes == ("posix.system",)
    said = CliRunner().invoke(app, ["show", "--unsafe", str(CHECKPOINTS / "trainer")])
    assert "training_args.bin  transformers.training_args.TrainingArguments()" in said.stdout


def test_files_that_were_cut_off_are_called_so(tmp_path: Path) -> None:
    good = (CHECKPOINTS / "lightning.ckpt").read_bytes()
    for size in (100, 1000, len(good) - 1):
        path = tmp_path / "x.ckpt"
        path.write_bytes(good[:size])
        with pytest.raises(onward.Error, match=r"is not a whole file of `torch\.save`: it does not end") as caught:
            onward.open_checkpoint(path)
        assert "cut off" in str(caught.value.hint)
    folder = tmp_path / "trainer"
    shutil.copytree(CHECKPOINTS / "trainer", folder)
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:1000])
    with pytest.raises(onward.Error, match="not a whole file"):  # and not a checkpoint without an optimizer
        onward.open_checkpoint(folder)


@needs("torch")
def test_tensors_that_are_larger_than_their_files(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint

    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    with pytest.raises(onward.Error, match="repeats its data"):
        onward.open_checkpoint(tmp_path / "x.pt")
    torch.save({"w": torch.ones(1).expand(1000)}, tmp_path / "x.pt")
    assert onward.open_checkpoint(tmp_path / "x.pt").tensors["w"].array().sum() == 1000
    torch.distributed.checkpoint.save({"w": torch.zeros(4)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    table = tmp_path / "dcp" / ".metadata"
    for size, said in ((1 << 44, "in none of its pieces"), (1 << 61, "which none can have")):
        found = pickle.loads(table.read_bytes())
        found.state_dict_metadata["w"].size = torch.Size([size])
        table.write_bytes(pickle.dumps(found))
        with pytest.raises(onward.Error, match=said):
            onward.open_checkpoint(tmp_path / "dcp").tensors["w"].array()


FILES = [
    "trainer/optimizer.pt",
    "trainer/scheduler.pt",
    "trainer/rng_state.pth",
    "accelerate/optimizer.bin",
    "accelerate/random_states_0.pkl",
    "lightning.ckpt",
]
HOSTILE = {
    "a registry": b"\x80\x02\x82\x01.",
    "attributes for a list": b"\x80\x02]}b.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "an enormous bytearray": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b"x.",
    "an enormous text": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.",
    "nothing": b"",
    "no end": b"\x80\x02K\x01",
    "a stack that is empty": b"\x80\x020.",
    "something elsewhere": b"\x80\x02K\x01Q.",
    "no such protocol": b"\x80\xffN.",
    "an array without bytes": pickled(np.arange(3.0)).replace(b"f8", b"O8"),
    "an array that is too short": pickled(np.arange(3.0)).replace(b"K\x03\x85", b"K\x7f\x85"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_pickles_that_make_no_sense(case: str) -> None:
    with pytest.raises(onward.Error):
        read_pickle(HOSTILE[case], "x.pt")


def _doubled(times: int, start: bytes, pair: Callable[[bytes], bytes]) -> bytes:
    """A pickle of a part that holds the one before twice, so many times."""
    for number in range(times):
        start += b"r" + struct.pack("<I", number) + b"0" + pair(b"j" + struct.pack("<I", number))
    return start


_TUPLES = _doubled(60, b")", lambda part: part + part + b"\x86")
_BOMBS = {
    "tuples": b"]" + _TUPLES + b"a.",
    "lists": _doubled(60, b"]", lambda part: b"](" + part + part + b"e") + b".",
    "dicts": _doubled(60, b"}", lambda part: b"}(K\x01" + part + b"K\x02" + part + b"u") + b".",
    "a key": b"}" + _TUPLES + b"Ns.",
    "keys": b"}(" + _TUPLES + b"Nu.",
    "a dict": b"(" + _TUPLES + b"Nd.",
    "a set": b"\x8f(" + _TUPLES + b"\x90.",
    "a frozen set": b"(" + _TUPLES + b"\x91.",
    "a call of a set": b"cbuiltins\nset\n(](" + _TUPLES + b"etR.",
    "an ordered dict": b"ccollections\nOrderedDict\n(](" + _TUPLES + b"N\x86etR.",
    "attributes": b"ccollections\nOrderedDict\n)R" + _TUPLES + b"b.",
    "a type": b"cnumpy\ndtype\n" + _TUPLES + b"\x85R.",
    "a list that holds itself": b"]r\0\0\0\0j\0\0\0\0a.",
    "a deep key": b"})" + b"\x85" * 100_000 + b"Ns.",
    "deep lists": b"]" * 5000 + b"a" * 4999 + b".",
    "a long text again and again": b"](X\x50\xc3\0\0" + b"x" * 50_000 + b"q\0" + b"h\0" * 10_000 + b"e.",
    "characters": b"(X\x80\x96\x98\0" + b"x" * 10_000_000 + b"q\0" + b"ctorch\nSize\nh\0\x85R0" * 40 + b"N\x85.",
    "an integer": b"\x8b\x10\x27\0\0" + b"\x7f" * 10_000 + b".",
    "arguments": b"ca\nNode\n" + _TUPLES + b"\x85R.",
    "equal hashes": b"}(" + b"".join(pickle.dumps(n << 61, 2)[2:-1] + b"N" for n in range(1, 99)) + b"u.",
    "a long name": b"cx\n" + b"x" * 10_000 + b"\n.",
}


@pytest.mark.parametrize("bomb", _BOMBS)
def test_pickles_that_are_bombs(bomb: str) -> None:
    """Small files that take years or all memory: to hash, to print, to walk over, or to make."""
    with pytest.raises(onward.Error, match="damaged"):
        read_pickle(b"\x80\x02" + _BOMBS[bomb], "x", makers={("torch", "Size"): len})


def test_pickles_in_archives_are_not_packed(tmp_path: Path) -> None:
    """PyTorch packs nothing, and 65 KB would unpack to a list of 64 million."""
    for main, order in ((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED), (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02].", main)
            archive.writestr("x/byteorder", b"little", order)
        with pytest.raises(onward.Error, match="is compressed"):
            read_torch_file(tmp_path / "x.pt")


def test_objects_that_know_each_other() -> None:
    """As those of configurations do: each is there once, and a dict may name one often."""
    one = Object(Name("a", "Node"))
    one.state = {"parent": one, "others": [one] * 9}
    found = read_pickle(write_pickle({"x": one, "y": [one, one]}), "x")
    assert found["x"].state["parent"] is found["x"] is found["y"][1]


@needs("torch")
@pytest.mark.parametrize("file", FILES)
def test_recorded_files(file: str) -> None:
    import torch

    same(read_torch_file(CHECKPOINTS / file), torch.load(CHECKPOINTS / file, weights_only=False))


def test_a_checkpoint_of_the_trainer() -> None:
    checkpoint = onward.open_checkpoint(CHECKPOINTS / "trainer")
    assert checkpoint.title == "Hugging Face Trainer"
    assert checkpoint.configuration["architectures"] == ["BertForSequenceClassification"]
    (optimizer,) = checkpoint.optimizers
    assert optimizer.families == ("adamw",) and not optimizer.has_names
    assert [group.settings["weight_decay"] for group in optimizer.groups] == [0.1, 0.0]
    assert checkpoint.progress == {"global_step": 3, "epoch": 0.5, "max_steps": 6, "num_train_epochs": 1}
    assert checkpoint.arguments["warmup_steps"] == 1 and checkpoint.arguments["learning_rate"] == 0.01
    assert {each.kind for each in checkpoint.randomness} == {"torch, CPU", "numpy", "Python"}
    assert checkpoint.missing == ("parameter names of the optimizer", "loss")


def test_checkpoints_of_accelerate_and_lightning() -> None:
    one, other = (
        onward.open_checkpoint(CHECKPOINTS / "accelerate"),
        onward.open_checkpoint(CHECKPOINTS / "lightning.ckpt"),
    )
    assert (one.title, other.title) == ("Accelerate", "Lightning 2.6.6")
    assert [each.optimizers[0].families for each in (one, other)] == [("sgd",), ("adam",)]
    assert [list(each.tensors) for each in (one, other)] == [["bias", "weight"], ["layer.weight", "layer.bias"]]
    assert one.schedules[0].state["step_size"] == 2 and other.schedules[0].state["gamma"] == 0.9
    assert other.progress == {"global_step": 4, "epoch": 2} and other.arguments == {"width": 2}
    assert "state of random numbers" in other.missing


@needs("torch")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.rand(5, 4)).sum().backward()
    optimizer.step()
    weights, kept = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": kept, "step": 5}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint = onward.open_checkpoint(tmp_path / "dcp")
    assert checkpoint.progress == {"step": 5}
    for name, tensor in weights.items():
        found = checkpoint.tensors[name]
        assert isinstance(found, ScatteredTensor) and np.array_equal(found.array(), tensor.numpy())
    (ours,) = checkpoint.optimizers
    assert ours.families == ("adamw",) and ours.has_names
    for name, slots in kept["state"].items():
        assert np.array_equal(ours.slots[name]["exp_avg_sq"].array(), slots["exp_avg_sq"].numpy())


def test_pieces_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "data"
    np.arange(8, dtype=np.float32).tofile(path)
    half = lambda start: lambda: StoredTensor(path, start * 4, np.dtype(np.float32), (4,), (1,))
    kind = np.dtype(np.float32)
    whole = ScatteredTensor(kind, (8,), (((0,), half(0)), ((4,), half(4))))
    assert np.array_equal(whole.array(), np.arange(8))
    for pieces in ((((0,), half(0)),), (((0,), half(0)), ((6,), half(4)))):
        with pytest.raises(onward.Error):
            ScatteredTensor(kind, (8,), pieces).array()


def test_large_files_open_at_once(tmp_path: Path) -> None:
    """64 GB, of which nothing is read: the file is a hole."""
    path = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"BF16","shape":[32,1073741824],"data_offsets":[0,68719476736]}}'
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (64 << 30))
    checkpoint = onward.open_checkpoint(path)
    assert checkpoint.tensors["w"].nbytes == 64 << 30
    assert checkpoint.tensors["w"].array()[31, -1] == ml_dtypes.bfloat16(0)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "runs" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "runs" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(onward.Error, match="no known checkpoint format") as caught:
        onward.open_checkpoint(tmp_path / "runs")
    assert "checkpoint-3" in str(caught.value.hint)
    with pytest.raises(onward.Error, match="does not exist"):
        onward.open_checkpoint(tmp_path / "nothing")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02N.")
    assert onward.open_checkpoint(tmp_path / "x.pt").tensors == {}


@needs("torch")
def test_files_of_old_pytorch(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(onward.Error, match=r"before 1\.6"):
        onward.open_checkpoint(tmp_path / "old.pt")


def recorded() -> list[str]:
    found = [each for each in (*CHECKPOINTS.iterdir(), *CHECKPOINTS.glob("*/*")) if is_checkpoint(each)]
    return sorted(str(each.relative_to(CHECKPOINTS)) for each in found if each.parent not in found)


@pytest.mark.parametrize("name", recorded())
def test_every_refusal_says_what_to_do(tmp_path: Path, name: str) -> None:
    """Of checkpoints in which a file breaks off, or holds something else."""
    source = CHECKPOINTS / name
    files = [each for each in sorted(source.rglob("*")) if each.is_file()] if source.is_dir() else [source]
    refused = 0
    for number, file in enumerate(files[:30]):
        place = tmp_path / str(number) / source.name
        place.parent.mkdir()
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
        for content in (file.read_bytes()[: file.stat().st_size // 2], b"{}" if file.suffix == ".json" else b"\xff"):
            (place / file.relative_to(source)).write_bytes(content)
            try:
                onward.open_checkpoint(place)
            except onward.Error as error:
                assert error.hint, f"{file}: {error}"
                refused += 1
    assert refused


def _without(part: str) -> Any:
    """A writer that loses or changes something."""

    def write(checkpoint: Checkpoint, path: Path) -> None:
        tensors, (optimizer,) = dict(checkpoint.tensors), checkpoint.optimizers
        slots = {name: dict(kept) for name, kept in optimizer.slots.items()}
        if part == "tensor":
            del tensors["0.bias"]
        elif part == "value":
            tensors["0.bias"] = ArrayTensor(tensors["0.bias"].array() + 1)
        elif part == "shape":
            tensors["0.bias"] = ArrayTensor(np.zeros(3, np.float32))
        elif part == "slot":
            del slots["0.bias"]["exp_avg"]
        elif part == "all":
            path.write_bytes(b"PK")
            return
        changed = dataclasses.replace(optimizer, slots=slots)
        assert FORMAT.write is not None
        step = 7 if part == "step" else checkpoint.step
        progress = {"step": step}
        FORMAT.write(
            dataclasses.replace(
                checkpoint, format="x", tensors=tensors, optimizers=(changed,), step=step, progress=progress, trees={}
            ),
            path,
        )

    return FORMAT._replace(write=write)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("tensor", "`torch` would lose the tensor `0.bias`"),
        ("value", "`torch` would change the tensor `0.bias`"),
        ("shape", "would give the tensor `0.bias` another shape"),
        ("slot", "would lose the optimizer state `0.bias/exp_avg`"),
        ("step", "would hold step 7 in place of 3"),
        ("all", "`torch` could not be read back"),
    ],
)
def test_what_is_written_is_read_back_first(
    part: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it stays if a part did not survive; what was there before does."""
    target = tmp_path / "out.pt"
    onward.to_checkpoint(CHECKPOINTS / "plain.pt", target, format="torch")
    before = target.read_bytes()
    monkeypatch.setattr("onward.checkpoint.exporting.format_named", lambda name: _without(part))
    with pytest.raises(onward.Error, match=said) as caught:
        onward.to_checkpoint(CHECKPOINTS / "plain.pt", target, format="torch")
    assert caught.value.hint and target.read_bytes() == before and [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("format", ["torch", "hf", "dcp", "lightning", "accelerate", "megatron"])
@pytest.mark.parametrize("source", ["tensorflow", "flax.msgpack"])
def test_state_without_an_optimizer_is_not_written_for_pytorch(source: str, format: str, tmp_path: Path) -> None:
    """Without settings and steps, `Adam.step()` would raise there."""
    with pytest.raises(onward.Error, match="does not name its optimizer") as caught:
        onward.to_checkpoint(CHECKPOINTS / source, tmp_path / "out", format=format)
    assert "--like" in str(caught.value.hint) and not [*tmp_path.iterdir()]


def test_coupled_decay_is_not_written_for_megatron(tmp_path: Path) -> None:
    """Its Adam is AdamW, whatever the settings say."""
    source = onward.open_checkpoint(CHECKPOINTS / "lightning.ckpt")
    (optimizer,) = source.optimizers
    spec = parse("adam:lr=0.1,weight_decay=0.1,variant=torch")
    groups = tuple(dataclasses.replace(group, optimizer=spec) for group in optimizer.groups)
    changed = dataclasses.replace(source, optimizers=(dataclasses.replace(optimizer, groups=groups),))
    with pytest.raises(onward.Error, match="decouples weight decay"):
        onward.to_checkpoint(changed, tmp_path / "out", format="megatron")
    onward.to_checkpoint(source, tmp_path / "out", format="megatron")


@pytest.mark.parametrize(
    "tree", ["[" * 100_000, '{"checkpoint": {"$dict": [[2305843009213693951, 1]]}, "names": {}, "turned": []}']
)
def test_what_a_training_model_keeps_may_be_a_bomb(tree: str) -> None:
    model = onward.from_checkpoint(CHECKPOINTS / "ort" / "entropy")
    model.step().algorithm.metadata_props[FACT] = tree
    with pytest.raises(onward.Error, match="keeps is damaged"):
        checkpoint_of_model(model)


def test_parts_without_a_place_are_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`megatron` does not hold: schedule, averages, loss scale, random states"):
        onward.to_checkpoint(CHECKPOINTS / "plain.pt", tmp_path / "out", format="megatron")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onward.to_checkpoint(CHECKPOINTS / "plain.pt", tmp_path / "out.pt", format="torch")


def test_states_that_are_too_deep_to_be_searched_stay_as_stored(tmp_path: Path) -> None:
    weight = ArrayTensor(np.ones((2, 3), np.float32))
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "params": [0]}
    state = {0: {"step": ArrayTensor(np.asarray(3, np.float32)), "exp_avg": weight, "exp_avg_sq": weight}}
    for depth in range(6):
        tree: Any = {"state": state, "param_groups": [settings]}
        for _ in range(depth):
            tree = {"inner": tree}
        write_torch_file(tmp_path / "x.pt", {"model": {"w": weight}, "outer": tree})
        assert len(onward.open_checkpoint(tmp_path / "x.pt").optimizers) == (depth < 3)
        onward.to_checkpoint(tmp_path / "x.pt", tmp_path / "y.pt", format="torch")
        again = read_torch_file(tmp_path / "y.pt")["outer"]
        for _ in range(depth):
            again = again["inner"]
        assert again["param_groups"] == [settings]


@needs("torch")
def test_parameters_are_numbered_in_the_order_of_the_module(tmp_path: Path) -> None:
    """Other frameworks go by names: in a file of PyTorch, state and weights have one order."""
    import torch

    source = onward.open_checkpoint(CHECKPOINTS / "plain.pt")
    (optimizer,) = source.optimizers
    (group,) = optimizer.groups
    turned = dataclasses.replace(group, parameters=tuple(sorted(group.parameters, key=str, reverse=True)))
    named = dataclasses.replace(optimizer, groups=(turned,), variant="optax")
    other = dataclasses.replace(source, format="orbax", optimizers=(named,), trees={})
    onward.to_checkpoint(other, tmp_path / "out.pt", format="torch")
    tree = torch.load(tmp_path / "out.pt", weights_only=True)
    weights = [tensor.shape for name, tensor in tree["model"].items() if name in group.parameters]
    assert [slots["exp_avg"].shape for slots in tree["optimizer"]["state"].values()] == weights
