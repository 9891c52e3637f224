"""Models of many gigabytes: what need not be read is not read, what need not be written is not written.

Their files are sparse, so that they take no room here either.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from commands import failed, run
from marks import needs
from models import digits_mlp
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from runs import digits, state

import onward
from onward.cli import output_files
from onward.model import storage
from onward.model.storage.files import Sink, report_writes_to

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at holes, and at the peak memory in /proc")

MIB, GIB = 2**20, 2**30
WIDTH = 8192


def huge(folder: Path, layers: int) -> Path:
    """A classifier with layers of 256 MiB whose weights are in a file that takes no room on the disk."""
    path, size = folder / "huge.onnx", WIDTH * WIDTH * 4
    weights, nodes = [], []
    for i in range(layers):
        weights.append(_in_file(f"w{i}", [WIDTH, WIDTH], i * size, size))
        nodes += [
            helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"a{i}"]),
            helper.make_node("Relu", [f"a{i}"], [f"h{i + 1}"]),
        ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("h0", f"h{layers}")]
    graph = helper.make_graph(nodes, "huge", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), path)
    (folder / "huge.weights").touch()
    os.truncate(folder / "huge.weights", layers * size)
    return path


def _in_file(name: str, dims: list[int], offset: int, length: int) -> TensorProto:
    made = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "huge.weights", "offset": offset, "length": length}.items():
        made.external_data.add(key=key, value=str(value))
    return made


def written(file: Path) -> tuple[int, ...]:
    """Which file it is, and when it was last written."""
    info = os.stat(file)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def room(folder: Path) -> int:
    """What the files of a folder take on the disk, in bytes."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def measured(code: str, *arguments: object) -> dict[str, float]:
    """What a process says that works on a model: seconds of the CPU and bytes that it took more than before."""
    whole = f"{textwrap.dedent(_MEASURING)}\n{textwrap.dedent(code)}\nprint(json.dumps(found))"
    command = [sys.executable, "-c", whole, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_MEASURING = """
    import json, re, sys, time
    from pathlib import Path
    import numpy as np, onnx_ir as ir
    import onward
    from onward.checker import check
    from onward.cli.commands import app
    from typer.testing import CliRunner

    def peak():  # not ru_maxrss, which a child inherits
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    def command(*arguments):
        start = time.process_time()
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found[arguments[0]] = time.process_time() - start

    found, before = {}, peak()
"""


def test_six_gibibytes_are_prepared_shown_checked_changed_reset_and_stripped_in_seconds(tmp_path: Path) -> None:
    path = huge(tmp_path, 24)
    weights = written(tmp_path / "huge.weights")
    found = measured(
        """
        source, made = sys.argv[1:]
        command("prepare", source, "--loss", "mse", "--optimizer", "adamw", "-o", made)
        command("show", made)
        command("check", made)
        command("set", made, "group0/lr=3e-4")
        command("reset", made, "-o", made.replace("made", "reset"))
        command("strip", made, "-o", made.replace("made", "stripped"))
        command("lower", made, "-o", made.replace("made", "lowered"))
        found["memory"] = peak() - before
        """,
        path,
        tmp_path / "made.onnx",
    )
    assert found.pop("memory") < 120 * MIB
    assert all(seconds < 5 for seconds in found.values()), found  # most of it for importing
    assert room(tmp_path) < 2 * MIB
    assert written(tmp_path / "huge.weights") == weights
    made = onward.load(tmp_path / "made.onnx")
    assert sum(tensor.nbytes for value in made.initializers() if (tensor := value.const_value)) > 18 * GIB


@needs("torch")
def test_a_checkpoint_of_six_gibibytes_becomes_a_model_that_points_at_it(tmp_path: Path) -> None:
    """By names and shapes: numbers are compared only where these leave something open."""
    like = huge(tmp_path, 8)
    _sparse_checkpoint(tmp_path / "run.pt", 8)
    found = measured(
        """
        source, like, made = sys.argv[1:]
        command("show", source)
        command("convert", source, "--like", like, "--loss", "mse", "--dry-run")
        command("convert", source, "--like", like, "--loss", "mse", "--data", "overlay", "-o", made)
        found["memory"] = peak() - before
        """,
        tmp_path / "run.pt",
        like,
        tmp_path / "made.onnx",
    )
    assert found["memory"] < 120 * MIB and found["show"] + found["convert"] < 5, found
    assert {file.name for file in storage.data_files_of(tmp_path / "made.onnx")} == {"run.pt"}
    assert room(tmp_path) < 2 * MIB


@needs("torch")
def test_onnx_runtime_reads_weights_where_pytorch_has_saved_them(tmp_path: Path) -> None:
    import torch

    layers = {"fc1": torch.nn.Linear(64, 128), "relu": torch.nn.ReLU(), "fc2": torch.nn.Linear(128, 10)}
    module = torch.nn.Sequential(OrderedDict(layers))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    onnx.save(digits_mlp(128), tmp_path / "digits.onnx")
    made = onward.from_checkpoint(tmp_path / "run.pt", like=tmp_path / "digits.onnx", loss="cross_entropy")
    path = made.save(tmp_path / "made.onnx", data="overlay")
    assert storage.data_files_of(path) == [tmp_path / "run.pt"]
    image = torch.randn(3, 64)
    found = ort.InferenceSession(path).run(None, {"image": image.numpy()})[0]
    assert np.allclose(found, module(image).detach().numpy(), rtol=1e-5, atol=1e-5)


def _sparse_checkpoint(path: Path, layers: int) -> None:
    import torch

    def empty() -> Any:
        return torch.empty(WIDTH, WIDTH)  # whose memory nobody touches

    weights = {f"w{i}": empty() for i in range(layers)}
    optimizer = torch.optim.AdamW(map(torch.nn.Parameter, weights.values()))
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": empty(), "exp_avg_sq": empty()}
    with torch.serialization.skip_data():
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path)


def test_memory_while_tensors_are_copied_or_made(tmp_path: Path) -> None:
    """A repeated number, then the file of it, and a tensor that is computed when it is written."""
    found = measured(
        """
        folder, size = Path(sys.argv[1]), 2**26
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g")
        model = onward.Model(ir.Model(graph, ir_version=10))

        def hold(name, tensor):
            model.graph.register_initializer(ir.Value(name=name, const_value=tensor))

        hold("ones", ir.Tensor(np.broadcast_to(np.float32(1.5), (size,)), name="ones"))
        model.save(folder / "ones.onnx", data="data")
        found["repeated"] = peak() - before
        model = onward.load(folder / "ones.onnx")
        (folder / "copy").mkdir()
        model.save(folder / "copy/ones.onnx")
        found["copied"] = peak() - before
        made = lambda: ir.Tensor(np.arange(2**24, dtype=np.float32))
        hold("lazy", ir.LazyTensor(made, dtype=ir.DataType.FLOAT, shape=ir.Shape([2**24]), name="lazy"))
        model.save(folder / "copy/lazy.onnx", data="safetensors")
        found["lazy"] = peak() - before
        """,
        tmp_path,
    )
    assert found["repeated"] < 60 * MIB and found["copied"] < 60 * MIB, found
    assert found["lazy"] < (64 + 60) * MIB, found
    copy = onward.load(tmp_path / "copy/lazy.onnx")
    assert (copy.array("ones") == 1.5).all() and np.array_equal(copy.array("lazy"), np.arange(2**24))


@pytest.mark.parametrize("data", ["data", "safetensors"])
def test_files_with_holes_are_plain_files_to_others(tmp_path: Path, data: Any) -> None:
    onnx.save(digits_mlp(16384), tmp_path / "digits.onnx")
    made = onward.prepare(tmp_path / "digits.onnx", loss="cross_entropy", optimizer="adamw")
    path = made.save(tmp_path / "training.onnx", data=data)
    weights = digits_mlp(16384).ByteSize()
    assert room(tmp_path) < 2 * weights + MIB  # and twice more are zeros
    image = np.random.default_rng(0).random((2, 64), dtype=np.float32)
    sessions = [ort.InferenceSession(source) for source in (path, tmp_path / "digits.onnx")]
    assert np.array_equal(*(session.run(None, {"image": image})[0] for session in sessions))
    slots = [t for t in onnx.load(path).training_info[0].algorithm.initializer if "exp_avg" in t.name]
    assert len(slots) == 8 and not any(numpy_helper.to_array(slot, str(tmp_path)).any() for slot in slots)
    assert all(np.array_equal(v.const_value, made.array(name)) for name, v in ir.load(path).graph.initializers.items())
    if data == "safetensors":
        load_file = pytest.importorskip("safetensors.numpy").load_file
        assert not load_file(tmp_path / "training.safetensors")["fc1.weight/exp_avg"].any()


def test_tensors_in_the_model_file_leave_it_where_that_spares_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros, and weights that are in the file a second time, as what they are reset to."""
    made = onward.prepare(digits_mlp(4096), loss="cross_entropy", optimizer="adamw")
    spared = 3 * 4 * (64 * 4096 + 4096 + 10 * 4096 + 10)
    for name, limit in (("inside", spared + 100), ("outside", spared - 1)):
        monkeypatch.setattr(sys.modules["onward.model.storage.save"], "SPARED_LIMIT", limit)
        made.save(tmp_path / f"{name}.onnx")
    assert {file.name for file in tmp_path.iterdir()} == {"inside.onnx", "outside.onnx", "outside.data"}
    inside, outside = (onward.load(tmp_path / f"{name}.onnx") for name in ("inside", "outside"))
    assert all(np.array_equal(outside.array(v.name), inside.array(v.name)) for v in inside.initializers() if v.name)
    taken = (tmp_path / "outside.data").stat().st_blocks * 512
    assert taken < (tmp_path / "inside.onnx").stat().st_size / 3


@pytest.mark.parametrize("lacking", [(), ("copy_file_range",), ("copy_file_range", "SEEK_DATA")], ids=str)
def test_copies_are_equal_and_have_the_holes(
    tmp_path: Path, lacking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that begin and end in holes or not, at places that are no multiples of anything."""
    for name in lacking:
        monkeypatch.delattr(os, name)
    rng = np.random.default_rng(0)
    content = np.zeros(24 * MIB, np.uint8)
    for _ in range(4):
        start = int(rng.integers(0, 22 * MIB))
        content[start : start + 700_000] = rng.integers(0, 256, 700_000)
    with (tmp_path / "huge.weights").open("xb") as file:
        sink = Sink(file)
        sink.write(content.tobytes())
        sink.finish()
    assert (tmp_path / "huge.weights").read_bytes() == content.tobytes() and room(tmp_path) < 12 * MIB
    cuts = [0, *sorted(int(4 * cut) for cut in rng.integers(0, 6 * MIB, 5)), 24 * MIB]
    tensors = [_in_file(f"t{a}", [(b - a) // 4], a, b - a) for a, b in itertools.pairwise(cuts)]
    graph = helper.make_graph([], "g", [], [], tensors)
    onnx.save(helper.make_model(graph, ir_version=10), tmp_path / "m.onnx")
    (tmp_path / "copy").mkdir()
    onward.load(tmp_path / "m.onnx").save(tmp_path / "copy/m.onnx")
    copy = onward.load(tmp_path / "copy/m.onnx")
    assert b"".join(copy.array(t.name).tobytes() for t in tensors) == content.tobytes()
    assert room(tmp_path / "copy") < 12 * MIB


def test_training_replaces_what_were_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as with all tensors in one file, while the weights that were given stay as they are."""
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(4096), "inside.onnx")
    onward.load("inside.onnx").save("outside.onnx", data="data")
    given = Path("outside.data").read_bytes()
    for where in ("inside", "outside"):
        run("prepare", f"{where}.onnx", "--loss", "ce", "--optimizer", "adamw", "-o", f"{where}-training.onnx")
    assert Path("outside-training.data").stat().st_blocks * 512 < MIB
    runs = [
        onward.train(f"{where}-training.onnx", digits(64), epochs=1, run=where, quiet=True)
        for where in ("inside", "outside")
    ]
    inside, outside = (state(made) for made in runs)
    assert all(np.array_equal(outside[name], inside[name]) for name in inside)
    assert outside["fc1.weight/exp_avg"].any() and Path("outside.data").read_bytes() == given
    runs[1].best.save("best.onnx")
    assert {file.name for file in storage.data_files_of("best.onnx")} == {"best.data"}  # a run may delete its own


Arranged = Callable[[Path], onward.Model]


def _plain(folder: Path) -> onward.Model:
    huge(folder, 2)
    return onward.load(folder / "huge.onnx")


def _shifted(folder: Path) -> onward.Model:
    """Numbers that begin at an odd place."""
    return _referring(folder, (1, 4096))


def _overlapping(folder: Path) -> onward.Model:
    return _referring(folder, (0, 4096), (2048, 4096))


def _referring(folder: Path, *ranges: tuple[int, int]) -> onward.Model:
    """A model that was not read from a file, but made with references into one, as of a checkpoint."""
    (folder / "huge.weights").write_bytes(np.random.default_rng(0).bytes(8192))
    model = onward.Model(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="g"), ir_version=10))
    for i, (start, size) in enumerate(ranges):
        shape = ir.Shape([size // 4])
        tensor = ir.ExternalTensor(
            "huge.weights", start, size, ir.DataType.FLOAT, shape=shape, name=f"t{i}", base_dir=str(folder)
        )
        model.graph.register_initializer(ir.Value(name=f"t{i}", const_value=tensor))
    return model


def _owned(folder: Path) -> onward.Model:
    """Data of a model beside it, which a save there may delete."""
    model = _referring(folder, (0, 4096))
    model.save(folder / "own.onnx", data="data")
    return onward.load(folder / "own.onnx")


@pytest.mark.parametrize(
    ("arranged", "source", "target", "stays"),
    [
        (_plain, ".", ".", True),
        (_plain, "below", ".", True),
        (_plain, ".", "below", False),
        (_plain, "one", "other", False),
        (_owned, ".", ".", True),
        (_owned, "below", ".", False),
        (_shifted, ".", ".", False),
    ],
)
def test_what_the_new_model_can_point_at_stays(
    tmp_path: Path, arranged: Arranged, source: str, target: str, stays: bool
) -> None:
    for folder in (source, target):
        (tmp_path / folder).mkdir(exist_ok=True)
    model = arranged(tmp_path / source)
    numbers = {value.name or "": value.const_value.numpy() for value in model.initializers() if value.const_value}
    before = {file.name for file in tmp_path.rglob("*")}
    path = model.save(tmp_path / target / "new.onnx")
    assert {file.name for file in tmp_path.rglob("*")} - before == {"new.onnx", *([] if stays else ["new.data"])}
    again = onward.load(path)
    assert all(np.array_equal(again.array(name)[-9:], array[-9:], equal_nan=True) for name, array in numbers.items())
    other = tmp_path / target / "overlay.onnx"
    if stays:
        model.save(other, data="overlay")
        assert storage.data_files_of(other) == storage.data_files_of(path)
    else:
        with pytest.raises(onward.Error, match="it cannot point at"):
            model.save(other, data="overlay")
        assert not other.exists()


def test_a_model_that_no_save_would_ask_has_its_own_data(tmp_path: Path) -> None:
    """Files are deleted that no `.onnx` file beside them mentions."""
    model = _owned(tmp_path)
    path = model.save(tmp_path / "new.model")
    assert storage.data_files_of(path) == [tmp_path / "new.model.data"]


def test_of_ranges_that_overlap_one_stays(tmp_path: Path) -> None:
    model = _overlapping(tmp_path)
    path = model.save(tmp_path / "new.onnx")
    assert {file.name for file in storage.data_files_of(path)} == {"huge.weights", "new.data"}
    again = onward.load(path)
    assert all(again.array(name).tobytes() == model.array(name).tobytes() for name in ("t0", "t1"))


def test_commands_say_what_was_written_and_what_stayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    huge(tmp_path, 1)
    said = run("prepare", "huge.onnx", "--loss", "mse", "-o", "made.onnx").stdout
    assert "made.data (512.0 MiB, 0 B on disk); it reads tensors from huge.weights: keep unchanged" in said
    said = run("set", "made.onnx", "group0/lr=1").stderr
    assert said.count("made.data") == 1 and "it reads tensors from made.data and huge.weights: keep unchanged" in said
    Path("elsewhere").mkdir()
    message, hint = failed("strip", "made.onnx", "-o", "elsewhere/plain.onnx", "--data", "overlay")
    assert "it cannot point at `w0`" in message and str(tmp_path) in hint
    assert "elsewhere/plain.data (256.0 MiB" in run("strip", "made.onnx", "-o", "elsewhere/plain.onnx").stderr


def test_who_looks_on_is_told_of_every_byte(tmp_path: Path) -> None:
    class Counter:
        begun = done = 0

        def begin(self, size: int) -> None:
            self.begun += size

        def advance(self, size: int) -> None:
            self.done += size

    counter = Counter()
    made = onward.prepare(digits_mlp(4096), loss="cross_entropy", optimizer="adamw")
    (tmp_path / "copy").mkdir()
    with report_writes_to(counter):
        made.save(tmp_path / "m.onnx", data="data")
        first = counter.begun
        onward.load(tmp_path / "m.onnx").save(tmp_path / "copy/m.onnx")
    assert first > 3 * 4096 * 74 * 4 and counter.done == counter.begun == 2 * first


def test_a_person_sees_bytes_and_their_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(output_files, "err", lambda: console)
    with output_files.writing("writing m.onnx"):
        onward.prepare(digits_mlp(4096), loss="cross_entropy").save(tmp_path / "m.onnx", data="data")
    assert "writing m.onnx" in screen.getvalue() and "MiB" in screen.getvalue() and "/s" in screen.getvalue()
