"""The checker: good models pass, each damage in the table is found under its code, nothing makes it fail or hang."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from broken_models import (
    DAMAGES,
    GOOD,
    TRAINING,
    Damage,
    entry,
    good,
    initializer,
    model,
    node,
    starting,
    tensor,
    value,
)
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, shape_inference
from representatives import examples

import onward
from onward.checker import CODES, FAMILIES, Finding, Severity, check_proto, sandbox, standard, worker
from onward.errors import UnknownNameError
from onward.model.serde import fingerprint
from onward.runtime.sessions import onnxruntime_limits

# ---- the table -------------------------------------------------------------------------------------------------------


def serious(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.severity is not Severity.INFO}


@pytest.mark.parametrize("target", [None, "onnxruntime"])
@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_wrong_with_a_good_model(name: str, target: str | None) -> None:
    findings = check_proto(GOOD[name](), target=target)
    assert not serious(findings), "\n".join(map(str, findings))
    assert target or not findings


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.code}-{damage.name}")
def test_a_damage_is_found(damage: Damage) -> None:
    proto = GOOD[damage.of]()
    damage.apply(proto)
    findings = check_proto(proto, target=damage.target)
    story = "\n".join(map(str, findings))
    assert damage.code in {finding.code for finding in findings}, story
    assert serious(findings) == {code for code in (damage.code, *damage.also) if CODES[code].severity != "info"}, story


def test_every_code_has_a_damage() -> None:
    elsewhere = {"OW109", "OW114", "OW134"}  # tests of their own, below
    elsewhere |= {"OW116", "OW801", "OW802", "OW803"}  # of files and runs: test_run_damage.py
    assert {damage.code for damage in DAMAGES} | elsewhere == CODES.keys()
    assert len(DAMAGES) >= 50


# ---- findings --------------------------------------------------------------------------------------------------------


def test_the_table_of_codes_is_in_order() -> None:
    assert list(CODES) == sorted(CODES)
    assert {code[:3] for code in CODES} == set(FAMILIES)
    assert all(entry.meaning and entry.rule for entry in CODES.values())
    assert len({entry.meaning for entry in CODES.values()}) == len(CODES)


def test_a_finding_says_where_and_what_to_do() -> None:
    proto = good()
    proto.training_info[0].algorithm.node[1].attribute[0].strings[0] = b"w_1"
    (finding,) = check_proto(proto)
    assert finding.place == 'training_info[0].algorithm/node[1] Gradient "grad"'
    assert finding.hint and "`w1`" in finding.hint
    assert finding.rule == "Gradient operator"
    assert json.loads(json.dumps(finding.to_json())) == {
        "code": "OW403",
        "severity": "error",
        "place": finding.place,
        "message": "`xs` names `w_1`, which is not in the graph",
        "rule": "Gradient operator",
        "hint": finding.hint,
    }


def test_a_renamed_weight_is_suggested() -> None:
    proto = good()
    initializer(proto, "w1").name = proto.graph.node[0].input[1] = "fc.w1"
    hints = {finding.code: finding.hint or "" for finding in check_proto(proto)}
    assert "`fc.w1`" in hints["OW201"] and "`fc.w1`" in hints["OW403"]
    assert "OW701" in hints


def test_errors_come_first() -> None:
    proto = good()
    proto.training_info[0].update_binding.add(key="w1", value="w1_new")
    proto.training_info[0].algorithm.metadata_props.add(key="train.args", value="{")
    proto.training_info.add()
    ranks = [["error", "warning", "info"].index(finding.severity) for finding in check_proto(proto)]
    assert ranks == sorted(ranks) and len(set(ranks)) > 1


def test_hostile_names_do_not_reach_the_terminal() -> None:
    proto = good()
    proto.training_info[0].update_binding.add(key="\x1b[2J" + "x" * 10_000, value="loss")
    (finding,) = check_proto(proto)
    assert finding.message.isprintable() and finding.place.isprintable()
    assert len(str(finding)) < 400


def test_the_model_is_not_touched() -> None:
    for make in GOOD.values():
        proto = make()
        before = proto.SerializeToString(deterministic=True)
        check_proto(proto)
        assert proto.SerializeToString(deterministic=True) == before


# ---- models of others ------------------------------------------------------------------------------------------------

SIMPLE = Path(onnx.__file__).parent / "backend" / "test" / "data" / "simple"


@pytest.mark.parametrize("path", sorted(SIMPLE.glob("*/model.onnx")), ids=lambda path: path.parent.name)
def test_simple_models_of_the_standard(path: Path) -> None:
    assert not check_proto(onnx.load(path), base_dir=path.parent)


def test_training_that_is_applied_in_another_step() -> None:
    """One entry adds up gradients in shared state, another applies them: neither is a mistake."""
    graph = helper.make_graph(
        [node("MatMul", "x w", "y")],
        "linear",
        [value("x", ["n", 3])],
        [value("y", ["n", 1])],
        [tensor("w", np.ones((3, 1))), tensor("sum", np.zeros((3, 1)))],
    )
    collect = helper.make_graph(
        [
            node("ReduceSumSquare", "y", "loss", keepdims=0),
            node(f"{TRAINING}.Gradient", "w x", "dw", xs=["w"], zs=["x"], y="loss"),
            node("Add", "sum dw", "sum_new"),
        ],
        "collect",
        [],
        [value("loss", []), value("sum_new", [3, 1])],
    )
    apply = helper.make_graph(
        [node("Mul", "sum rate", "change"), node("Sub", "w change", "w_new"), node("Sub", "sum sum", "zero")],
        "apply",
        [],
        [value("w_new", [3, 1]), value("zero", [3, 1])],
        [tensor("rate", 0.1)],
    )
    start, resets = starting({"w": (3, 1), "sum": (3, 1)})
    first = entry(start, collect, resets, {"sum": "sum_new"})
    second = entry(onnx.GraphProto(), apply, {}, {"w": "w_new", "sum": "zero"})
    assert serious(check_proto(model(graph, first, second))) == {"OW203"}


# ---- external data ---------------------------------------------------------------------------------------------------


def with_external_weight(folder: Path, location: str = "w.data") -> ModelProto:
    """The good model with one weight in a file; the file holds 64 bytes before it."""
    proto = good()
    weight = initializer(proto, "w1")
    (folder / "w.data").write_bytes(bytes(64) + weight.raw_data)
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, "offset": "64", "length": "128"}.items():
        weight.external_data.add(key=key, value=text)
    return proto


def test_external_data_that_is_there(tmp_path: Path) -> None:
    assert not check_proto(with_external_weight(tmp_path), base_dir=tmp_path)
    assert not check_proto(with_external_weight(tmp_path))


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (lambda folder: (folder / "w.data").unlink(), "OW131"),
        (lambda folder: (folder / "w.data").write_bytes(bytes(100)), "OW132"),
        (lambda folder: (folder / "w.data").rename(folder / "v") and (folder / "w.data").symlink_to("v"), "OW131"),
        (lambda folder: os.link(folder / "w.data", folder / "v"), "OW131"),
        (lambda folder: (folder / "w.data").unlink() or (folder / "w.data").mkdir(), "OW131"),
    ],
    ids=["missing", "short", "symbolic link", "hard link", "folder"],
)
def test_external_data_that_is_not(tmp_path: Path, harm: Callable[[Path], object], code: str) -> None:
    proto = with_external_weight(tmp_path)
    harm(tmp_path)
    assert serious(check_proto(proto, base_dir=tmp_path)) == {code}


def test_a_data_file_that_another_program_has_changed(tmp_path: Path) -> None:
    proto = with_external_weight(tmp_path)
    onnx.save(proto, tmp_path / "first.onnx")
    path = onward.load(tmp_path / "first.onnx").save(tmp_path / "second.onnx")
    saved = onnx.load(path, load_external_data=False)
    assert not check_proto(saved, base_dir=tmp_path)
    data = tmp_path / "w.data"
    data.write_bytes(bytes(64) + bytes(value ^ 1 for value in data.read_bytes()[64:]))
    assert serious(check_proto(saved, base_dir=tmp_path)) == {"OW134"}
    with pytest.raises(onward.Error, match=r"`w1` has changed in `w\.data` since the model was saved") as caught:
        onward.load(path)
    assert "--data data" in caught.value.hint
    onward.load(tmp_path / "first.onnx")  # which never said how its data begin


def test_external_data_behind_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    proto = with_external_weight(tmp_path / "real", "linked/w.data")
    (tmp_path / "linked").symlink_to("real")
    assert serious(check_proto(proto, base_dir=tmp_path)) == {"OW131"}


def test_missing_data_does_not_hide_what_onnx_says(tmp_path: Path) -> None:
    proto = with_external_weight(tmp_path, "elsewhere.data")
    proto.training_info[0].algorithm.node[0].op_type = "CrossEntropy"
    assert serious(check_proto(proto, base_dir=tmp_path)) == {"OW131", "OW111"}


# ---- runtimes --------------------------------------------------------------------------------------------------------


def test_onnxruntime_is_asked_what_it_loads() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    limits = onnxruntime_limits()
    assert limits.opset >= 26 and limits.ir >= 13 and onnxruntime.__version__ in limits.runtime
    if onnxruntime.__version__.startswith("1.31."):
        assert (limits.opset, limits.ir) == (26, 13)


def test_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="onnxrumtime") as caught:
        check_proto(good(), target="onnxrumtime")
    assert caught.value.hint == "did you mean `onnxruntime`?"


# ---- hostile files ---------------------------------------------------------------------------------------------------


def seconds(proto: ModelProto) -> float:
    started = time.perf_counter()
    check_proto(proto, target="onnxruntime")
    return time.perf_counter() - started


@pytest.mark.parametrize("proto", [ModelProto(), ModelProto(graph=onnx.GraphProto())], ids=["nothing", "empty graph"])
def test_almost_nothing(proto: ModelProto) -> None:
    proto.training_info.add()
    assert check_proto(proto)


def test_time_grows_with_size_only() -> None:
    def chain(length: int) -> ModelProto:
        proto = good()
        nodes = [node("Neg", f"v{i - 1}" if i else "loss", f"v{i}") for i in range(length)]
        proto.training_info[0].algorithm.node.extend(nodes)
        return proto

    seconds(good())  # starts the other process
    assert seconds(chain(20_000)) < 20


@pytest.mark.slow
def test_many_gradients_of_a_long_graph() -> None:
    """Looking at each of them would be quadratic: the checker gives up and says so."""
    proto = good()
    algorithm = proto.training_info[0].algorithm
    algorithm.node.extend(node("Tanh", f"v{i - 1}" if i else "loss", f"v{i}") for i in range(3000))
    inputs = "w1 x labels"
    algorithm.node.extend(
        node(f"{TRAINING}.Gradient", inputs, f"g{i}", xs=["w1"], zs=["x", "labels"], y=f"v{2999 - i}")
        for i in range(2000)
    )
    started = time.perf_counter()
    assert "OW109" in {finding.code for finding in check_proto(proto)}
    assert time.perf_counter() - started < 120


def test_many_steps() -> None:
    proto = good()
    for i in range(5000):
        algorithm = proto.training_info.add().algorithm
        algorithm.name = "step"
        algorithm.node.append(node("Neg", "logits", f"turned{i}"))
    started = time.perf_counter()
    assert "OW109" in {finding.code for finding in check_proto(proto)}
    assert time.perf_counter() - started < 120


def test_many_wrong_names_in_a_large_graph() -> None:
    proto = good()
    proto.graph.node.extend(node("Identity", "x", f"some/long/name/of/a/value/{i}") for i in range(5000))
    proto.training_info[0].algorithm.node.extend(node("Neg", f"some/long/nam/{i}", f"n{i}") for i in range(5000))
    assert seconds(proto) < 30


def test_the_process_behind_may_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    hello = "import os, sys\nsys.stdout.buffer.write(bytes(8))\nsys.stdout.flush()\n"
    program.write_text(hello + "sys.stdin.buffer.read(20)\nos.abort()\n")
    monkeypatch.setattr(worker, "__file__", str(program))
    monkeypatch.setattr(sandbox, "_SANDBOX", sandbox.Sandbox())
    (finding,) = check_proto(good())
    assert finding.code == "OW114" and "crashed" in finding.message


def test_the_process_behind_may_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text("import sys, time\nsys.stdout.buffer.write(bytes(8))\nsys.stdout.flush()\ntime.sleep(60)\n")
    monkeypatch.setattr(worker, "__file__", str(program))
    monkeypatch.setattr(sandbox, "_SANDBOX", sandbox.Sandbox())
    monkeypatch.setattr(sandbox, "SECONDS", 0.5)
    (finding,) = check_proto(good())
    assert finding.code == "OW114" and "did not finish" in finding.message


def test_without_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    monkeypatch.setattr(sandbox, "_SANDBOX", sandbox.Sandbox())
    proto = good()
    proto.graph.node[1].op_type = "Relooo"
    assert "OW110" in {finding.code for finding in check_proto(proto)}


def test_the_sandbox_is_used_again() -> None:
    first = standard.study(_subject())
    process = sandbox._SANDBOX._process
    assert process is not None and all(verdict.inferred for verdict in first.values())
    standard.study(_subject())
    assert sandbox._SANDBOX._process is process


def _subject() -> standard.CheckedModel:
    return standard.CheckedModel(good(), None)


# ---- fuzzing ---------------------------------------------------------------------------------------------------------


def checked_in_time(proto: ModelProto) -> None:
    started = time.perf_counter()
    findings = check_proto(proto, target="onnxruntime")
    assert time.perf_counter() - started < 20
    assert all(json.dumps(finding.to_json()) and finding.code in CODES for finding in findings)


BYTES = [make().SerializeToString() for make in GOOD.values()]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(BYTES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[at : at + data.draw(st.integers(1, 16))]
            case "insert":
                raw[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                raw[at:at] = raw[at : at + 16]
    try:
        proto = ModelProto.FromString(bytes(raw))
    except DecodeError:
        return
    checked_in_time(proto)


@examples(100)
@given(st.integers(0, 2**32), st.sampled_from(sorted(GOOD)), st.sampled_from([1, 2, 4, 16, 64]))
def test_damaged_messages(seed: int, name: str, times: int) -> None:
    """Changes that always parse: fields of all messages get other values, elements are removed, repeated and moved."""
    rng, proto = random.Random(seed), GOOD[name]()
    for _ in range(times):
        mutate(proto, rng)
    checked_in_time(proto)


def messages(proto: Message) -> Iterator[Message]:
    yield proto
    for field, content in proto.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in content if field.is_repeated else [content]:
                yield from messages(child)


def mutate(proto: ModelProto, rng: random.Random) -> None:
    everything = list(messages(proto))
    target = rng.choice(everything)
    field = rng.choice(target.DESCRIPTOR.fields)
    content = getattr(target, field.name)
    if field.is_repeated and len(content) and rng.random() < 0.3:
        del content[rng.randrange(len(content))]
    elif not field.is_repeated and rng.random() < 0.2:
        target.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        alike = [message for message in everything if message.DESCRIPTOR is field.message_type]
        content = content.add() if field.is_repeated else content
        source = type(content)()  # a message must not be copied into itself
        source.CopyFrom(rng.choice(alike) if alike else source)
        content.CopyFrom(source)
    else:
        new = scalar(proto, field, rng)
        if field.is_repeated:
            content.append(new)
        else:
            setattr(target, field.name, new)


def scalar(proto: ModelProto, field: FieldDescriptor, rng: random.Random) -> object:
    names = ["", "x", "w1", "loss", "Gradient", "Adam", "Momentum", TRAINING, "onward", "If", "Loop", "\n", "é" * 100]
    names += ["train.param", "train.optimizer", "location", "../x"]
    names += [name for entry in proto.training_info for n in entry.algorithm.node for name in (*n.input, *n.output)]
    numbers = [0, 1, -1, 7, 21, 1000, 2**31 - 1, -(2**31)]
    wide = field.type in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(names)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice([b"", b"\xff", b"w1", b"loss", bytes(8)])
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice([0.0, 1.0, float("nan"), float("inf"), -1e38])
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice(field.enum_type.values).number
        case FieldDescriptor.TYPE_UINT64:
            return rng.choice([0, 1, 2**64 - 1])
        case _:
            return rng.choice([*numbers, *([2**63 - 1, -(2**63)] if wide else [])])


# ---- the fingerprint -------------------------------------------------------------------------------------------------


def inferred(proto: ModelProto) -> None:
    proto.CopyFrom(shape_inference.infer_shapes(proto))


def retrained(proto: ModelProto) -> None:
    initializer(proto, "w1").raw_data = bytes(128)


def moved_out(proto: ModelProto) -> None:
    weight = initializer(proto, "w1")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.data")


def described(proto: ModelProto) -> None:
    proto.graph.doc_string = proto.graph.node[0].doc_string = proto.graph.node[0].name = "text"
    proto.graph.metadata_props.add(key="a", value="b")


def reordered(proto: ModelProto) -> None:
    weights = list(reversed(proto.graph.initializer))
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(weights)


@pytest.mark.parametrize("change", [inferred, retrained, moved_out, described, reordered], ids=lambda f: f.__name__)
def test_the_fingerprint_ignores(change: Callable[[ModelProto], None]) -> None:
    proto = good()
    before = fingerprint(proto.graph)
    change(proto)
    assert fingerprint(proto.graph) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: setattr(graph.node[1], "op_type", "Tanh"),
        lambda graph: graph.node[0].input.__setitem__(1, "w9"),
        lambda graph: graph.node[0].attribute.append(helper.make_attribute("alpha", 2.0)),
        lambda graph: graph.initializer[0].dims.__setitem__(0, 5),
        lambda graph: setattr(graph.initializer[0], "data_type", TensorProto.DOUBLE),
        lambda graph: setattr(graph.initializer[0], "name", "fc.w1"),
        lambda graph: setattr(graph.output[0], "name", "scores"),
        lambda graph: graph.input.append(value("mask", [1])),
        lambda graph: graph.node.append(node("Relu", "logits", "positive")),
    ],
    ids=["operator", "connection", "attribute", "shape", "type", "weight", "output", "input", "node"],
)
def test_the_fingerprint_notices(change: Callable[[onnx.GraphProto], object]) -> None:
    proto = good()
    before = fingerprint(proto.graph)
    change(proto.graph)
    assert fingerprint(proto.graph) != before


def test_the_fingerprint_is_stable() -> None:
    """Files hold it: it must not change between versions of Onward."""
    assert fingerprint(good().graph) == "793d79406e66750a549626aed9a8020aa488703a351629f4b98f3334874f0156"
