"""The command line: what each command does, says and returns, and how it fails."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import failed, run
from models import digits_mlp, small_cnn
from typer.testing import CliRunner

import onward
from onward import transform
from onward.cli import app as application
from onward.cli.app import BUG
from onward.cli.commands import app
from onward.engines import ENGINES, FRAMEWORKS
from onward.errors import MEMORY_HINT

BUILD = ["train", "evaluate", "predict", "prepare", "gradient", "lower", "pipeline", "page", "convert"]
LOOK = ["check", "check-gradients", "verify", "engines", "describe", "diff", "report", "plan"]
CHANGE = ["set", "rename", "prefix", "merge", "extract", "inline", "opset", "data", "reset", "strip", "refresh"]
COMMANDS = [*BUILD, *LOOK, *CHANGE]
RECIPE = ["--loss", "cross_entropy", "--optimizer", "adamw:lr=1e-3", "--schedule", "cosine:steps=1000,warmup=50"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with `digits.onnx`, and `training.onnx` made from it."""
    monkeypatch.chdir(tmp_path)
    onnx.save(digits_mlp(), "digits.onnx")
    onward.prepare("digits.onnx", loss="cross_entropy", optimizer="adamw", schedule="cosine:steps=9").save(
        "training.onnx"
    )
    return tmp_path


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onward", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def logits(path: str) -> np.ndarray:
    images = np.random.default_rng(0).random((3, 64), np.float32)
    return ort.InferenceSession(path).run(None, {"image": images})[0]


# ---- help and version ------------------------------------------------------------------------------------------------


def test_help_lists_all_commands_in_groups() -> None:
    text = run("--help").stdout
    headings = [line for line in text.splitlines() if line.endswith(":")]
    assert headings == ["Train and build:", "Check and show:", "Change a model and keep its training:", "Options:"]
    assert re.findall(r"^  ([\w-]+)  +[A-Z]", text, re.MULTILINE) == COMMANDS
    assert run().stdout == text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    text = run(command, "--help").stdout
    assert run(command, "-h").stdout == text
    assert f"Usage: onward {command} " in text
    examples = text.partition("Examples:\n")[2]
    assert len(re.findall(rf"^  onward {command}(?: |$)", examples, re.MULTILINE)) >= 2
    used = set(re.findall(r"(?<= )--[\w-]+", examples))
    assert used <= set(re.findall(r"^  (?:-\w, |    )(--[\w-]+)", text, re.MULTILINE))


def test_version() -> None:
    from importlib.metadata import version

    assert run("--version").stdout == f"onward {version('onward')}\n"


def test_help_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5  # whatever else the machine does


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['onward', {!r}]\nfrom onward.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    code += "print([m for m in ('numpy', 'onnx', 'onnx_ir', 'onnxruntime', 'torch') if m in sys.modules])"
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code.format(flag)], capture_output=True, text=True, timeout=60)
        assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_engines_are_looked_at_without_being_loaded() -> None:
    code = "import sys; sys.argv = ['onward', 'engines']\nfrom onward.cli import main\n"
    code += f"try: main()\nexcept SystemExit: pass\nprint([m for m in {FRAMEWORKS} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *rows, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert [row.split()[0] for row in rows] == ["engine", *ENGINES]
    assert all("--devices" in row or "not installed" in row for row in rows[3:])
    assert "cpu" in rows[1]


def test_several_lines_are_aligned(folder: Path) -> None:
    proto = onnx.load("digits.onnx")
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = "other.weight"
    onnx.save(proto, "changed.onnx")
    told, _ = failed("refresh", "changed.onnx", "--training", "training.onnx")
    assert told.splitlines()[1:] and all(line.startswith("       ") for line in told.splitlines()[1:])
    assert "`fc1.weight` is gone" in told


def test_a_traceback_on_demand(folder: Path) -> None:
    for arguments, debug in (("--debug show no", ""), ("describe no --debug", ""), ("describe no", "1")):
        result = CliRunner().invoke(app, arguments.split(), env={"ONWARD_DEBUG": debug})
        assert result.exit_code == 1
        assert "Traceback" in result.stderr and "\nerror: the file `no` does not exist\n" in result.stderr
    assert "Traceback" not in CliRunner().invoke(app, ["describe", "no"], env={"ONWARD_DEBUG": "0"}).stderr


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("division by zero"), f"error: ZeroDivisionError: division by zero\nhint:  {BUG}\n"),
        (MemoryError(), f"error: not enough memory\nhint:  {MEMORY_HINT}\n"),
        (PermissionError(13, "Permission denied", "x.onnx"), "error: `x.onnx`: Permission denied\n"),
    ],
)
def test_what_nobody_expects(error: Exception, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("onward.model.serde.load", fail)
    monkeypatch.setattr("onward.model.load", fail)
    result = CliRunner().invoke(app, ["set", "training.onnx", "--list"])
    assert (result.exit_code, result.stderr) == (1, told)


def test_an_interrupt_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onward.model.load", interrupted)
    result = CliRunner().invoke(app, ["set", "training.onnx", "--list"])
    assert (result.exit_code, result.output) == (130, "interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_an_interrupt_of_a_real_process_is_one_line(folder: Path) -> None:
    code = "import time, onward.model\nfrom onward.cli import main\n"
    code += "onward.model.load = lambda *_: print('reading', flush=True) or time.sleep(60)\nmain()"
    running = subprocess.Popen(
        [sys.executable, "-c", code, "set", "training.onnx", "--list"], stdout=-1, stderr=-1, text=True
    )
    assert running.stdout is not None and running.stdout.readline() == "reading\n"
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert (running.returncode, stderr) == (130, "interrupted\n")


INTERRUPTED_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from onward.cli import main
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
@pytest.mark.parametrize("module", ["onward.cli.app", "typer", "onward.cli.output_files", "onward.inspect.summary"])
def test_an_interrupt_of_imports_is_one_line(module: str, folder: Path) -> None:
    """Before there is an application, while its commands are loaded, and in one of them."""
    code = INTERRUPTED_IMPORT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code, "describe", "training.onnx"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow("check --codes", "prepare --list optimizers")
@pytest.mark.parametrize(
    "arguments", ["prepare --list optimizers", "prepare --list optimizers --json", "check --codes"]
)
def test_a_closed_pipe_is_quiet(arguments: str) -> None:
    command = [sys.executable, "-m", "onward", *arguments.split()]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_that_nobody_hears() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "onward", "describe", "no"], stderr=writer, timeout=60)
    finally:
        os.close(writer)
    assert done.returncode == 1


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii(folder: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    proto = onnx.load("digits.onnx")
    proto.graph.name = "grün"
    onnx.save(proto, "größe.onnx")
    for arguments in (["describe", "größe.onnx"], ["check", "größe.onnx"], ["describe", "fehlt-ö.onnx"]):
        done = process(*arguments, env=environment)
        assert "Traceback" not in done.stderr and done.returncode == (1 if "fehlt" in arguments[1] else 0)


def test_names_cannot_disturb_the_terminal(folder: Path) -> None:
    proto = digits_mlp()
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "\x1b[31mlog\rits\x07[bold]x[/]"
    onnx.save(proto, "odd.onnx")
    for arguments in (
        "describe odd.onnx",
        "prepare odd.onnx --loss ce",
        "prepare odd.onnx --loss a=ce",
        "check odd.onnx",
    ):
        result = CliRunner().invoke(app, arguments.split())
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", result.output), arguments
        assert BUG not in result.stderr


# ---- prepare ---------------------------------------------------------------------------------------------------------


def test_prepare(folder: Path) -> None:
    text = run("prepare", "digits.onnx", *RECIPE, "--freeze", "fc1.*", "--clip", "1", "-o", "made.onnx").stdout
    for said in (
        "trains",
        "330 in 2 tensors",
        "2 tensors frozen",
        "cross_entropy on logits",
        "adamw: lr 0.001",
        "cosine",
    ):
        assert said in text
    assert "labels int64 [N]" in text and "onward describe made.onnx" in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)
    made = onward.load("made.onnx")
    assert made.steps[0].differentiated() == ["fc2.weight", "fc2.bias"]
    assert made.steps[0].fact("train.recipe")["freeze"] == ["fc1.*"]
    assert np.array_equal(logits("made.onnx"), logits("digits.onnx"))
    run("check", "made.onnx", "--strict")


def test_prepare_is_the_function_of_the_same_name(folder: Path) -> None:
    onnx.save(small_cnn(), "cnn.onnx")
    options = """--loss logits=ce:label_smoothing=0.1 --loss logits=ce:scale=0.5 --optimizer sgd:lr=0.1,momentum=0.9
        --schedule warmup:steps=5,until=5 --schedule step:size=10 --trainable conv.* --trainable fc.* --freeze *.bias
        --group fc.*:lr=0.01 --lr-decay 0.5 --clip tensor_norm:2 --accumulate 3 --ema 0.9 --loss-scale dynamic
        --no-master-weights
        --init conv.*=normal:std=0.02 --init zeros --variance sample --seed 7"""
    run("prepare", "cnn.onnx", *options.split(), "-o", "made.onnx")
    made = onward.prepare(
        "cnn.onnx",
        loss=["logits=ce:label_smoothing=0.1", "logits=ce:scale=0.5"],
        optimizer="sgd:lr=0.1,momentum=0.9",
        schedule=["warmup:steps=5,until=5", "step:size=10"],
        trainable=["conv.*", "fc.*"],
        freeze=["*.bias"],
        groups=["fc.*:lr=0.01"],
        lr_decay=0.5,
        clip="tensor_norm:2",
        accumulate=3,
        ema=0.9,
        loss_scale="dynamic",
        master_weights=False,
        init={"conv.*": "normal:std=0.02", "*": "zeros"},
        variance="sample",
        seed=7,
    )
    assert onward.load("made.onnx").to_proto() == made.to_proto()


def test_the_name_of_the_output(folder: Path) -> None:
    (folder / "sub").mkdir()
    run("prepare", "digits.onnx", "--loss", "ce")
    run("prepare", "digits.onnx", "--loss", "ce", "-o", "sub")
    assert Path("digits-training.onnx").exists() and Path("sub/digits-training.onnx").exists()


def test_nothing_is_overwritten_unless_that_is_wanted(folder: Path) -> None:
    command = ["prepare", "digits.onnx", "--loss", "ce"]
    before = Path("training.onnx").read_bytes()
    assert failed(*command, "-o", "training.onnx") == (
        "`training.onnx` already exists",
        "write elsewhere with `-o`, or overwrite it with `--force`",
    )
    assert failed(*command, "-o", "./digits.onnx")[0] == "`digits.onnx` is the input model"
    assert Path("training.onnx").read_bytes() == before
    run(*command, "-o", "training.onnx", "--force")
    assert Path("training.onnx").read_bytes() != before
    run(*command, "-o", "digits.onnx", "--force")
    assert onward.load("digits.onnx").steps


def test_prepare_tells_programs(folder: Path) -> None:
    told = json.loads(run("prepare", "digits.onnx", "--loss", "ce", "--json").stdout)
    assert told["output"] == "digits-training.onnx"
    assert told["model"] == onward.describe("digits-training.onnx").to_json()


def test_prepare_appends_and_uses_a_loss_from_a_file(folder: Path) -> None:
    loss = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        distance (float[N,10] logits, float[N,10] wanted) => (float loss) {
            d = Sub(logits, wanted) loss = ReduceSumSquare<keepdims=0>(d)
        }"""
    )
    onnx.save(loss, "loss.onnx")
    text = run("prepare", "training.onnx", "--loss", "loss.onnx", "--append", "-o", "two.onnx").stdout
    assert "wanted float32 [N, 10]" in text
    assert len(onward.load("two.onnx").steps) == 2


@pytest.mark.parametrize("data", ["data", "safetensors"])
def test_prepare_puts_tensors_beside_the_file(data: str, folder: Path) -> None:
    run("prepare", "digits.onnx", "--loss", "ce", "--data", data, "-o", "out.onnx")
    assert Path(f"out.{data}").exists()
    assert np.array_equal(logits("out.onnx"), logits("digits.onnx"))


@pytest.mark.parametrize(
    ("what", "name", "options"),
    [
        ("losses", "cross_entropy", {"label_smoothing": 0.0, "scale": 1.0}),
        ("optimizers", "adamw", {"lr": 1e-3, "weight_decay": 1e-2, "variant": "torch"}),
        ("schedules", "cosine", {"steps": None, "min": 0.0, "after": "floor", "warmup": 0.0}),
        ("initializers", "kaiming_normal", {"mode": "fan_in", "nonlinearity": "leaky_relu"}),
    ],
)
def test_prepare_lists_what_there_is(what: str, name: str, options: dict[str, Any]) -> None:
    listed = json.loads(run("prepare", "--list", what, "--json").stdout)
    assert len(listed) > 10
    assert options.items() <= listed[name]["options"].items()
    text = run("prepare", "--list", what).stdout
    for known, entry in listed.items():
        assert known in text and entry["summary"].split("\n")[0] in text
        assert all(f"{option}=" in text for option in entry["options"])
        assert all(f"{option}=?" in text for option in entry["required"])


# ---- check and show --------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(folder: Path) -> str:
    proto = onnx.load("training.onnx")
    proto.training_info[0].update_binding[0].value = "nothing"
    del proto.training_info[0].initialization_binding[:]
    onnx.save(proto, "broken.onnx")
    return "broken.onnx"


def test_check(folder: Path) -> None:
    assert run("check", "training.onnx").stdout == "training.onnx: no findings\n"
    assert run("check", "training.onnx", "--strict").stdout == "training.onnx: no findings\n"
    assert "OW652" in run("check", "training.onnx", "--for", "onnxruntime").stdout


def test_check_lists_findings_by_severity(broken: str) -> None:
    lines = run("check", broken, code=1).stdout.splitlines()
    assert lines[0] == "errors" and "warnings" in lines
    assert any(re.match(r"  OW205  training_info\[0\]", line) for line in lines)
    assert any(line.startswith("         hint: ") for line in lines)
    assert re.match(r"broken.onnx: \d+ errors?, \d+ warnings?", lines[-1])


def test_check_tells_programs(broken: str) -> None:
    told = json.loads(run("check", broken, "--json", code=1).stdout)
    assert told["file"] == broken and not told["passed"]
    assert told["findings"] == [finding.to_json() for finding in onward.check(broken)]
    assert sum(told["counts"].values()) == len(told["findings"])


def test_check_is_strict_on_demand(folder: Path) -> None:
    proto = onnx.load("training.onnx")
    del proto.training_info[0].initialization_binding[-1]
    onnx.save(proto, "loose.onnx")
    assert "warning" in run("check", "loose.onnx").stdout
    assert "warning" in run("check", "loose.onnx", "--strict", code=1).stdout


def test_check_looks_at_what_cannot_be_read(folder: Path) -> None:
    proto = digits_mlp()
    proto.graph.node[1].output[0] = "hidden"
    onnx.save(proto, "twice.onnx")
    assert "not valid ONNX" in failed("describe", "twice.onnx")[0]
    assert "OW120" in run("check", "twice.onnx", code=1).stdout


def test_check_lists_its_codes() -> None:
    from onward.checker import CODES

    assert json.loads(run("check", "--codes", "--json").stdout).keys() == CODES.keys()
    assert re.findall(r"OW\d+", run("check", "--codes").stdout) == list(CODES)


def test_show(folder: Path) -> None:
    text = run("describe", "training.onnx").stdout
    assert "adamw" in text and "cosine" in text and "fc1" not in text
    assert "fc1.weight" in run("describe", "training.onnx", "--params").stdout
    assert json.loads(run("describe", "training.onnx", "--json").stdout) == onward.describe("training.onnx").to_json()
    assert "inference model" in run("describe", "digits.onnx").stdout


def test_show_draws(folder: Path) -> None:
    result = run("describe", "training.onnx", "--graph", "picture.svg")
    assert (result.stdout, result.stderr) == ("", "wrote picture.svg\n")
    assert Path("picture.svg").read_text().startswith("<svg") or "<svg" in Path("picture.svg").read_text()[:200]
    assert "--force" in failed("describe", "training.onnx", "--graph", "picture.svg")[1]
    run("describe", "training.onnx", "--graph", "picture.svg", "--force", "--json")
    assert "the model has no step 4" in failed("describe", "training.onnx", "--graph", "x.svg", "--step", "4")[0]


# ---- set -------------------------------------------------------------------------------------------------------------


def test_set_changes_the_file(folder: Path) -> None:
    nodes = onnx.load("training.onnx").training_info[0].algorithm.node
    result = run("set", "training.onnx", "group0/lr=3e-4", "step=7")
    assert result.stdout == "group0/lr  0.001 -> 0.0003\nstep       0 -> 7\n"
    assert re.fullmatch(r"wrote training\.onnx \([\d.]+ KiB\)\n", result.stderr)
    model = onward.load("training.onnx")
    assert model.initializer("group0/lr").const_value.numpy() == 3e-4
    assert model.initializer("step").const_value.numpy() == 7
    assert onnx.load("training.onnx").training_info[0].algorithm.node == nodes


def test_set_changes_all_or_nothing(folder: Path) -> None:
    before = Path("training.onnx").read_bytes()
    failed("set", "training.onnx", "group0/lr=3e-4", "nothing=7")
    assert Path("training.onnx").read_bytes() == before


def test_set_writes_elsewhere_and_tells_programs(folder: Path) -> None:
    before = Path("training.onnx").read_bytes()
    told = json.loads(run("set", "training.onnx", "step=7", "-o", "other.onnx", "--json").stdout)
    assert told == {"output": "other.onnx", "changes": [{"name": "step", "old": 0, "new": 7}]}
    assert Path("training.onnx").read_bytes() == before


def test_set_understands_lists_and_states(folder: Path) -> None:
    recipe = {"schedule": "multistep:milestones=[30,60]", "loss_scale": "dynamic"}
    onward.prepare("digits.onnx", loss="ce", **recipe).save("t.onnx")
    run("set", "t.onnx", "schedule/milestones=[10,20]", "scaler/scale=1024", "group0/eps=1e-12")
    listed = {entry["name"]: entry for entry in json.loads(run("set", "t.onnx", "--list", "--json").stdout)}
    assert listed["schedule/milestones"] == {"name": "schedule/milestones", "role": "hyper", "value": [10.0, 20.0]}
    assert listed["scaler/scale"]["value"] == 1024
    assert listed["step"] == {"name": "step", "role": "counter", "value": 0}
    text = run("set", "t.onnx", "--list").stdout
    assert re.search(r"^group0/eps +1e-12 +hyper$", text, re.MULTILINE)


# ---- the others ------------------------------------------------------------------------------------------------------


def reference(change: Callable[..., onward.Model], *arguments: Any, **options: Any) -> onnx.ModelProto:
    return change("training.onnx", *arguments, **options).to_proto()


def again(recompute: Any) -> onnx.ModelProto:
    return onward.gradient("digits.onnx", "logits", ["fc1.weight", "fc1.bias"], recompute=recompute).to_proto()


@pytest.mark.parametrize(
    ("arguments", "output", "wanted"),
    [
        ("rename T fc1.weight=w", "training-renamed", lambda: reference(transform.rename, {"fc1.weight": "w"})),
        ("prefix T net/", "training-prefixed", lambda: reference(transform.add_prefix, "net/")),
        ("gradient digits.onnx --of logits --wrt fc1.*", "digits-gradient", None),
        ("gradient digits.onnx --of logits --wrt fc1.* --recompute 1", "digits-gradient", lambda: again(1)),
        ("grad digits.onnx --of logits --wrt fc1.* --recompute active", "digits-gradient", lambda: again(["active"])),
        ("inline T", "training-inlined", lambda: reference(transform.inline)),
        ("inline T --function onward.A*", "training-inlined", lambda: reference(transform.inline, ["onward.A*"])),
        ("opset T 22", "training-opset22", lambda: reference(transform.convert_opset, 22)),
        ("reset T", "training-reset", lambda: reference(onward.reset)),
        ("strip T", "training-inference", lambda: reference(transform.strip)),
        ("extract T --to active", "training-part", lambda: reference(transform.extract, ["image"], ["active"])),
        ("merge T digits.onnx --connect logits=image --prefix d/", "training-digits", None),
        ("refresh digits.onnx --training T", "digits-training", lambda: onnx.load("training.onnx")),
        ("data T --to none", "training-single", lambda: onnx.load("training.onnx")),
        ("data T --to safetensors", "training-external", None),
    ],
)  # fmt: skip
def test_changes(arguments: str, output: str, wanted: Callable[[], onnx.ModelProto] | None, folder: Path) -> None:
    result = run(*("training.onnx" if a == "T" else a for a in arguments.split()))
    assert result.stdout == ""
    beside = rf" and {output}\.safetensors \([\d.]+ \w+\)" if "safetensors" in arguments else ""
    assert re.match(rf"wrote {output}\.onnx \([\d.]+ \w+\){beside}(: .+)?\n$", result.stderr)
    if wanted is not None:
        assert onward.load(f"{output}.onnx").to_proto() == onward.load(wanted()).to_proto()
    failed(*("training.onnx" if a == "T" else a for a in arguments.split()))
    run(*("training.onnx" if a == "T" else a for a in arguments.split()), "--force", "-o", "elsewhere.onnx")
    assert Path("elsewhere.onnx").exists()


# ---- on a terminal ---------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: str) -> str:
    """What a person sees, with all codes for colours and cursors."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "CI")} | {
        "TERM": "xterm-256color"
    }
    main, side = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "onward", *arguments], stdin=side, stdout=side, stderr=side, env=environment
    )
    os.close(side)
    seen = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    running.wait(timeout=60)
    os.close(main)
    return seen.decode()


def test_a_terminal_gets_colours_and_a_spinner(folder: Path) -> None:
    seen = on_a_terminal("check", "training.onnx")
    assert "checking training.onnx" in seen and "\x1b[" in seen
    assert "\x1b[" in on_a_terminal("--help")
    assert "\x1b[1;31merror:" in on_a_terminal("describe", "no.onnx")
    assert "\x1b[" not in process("check", "training.onnx").stdout + process("--help").stdout


def test_main_is_the_entry_point(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onward.cli import main

    monkeypatch.setattr(sys, "argv", ["onward", "check", "training.onnx"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == "training.onnx: no findings\n"
    assert application.app is app
