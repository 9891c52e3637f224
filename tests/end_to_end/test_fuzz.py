"""Damaged, random and hostile files: each gives a result or an `onward.Error`. No traceback, no hang, no memory eaten.

Real files are mutated as bytes and as protobuf, thousands of times, always the same way: a failure names its case, and
`damaged(model, kind, number)` makes the file again. More of them: ONWARD_FUZZ=10 pytest tests/end_to_end/test_fuzz.py.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from broken_models import GOOD
from campaign.mutations import KINDS, encoded, fields
from hypothesis import given
from hypothesis import strategies as st
from models import digits_mlp, small_cnn
from onnx import ModelProto, TensorProto, helper
from representatives import examples
from typer.testing import CliRunner

import onward
from older_forms import write
from onward.cli.app import BUG
from onward.cli.commands import app, build

TIMES = int(os.environ.get("ONWARD_FUZZ", "1"))
SECONDS, BYTES = 30, 3 << 30

# ---- the files -------------------------------------------------------------------------------------------------------


@functools.cache
def files() -> dict[str, bytes]:
    """What is mutated: models for inference, a recipe with everything in it, training models that others wrote."""
    recipe = onward.prepare(
        small_cnn(channels=2),
        loss=["logits=cross_entropy:label_smoothing=0.1", "logits=cross_entropy:scale=0.5,target=probabilities"],
        optimizer="adamw:lr=1e-3",
        schedule=["warmup:steps=10,until=10", "one_cycle:steps=100"],
        freeze="conv.bias",
        groups=["*.bias:optimizer=momentum"],
        clip="norm:1",
        accumulate=2,
        ema=0.99,
        loss_scale="dynamic",
        init={"fc.*": "normal", "conv.weight": "orthogonal"},
    )
    made = {"mlp": digits_mlp(hidden=4), "cnn": small_cnn(channels=2), "recipe": recipe.to_proto()}
    made |= {name: build() for name, build in GOOD.items()}
    made["everything"] = everything()
    return {name: proto.SerializeToString(deterministic=True) for name, proto in made.items()} | old_files()


def everything() -> ModelProto:
    """A valid model with messages of every kind that a model can hold."""
    proto = GOOD["control_flow"]() if "control_flow" in GOOD else next(iter(GOOD.values()))()
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [2], [1.0, 2.0])
    indices = helper.make_tensor("", TensorProto.INT64, [2], [0, 3])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    for i, elem in enumerate((TensorProto.STRING, TensorProto.INT4, TensorProto.BFLOAT16, TensorProto.COMPLEX64)):
        data = [b"a", b"b"] if elem == TensorProto.STRING else [1, 2]
        proto.graph.initializer.append(helper.make_tensor(f"typed{i}", elem, [2], data))
    float_type = helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", None, 3])
    for i, kind in enumerate(
        (
            helper.make_sequence_type_proto(float_type),
            helper.make_optional_type_proto(helper.make_sequence_type_proto(float_type)),
            helper.make_map_type_proto(TensorProto.STRING, float_type),
            helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [4]),
        )
    ):
        proto.graph.value_info.append(helper.make_value_info(f"note{i}", kind))
    proto.graph.node.append(
        helper.make_node("Constant", [], ["sparse_attribute"], sparse_value=proto.graph.sparse_initializer[0])
    )
    proto.graph.quantization_annotation.add(tensor_name="sparse").quant_parameter_tensor_names.add(key="a", value="b")
    proto.metadata_props.add(key="who", value="knows")
    proto.graph.node[0].metadata_props.add(key="who", value="knows")
    for elem in (TensorProto.FLOAT, TensorProto.INT64):
        one = helper.make_tensor("", elem, [2], [1, 2])
        proto.graph.node.append(helper.make_node("Constant", [], [f"constant{elem}"], value=one))
    return proto


pytestmark = pytest.mark.filterwarnings("ignore:the file is of an older form")


def old_files() -> dict[str, bytes]:
    """Training as onnx 1.7 wrote it, with GraphCall, and as drafts of 2019 did, in field 21."""
    text = """<ir_version: 7, opset_import: ["": 17, "ai.onnx.preview.training": 1]>
        inference (float[N,2] X) => (float[N,1] Y) <float[2,1] W = {1.0, 2.0}> { Y = MatMul(X, W) }"""
    call = 'ai.onnx.preview.training.GraphCall <input_names=["X"], output_names=["Y"]>'
    steps = {
        "graph_call": f"a (float[N,2] Z) => (float[2,1] V) {{ Y_1 = {call}(Z) G = MatMul(Z, Y_1) V = Sub(W, G) }}",
        "graph_calls": f"a (float[N,2] Z) => (float[2,1] V) {{ U = {call}(Z) S = Mul(Z, U) V = {call}(S) }}",
    }
    made = {"may_2019": write.may_2019(), "july_2019": write.training_linear_model()}
    for name, step in steps.items():
        proto = onnx.parser.parse_model(text)
        info = onnx.TrainingInfoProto(algorithm=onnx.parser.parse_graph(step))
        info.update_binding.add(key="W", value="V")
        proto.training_info.append(info)
        made[name] = proto.SerializeToString()
    return made


def damaged(model: str, kind: str, number: int) -> bytes:
    return KINDS[kind](random.Random(f"{model} {kind} {number}"), files()[model])


# ---- what must not happen --------------------------------------------------------------------------------------------


class Hang(BaseException):
    """It takes too long."""


@contextmanager
def limits(seconds: float = SECONDS) -> Iterator[None]:
    """Within it, what hangs is interrupted, and what would fill the memory gets a MemoryError."""

    def stop(*_: object) -> None:
        raise Hang(f"not done after {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def exercise(source: bytes | Path) -> str:
    """Do with a file what can be done with any; how far it got. Only an `onward.Error` may stop it."""
    with limits():
        try:
            onward.check(source)
        except onward.Error:
            return "refused by check"
        try:
            model = onward.load(source)
        except onward.Error:
            return "refused by read"
        reached = ["read"]
        for use in (onward.Model.to_proto, onward.Model.copy, onward.describe):
            with suppress(onward.Error):
                use(model)
                reached.append(use.__name__)
    return " ".join(reached)


def survive(cases: Iterator[tuple[str, bytes | Path]]) -> None:
    """Exercise all; fail once, with the name and the traceback of each that did not end well."""
    failures = []
    for name, source in cases:
        try:
            exercise(source)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures.append(f"{name}\n{''.join(traceback.format_exception(error, limit=-4))}")
    assert not failures, f"{len(failures)} failed\n\n" + "\n".join(failures[:5])


def count(each: int) -> int:
    return each * TIMES


# ---- files as bytes --------------------------------------------------------------------------------------------------

MODELS = ["mlp", "cnn", "recipe", *GOOD, "everything", "graph_call", "graph_calls", "may_2019", "july_2019"]


def test_the_files_are_good() -> None:
    assert set(files()) == set(MODELS)
    for name, data in files().items():
        assert exercise(data) == "read to_proto copy describe", name
    assert {exercise(damaged("cnn", kind, i)) for kind in KINDS for i in range(9)} > {"refused by check"}


@pytest.mark.slow("functions")
@pytest.mark.parametrize("model", MODELS)
def test_damaged_files(model: str) -> None:
    # What keeps protobuf valid gets further, and is worth more.
    weights = dict.fromkeys(KINDS, 4) | {"rearranged": 20, "resized": 8, "unreadable": 8}
    if model == "recipe":  # is large
        weights = {kind: each // 4 for kind, each in weights.items()}
    survive(
        (f"damaged({model!r}, {kind!r}, {i})", damaged(model, kind, i))
        for kind, each in weights.items()
        for i in range(count(each))
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_damaged_files_for_long(model: str, kind: str) -> None:
    survive((f"damaged({model!r}, {kind!r}, {i})", damaged(model, kind, i)) for i in range(1000, 1000 + count(300)))


@pytest.mark.parametrize("model", ["mlp", "adam", "functions", "everything", "july_2019"])
def test_truncation_at_every_field(model: str) -> None:
    data = files()[model]
    places = sorted({at for field in fields(data) for at in field} - {len(data)})
    refused = 0
    for at in places:
        try:
            onward.load(data[:at])
        except onward.Error as error:
            assert error.message and "\n" not in error.message
            refused += 1
    assert refused > 0.9 * len(places)  # a file may end well after the last required field


def test_random_bytes() -> None:
    rng = random.Random(0)
    survive((f"randbytes {i}", rng.randbytes(rng.choice((1, 2, 10, 100, 5000)))) for i in range(count(200)))


def protobuf() -> st.SearchStrategy[bytes]:
    """Messages that parse, with fields of any number and kind."""
    number = st.sampled_from([*range(1, 27), 100, 2**29 - 1])
    scalar = st.builds(lambda n, v: encoded(n << 3) + encoded(v), number, st.integers(0, 2**64 - 1))
    fixed = st.builds(lambda n, v: encoded(n << 3 | 5) + v, number, st.binary(min_size=4, max_size=4))

    def holding(content: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
        field = st.builds(lambda n, c: encoded(n << 3 | 2) + encoded(len(c)) + c, number, content)
        return st.lists(st.one_of(scalar, fixed, field), max_size=6).map(b"".join)

    return st.recursive(st.one_of(st.binary(max_size=12), st.text(max_size=6).map(str.encode)), holding, max_leaves=40)


@examples(40 * TIMES)
@given(graph=protobuf(), training=st.lists(protobuf(), max_size=2), rest=protobuf())
def test_random_protobuf(graph: bytes, training: list[bytes], rest: bytes) -> None:
    data = b"\x08\x0a" + b"\x3a" + encoded(len(graph)) + graph
    exercise(data + b"".join(b"\xa2\x01" + encoded(len(t)) + t for t in training) + rest)


# ---- files with data beside them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["data", "safetensors"])
def test_damaged_files_with_external_data(data: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onward.prepare(digits_mlp(), loss="ce").save(path, data=data)
    whole, (beside,) = path.read_bytes(), tmp_path.glob(f"*.{data}")

    def cases() -> Iterator[tuple[str, Path]]:
        for kind in KINDS:
            for i in range(count(10)):
                path.write_bytes(KINDS[kind](random.Random(f"{kind} {i}"), whole))
                yield f"{kind} {i} of a model with external data", path
        path.write_bytes(whole)
        content = beside.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            beside.write_bytes(content[:size])
            yield f"{size} bytes of data", path
        beside.unlink()
        yield "no data", path

    survive(cases())


# ---- files that were made to do harm ---------------------------------------------------------------------------------


def with_initializer(elem: int, dims: list[int], **content: Any) -> ModelProto:
    proto = digits_mlp(hidden=4)
    proto.graph.initializer[0].CopyFrom(TensorProto(name="fc1.weight", data_type=elem, dims=dims, **content))
    return proto


def with_node(op: str, inputs: list[str], constants: dict[str, Any], **attributes: Any) -> ModelProto:
    """The classifier with another factor behind its logits, which some node computes."""
    proto = digits_mlp(hidden=4)
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    proto.graph.node.append(helper.make_node(op, inputs, ["factor"], **attributes))
    proto.graph.node.append(helper.make_node("Mul", ["logits", "factor"], ["scaled"]))
    proto.graph.output[0].name = "scaled"
    return proto


def nested(depth: int) -> ModelProto:
    """`If` in `If` in `If`, put together from the inside, since protobuf refuses to write it beyond 100."""
    graph = onnx.parser.parse_graph("g () => (float y) { y = Constant <value = float {1.0}> () }").SerializeToString()
    for _ in range(depth):
        attribute = b"\x0a\x0bthen_branch\x32" + encoded(len(graph)) + graph + b"\xa0\x01\x05"
        node = b"\x0a\x01c\x12\x01y\x22\x02If\x2a" + encoded(len(attribute)) + attribute
        graph = b"\x0a" + encoded(len(node)) + node + b"\x12\x01g"
    return b"\x08\x0a\x42\x02\x10\x15\x3a" + encoded(len(graph)) + graph  # type: ignore[return-value]


def functions_within_functions(levels: int, last: tuple[str, str] = ("", "Relu")) -> ModelProto:
    """Each function calls the next twice: a few kilobytes that expand to 2^levels nodes."""
    proto = digits_mlp(hidden=4)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("bomb", 1)]
    for i in range(levels):
        inner = ("bomb", f"f{i + 1}") if i + 1 < levels else last
        calls = [helper.make_node(inner[1], [a], [b], domain=inner[0]) for a, b in (("x", "t"), ("t", "y"))]
        proto.functions.append(helper.make_function("bomb", f"f{i}", ["x"], ["y"], calls, opsets))
    proto.opset_import.append(opsets[1])
    proto.graph.node.append(helper.make_node("f0", ["logits"], ["scaled"], domain="bomb"))
    proto.graph.output[0].name = "scaled"
    return proto


def long_chain(length: int) -> ModelProto:
    proto = digits_mlp(hidden=4)
    names = ["logits", *(f"v{i}" for i in range(length))]
    proto.graph.node.extend(helper.make_node("Relu", [a], [b]) for a, b in pairwise(names))
    proto.graph.output[0].name = names[-1]
    return proto


def with_facts(**facts: str) -> ModelProto:
    proto = onward.prepare(digits_mlp(hidden=4), loss="ce", schedule="cosine:steps=9").to_proto()
    metadata = proto.training_info[0].algorithm.metadata_props
    kept = [entry for entry in metadata if entry.key.removeprefix("train.") not in facts]
    del metadata[:]
    metadata.extend(kept)
    for key, text in facts.items():
        metadata.add(key=f"train.{key}", value=text)
    return proto


FACTS = ["optimizer", "lr_scheduler", "loss", "forward", "progress", "selection", "recipe"]
HOSTILE: dict[str, Callable[[], Any]] = {
    "2^60 elements without data": lambda: with_initializer(TensorProto.FLOAT, [2**30, 2**30]),
    "2^60 elements, few bytes": lambda: with_initializer(TensorProto.FLOAT, [2**60], raw_data=b"1234"),
    "2^120 elements": lambda: with_initializer(TensorProto.FLOAT, [2**60, 2**60], raw_data=b"1234"),
    "no elements, in an enormous shape": lambda: with_initializer(TensorProto.FLOAT, [0, 2**62, 2**62]),
    "a negative dimension": lambda: with_initializer(TensorProto.FLOAT, [-1, 64], raw_data=b""),
    "100000 dimensions": lambda: with_initializer(TensorProto.FLOAT, [1] * 100_000, raw_data=b"1234"),
    "100000 large dimensions": lambda: with_initializer(TensorProto.FLOAT, [2**40] * 100_000, raw_data=b"1234"),
    "2^60 4-bit elements": lambda: with_initializer(TensorProto.INT4, [2**60], raw_data=b"1234"),
    "2^40 strings": lambda: with_initializer(TensorProto.STRING, [2**40], string_data=[b"x"]),
    "a million strings": lambda: with_initializer(TensorProto.STRING, [10**6], string_data=[b""] * 10**6),
    "an unknown type": lambda: with_initializer(99, [4, 64], raw_data=bytes(1024)),
    "ConstantOfShape": lambda: with_node("ConstantOfShape", ["shape"], {"shape": np.array([2**20, 2**20])}),
    "ConstantOfShape, negative": lambda: with_node("ConstantOfShape", ["shape"], {"shape": np.array([-5, 2])}),
    "ConstantOfShape, overflow": lambda: with_node("ConstantOfShape", ["shape"], {"shape": np.array([2**62] * 4)}),
    "Expand": lambda: with_node("Expand", ["one", "shape"], {"one": np.float32(1), "shape": np.array([2**20, 2**20])}),
    "Tile": lambda: with_node("Tile", ["one", "n"], {"one": np.ones(1, np.float32), "n": np.array([2**40])}),
    "Range": lambda: with_node("Range", ["a", "b", "c"], {"a": 0.0, "b": 1e15, "c": 1.0}),
    "Cast of many": lambda: with_node("Cast", ["x"], {"x": np.zeros(9, np.int64)}, to=1),
    "Cast to nothing": lambda: with_node("Cast", ["x"], {"x": np.zeros(9, np.int64)}, to=77),
    "DequantizeLinear, wrong": lambda: with_node(
        "DequantizeLinear", ["x", "s"], {"x": np.zeros((2, 3), np.int8), "s": np.ones(7, np.float32)}
    ),
    "If, 10 deep": lambda: nested(10),
    "If, 40 deep": lambda: nested(40),
    "If, 1000 deep": lambda: nested(1000),
    "If, 20000 deep": lambda: nested(20_000),
    "functions that expand to 2^40 nodes": lambda: functions_within_functions(40),
    "functions that call each other": lambda: functions_within_functions(3, last=("bomb", "f0")),
    "2000 nodes in a row": lambda: long_chain(2000),
    "a name of 10 MB": lambda: with_node("Relu", ["logits"], {"x" * 10**7: 1.0}),
    "facts that are no JSON": lambda: with_facts(**dict.fromkeys(FACTS, "{")),
    "facts that are numbers": lambda: with_facts(**dict.fromkeys(FACTS, "5")),
    "facts that are lists": lambda: with_facts(**dict.fromkeys(FACTS, "[[], 5, null]")),
    "facts that are objects": lambda: with_facts(**dict.fromkeys(FACTS, '{"name": [], "step": {}, "hyper": 3}')),
    "facts nested without end": lambda: with_facts(**dict.fromkeys(FACTS, "[" * 100_000)),
    "facts with enormous numbers": lambda: with_facts(
        **dict.fromkeys(FACTS, '[{"name": 1e999, "step": 1' + "0" * 4000 + "}]")
    ),
}


def hostile(name: str) -> bytes:
    made = HOSTILE[name]()
    return made if isinstance(made, bytes) else made.SerializeToString()


@pytest.mark.parametrize("commands", [2, pytest.param(None, marks=pytest.mark.slow, id="all commands")])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str, commands: int | None, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(hostile(name))
    survive(iter([(name, path.read_bytes()), (name, path)]))
    known = every_command(path)
    for arguments in known if commands is None else random.Random(name).sample(known, commands):
        check_command(arguments, name)


# ---- recipes, mistyped -----------------------------------------------------------------------------------------------


def specs(catalog: build.Catalog) -> st.SearchStrategy[str]:
    """Names and options that there are, with values that make sense or none, and text that is no spec at all."""
    known = build.entries(catalog)
    odd = [
        "abc",
        "",
        "none",
        "true",
        "-1",
        "0",
        "2",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "[1,2]",
        "[[1",
        "[]",
        "{}",
        "9" * 30,
        "1j",
    ]
    value = st.sampled_from(odd) | st.text(max_size=5)

    def spec(name: str) -> st.SearchStrategy[str]:
        option = st.sampled_from([*known[name].options, "nothing"])
        given = st.dictionaries(option, value, max_size=2)
        wanted = dict.fromkeys(known[name].required, "10")
        return given.map(lambda g: f"{name}:" + ",".join(f"{k}={v}" for k, v in {**wanted, **g}.items()))

    return st.sampled_from(list(known)).flatmap(spec) | st.text(alphabet=":=,*[]ab./\x00é", max_size=8)


@examples(60 * TIMES)
@given(loss=specs("losses"), optimizer=specs("optimizers"), schedule=specs("schedules"), init=specs("initializers"))
def test_mistyped_recipes(loss: str, optimizer: str, schedule: str, init: str) -> None:
    proto = digits_mlp(hidden=4)
    for wrong in ({"loss": loss}, {"optimizer": optimizer}, {"schedule": schedule}, {"init": init}, {"freeze": init}):
        with suppress(onward.Error):
            onward.prepare(proto, **{"loss": "cross_entropy", **wrong}).to_proto()


def test_a_mistyped_end_of_a_schedule() -> None:
    with pytest.raises(onward.Error):
        onward.prepare(digits_mlp(hidden=4), loss="ce", schedule=["constant:until=abc", "constant"])


# ---- the command line ------------------------------------------------------------------------------------------------


def every_command(path: Path) -> list[list[str]]:
    """Each command on a file; what it writes goes into a folder beside it."""
    file, out = str(path), ["--force", "-o", str(path.with_name("out.onnx"))]
    inference = path.with_name("inference.onnx")
    if not inference.exists():
        inference.write_bytes(files()["mlp"])
    return [
        ["show", file],
        ["show", file, "--params"],
        ["show", file, "--json"],
        ["show", file, "--graph", str(path.with_name("out.svg")), "--force"],
        ["check", file],
        ["check", file, "--json", "--strict", "--for", "onnxruntime"],
        ["prepare", file, "--loss", "mse", *out],
        ["prepare", file, "--loss", "ce", "--append", "--optimizer", "sgd", "--json", *out],
        ["grad", file, "--of", "logits", "--wrt", "*", *out],
        ["lower", file, *out],
        ["lower", file, "--part", "evaluation", "--json", *out],
        ["set", file, "--list"],
        ["set", file, "step=3", "group0/lr=0.5", *out],
        ["rename", file, "logits=scores", *out],
        ["prefix", file, "p/", *out],
        ["merge", file, str(inference), "--prefix", "second/", *out],
        ["extract", file, "--to", "hidden", *out],
        ["inline", file, *out],
        ["opset", file, "22", *out],
        ["data", file, "--to", "safetensors", *out],
        ["strip", file, *out],
        ["refresh", str(inference), "--training", file, *out],
    ]


def check_command(arguments: list[str], case: str) -> None:
    """Run a command; it ends well, or with one error that is no bug."""
    with limits():
        result = CliRunner().invoke(app, arguments)
    judge(arguments, case, result.exit_code, result.stdout, result.stderr)


OLDER = "warning: the file is of an older form, and was converted: "


def judge(arguments: list[str], case: str, code: int, stdout: str, stderr: str) -> None:
    told = f"{case}: onward {' '.join(arguments)}\nexit {code}\n{stdout[-2000:]}\n{stderr[-4000:]}"
    assert code in (0, 1), told
    assert "Traceback" not in stderr and BUG not in stderr and "not enough memory" not in stderr, told
    stderr = "".join(line for line in stderr.splitlines(True) if not line.startswith(OLDER))
    found = arguments[0] == "check" and stdout
    assert (code == 0 or found) != stderr.startswith("error: "), told
    assert all(line.startswith(("wrote ", "error: ", "hint:  ", "       ")) for line in stderr.splitlines()), told
    assert "\x1b" not in stdout + stderr and "\x07" not in stdout + stderr, told


@pytest.mark.slow(
    "adam",
    "cnn",
    "everything",
    "gan",
    "graph_call",
    "graph_calls",
    "july_2019",
    "may_2019",
    "mlp",
    "recipe",
    "second_order",
    "statistics",
)
@pytest.mark.parametrize("model", MODELS)
def test_commands_on_damaged_files(model: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(files()[model])
    for arguments in every_command(path):
        check_command(arguments, model)
    rng = random.Random(model)
    for i in range(count(8)):
        kind = rng.choice([*KINDS, *["rearranged"] * 4])
        path.write_bytes(damaged(model, kind, i))
        check_command(rng.choice(every_command(path)), f"damaged({model!r}, {kind!r}, {i})")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_commands_on_damaged_files_for_long(model: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for i in range(5000, 5000 + count(150)):
        path.write_bytes(damaged(model, "rearranged", i))
        for arguments in every_command(path):
            check_command(arguments, f"damaged({model!r}, 'rearranged', {i})")


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_commands_in_processes_of_their_own(half: int, tmp_path: Path) -> None:
    """With a limit on memory that no library can get around."""
    rng = random.Random(half)
    path = tmp_path / "model.onnx"
    cases = [(name, hostile(name)) for name in rng.sample(list(HOSTILE), 8)]
    some = zip(MODELS[half::2], rng.sample(list(KINDS), 7), strict=False)
    cases += [(f"damaged({m!r}, {kind!r}, 0)", damaged(m, kind, 0)) for m, kind in some]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name, data in cases:
        path.write_bytes(data)
        arguments = rng.choice(every_command(path))
        done = subprocess.run(
            [sys.executable, "-m", "onward", *arguments],
            capture_output=True, text=True, timeout=60, preexec_fn=limit, env=environment,
        )  # fmt: skip
        judge(arguments, name, done.returncode, done.stdout, done.stderr)
