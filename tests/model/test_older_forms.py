"""Files of older forms: drafts of 2019 and 2020 and onnx 1.7's GraphCall are read, trained and written as today's."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import pytest
from commands import failed, run
from google.protobuf.unknown_fields import UnknownFieldSet
from marks import needs
from onnx import ModelProto

import onward
from older_forms import write
from onward.errors import InvalidModelError

TRAINED = [file.__name__ for file in write.FILES if file is not write.linear_model]
X = np.arange(1, 6, dtype=np.float32).reshape(5, 1)
BATCH = {"input": X, "label": 2 * X}
OLDER = "older form"


def read(source: str | bytes | ModelProto) -> onward.Model:
    with pytest.warns(UserWarning, match=OLDER):
        return onward.load(source)


def path_of(name: str) -> str:
    return str(write.FOLDER / f"{name}.onnx")


def adagrad(weight: float, lr: float, squares: float, steps: int) -> list[float]:
    """Losses of y = w x under Adagrad, in numpy."""
    losses, w, h = [], np.float32(weight), np.float32(squares)
    for _ in range(steps):
        difference = 2 * X - X * w
        losses.append(float(np.mean(difference**2)))
        gradient = np.mean(-2 * difference * X)
        h += gradient**2
        w -= lr * gradient / (np.sqrt(h) + 1e-7)
    return losses


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_files_are_what_the_script_writes() -> None:
    for file in write.FILES:
        assert (write.FOLDER / f"{file.__name__}.onnx").read_bytes() == file()


@pytest.mark.parametrize("name", TRAINED)
def test_a_file_of_an_older_form_trains_and_is_saved_in_the_present_one(name: str, tmp_path) -> None:
    model = read(path_of(name))
    expected = adagrad(-0.25, 0.2, 1.0, steps=5)
    for engine in ("onnxruntime", "numpy"):
        running = onward.engines.start(model, engine=engine)
        losses = [float(running.step(BATCH)["loss_value"]) for _ in range(5)]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)

    model.save(tmp_path / "present.onnx")
    present = onnx.load(tmp_path / "present.onnx")
    assert len(present.training_info) == 1 and not len(UnknownFieldSet(present))
    assert "GraphCall" not in str(present)
    onnx.checker.check_model(present)
    codes = {finding.code for finding in onward.check(tmp_path / "present.onnx")}
    assert not codes & {"OW106", "OW107"}


@pytest.mark.parametrize("name", TRAINED)
def test_the_command_line_says_what_was_converted(name: str, tmp_path) -> None:
    findings = onward.check(path_of(name))
    assert not [finding for finding in findings if finding.severity == "error"]
    assert {finding.code for finding in findings} & {"OW106", "OW107"}
    assert OLDER in run("show", path_of(name)).stderr
    run("data", path_of(name), "--to", "none", "-o", str(tmp_path / "present.onnx"))
    assert not run("show", str(tmp_path / "present.onnx")).stderr
    np.savez(tmp_path / "data.npz", **BATCH)
    options = (
        "--epochs",
        "2",
        "--batch-size",
        "5",
        "--run",
        str(tmp_path / "run"),
        "-o",
        str(tmp_path / "trained.onnx"),
    )
    done = run("train", path_of(name), "--data", str(tmp_path / "data.npz"), *options)
    assert OLDER in done.stderr
    inference = onnx.reference.ReferenceEvaluator(str(tmp_path / "trained.onnx"))
    before = onnx.reference.ReferenceEvaluator(path_of("linear_model")).run(None, {"input": X})[0]
    after = inference.run(None, {"input": X})[0]
    assert np.mean((after - 2 * X) ** 2) < np.mean((before - 2 * X) ** 2)


def test_several_tensors_that_an_optimizer_takes_one_after_the_other() -> None:
    """The script that made the demonstration gave each tensor with its gradient and state; operators want kinds."""
    one = write.value("b", (1, 1)), write.value("new_b", (1, 1)), write.value("new_h", (1, 1))
    nodes = [*write.NODES, write.node("Add", ["3", "b"], ["4"])]
    initializers = [write.tensor("1", (1, 1), -0.25), write.tensor("b", (1, 1), 0.5)]
    graph = write.graph("affine", nodes, [write.X, write.WEIGHT, one[0]], [write.value("4", (5, 1))], initializers)
    slots = ["1", "grad_1", "squared_grad_sum1", "b", "grad_b", "h"]
    results = ["new_1", "new_squared_grad_sum_1", "new_b", "new_h"]
    states = {"1": "new_1", "squared_grad_sum1": "new_squared_grad_sum_1", "b": "new_b", "h": "new_h"}
    training = write.message(
        *((1, item) for item in (*write.INITIALIZERS, write.tensor("h", (1, 1), 4.0))),
        (2, write.LABEL),
        *((3, item) for item in (*write.RESULTS, *one[1:])),
        (4, write.node("MeanSquaredError", ["4", "label"], ["loss_value"], write.text("reduction", "sum"))),
        *write.pairs(5, {"1": "grad_1", "b": "grad_b"}),
        (6, write.node("Adagrad", ["R", "T", *slots], results, *write.SETTINGS)),
        *write.pairs(7, states),
    )
    running = onward.engines.start(read(write.model(graph, (21, training))), engine="numpy")
    difference = X * np.float32(-0.25) + 0.5 - 2 * X
    assert float(running.step(BATCH)["loss_value"]) == pytest.approx(np.sum(difference**2), rel=1e-6)
    for name, x, start, h in (("1", X, -0.25, 1.0), ("b", np.ones_like(X), 0.5, 4.0)):
        gradient = np.sum(2 * difference * x)
        expected = start - 0.2 * gradient / np.sqrt(h + gradient**2)
        assert running.state()[name].item() == pytest.approx(expected, rel=1e-6)


def test_what_no_draft_has_is_left_out_and_said() -> None:
    with pytest.warns(UserWarning, match="field 99 of the model, which no draft has, is left out"):
        onward.load(write.may_2019() + write.field(99, "a vendor's"))


# ---- GraphCall -------------------------------------------------------------------------------------------------------

INFERENCE = """<ir_version: 7, opset_import: ["": 12, "ai.onnx.preview.training": 1]>
    inference (float[N,2] X, float[2,1] W, float[1] B) => (float[N,1] Y, float[N,1] H)
    <float[2,1] W = {1.0, 2.0}, float[1] B = {3.0}> { H = MatMul(X, W) Y = Add(H, B) }"""
CALL = 'ai.onnx.preview.training.GraphCall <graph_name="inference">'
GRADIENT = 'G = ai.onnx.preview.training.Gradient <xs=["W"], zs=["X_1","L"], y="O">(W, X_1, L)'


def calling(body: str, inputs: str = "float[N,2] X_1, float[N,1] L") -> ModelProto:
    proto = onnx.parser.parse_model(INFERENCE)
    info = proto.training_info.add()
    info.algorithm.CopyFrom(onnx.parser.parse_graph(f"algorithm ({inputs}) => (float[2,1] V) {{ {body} }}"))
    info.update_binding.add(key="W", value="V")
    return proto


REST = "D = Sub(Y_1, L) S = Mul(D, D) O = ReduceMean<keepdims=0>(S)"


@pytest.mark.parametrize("inputs", ["X_1", 'X_1, "", ""', "X_1, W", "X_1, W, B"])
def test_a_call_on_inputs_becomes_the_combined_graph(inputs: str) -> None:
    model = read(calling(f"Y_1 = {CALL}({inputs}) {REST} {GRADIENT} V = Sub(W, G)"))
    algorithm = model.steps[0].algorithm
    assert [node.op_type for node in algorithm] == ["Sub", "Mul", "ReduceMean", "Gradient", "Sub"]
    assert [value.name for value in algorithm.inputs] == ["L"]
    assert algorithm[0].inputs[0] is model.graph.outputs[0]
    assert list(algorithm[3].attributes["zs"].as_strings()) == ["X", "L"]
    onnx.checker.check_model(ir.to_proto(model.combined()), full_check=True)


DATA, LABELS = np.array([[1, 2], [3, 4]], np.float32), np.array([[5], [7]], np.float32)
W, B = np.array([[1], [2]], np.float32), np.float32(3)
TURNED = "T = Transpose(X_1) V = MatMul(T, Z)"
BRANCH = (
    "C = Constant<value = bool {1}>() Z = If(C) <"
    f"then_branch = t () => (float[N,1] I) {{ I = {CALL}(X_1, V_1) }}, "
    "else_branch = e () => (float[N,1] E) { E = Neg(L) }>"
)


@pytest.mark.parametrize(
    ("body", "z"),
    [
        (f"Q = Mul(X_1, X_1) Z = {CALL}(Q)", DATA**2 @ W + B),
        (f"X = Mul(X_1, X_1) Z = {CALL}(X)", DATA**2 @ W + B),  # a name that the inference graph has too
        (f"V_1 = Neg(W) Z = {CALL}(X_1, V_1)", DATA @ -W + B),
        (f"V_1 = Neg(W) {BRANCH}", DATA @ -W + B),
        (f'V_1 = Neg(W) "", Z = {CALL}(X_1, V_1, L_1)', DATA @ -W),
        (f"P = {CALL}(X_1) Q = Neg(X_1) R = {CALL}(Q) Z = Mul(P, R)", (DATA @ W + B) * (-DATA @ W + B)),
        ("Z = GraphCall<input_names = ['B', 'X'], output_names = ['H']>(L_1, X_1)".replace("'", '"'), DATA @ W),
    ],
)
def test_a_call_on_other_values_becomes_a_copy(body: str, z: np.ndarray) -> None:
    """Computed by onnx's own evaluator, on the combined graph."""
    proto = calling(f"L_1 = ReduceSum<keepdims=0>(L) {body} {TURNED}")
    model = read(proto)
    combined = ir.to_proto(model.combined())
    onnx.checker.check_model(combined, full_check=True)
    feeds = {value.name: LABELS if value.name == "L" else DATA for value in combined.graph.input}
    feeds = {name: array for name, array in feeds.items() if name not in ("W", "B")}
    result = onnx.reference.ReferenceEvaluator(combined).run(["V"], feeds)[0]
    np.testing.assert_allclose(result, DATA.T @ z, rtol=1e-6)
    assert "GraphCall" not in str(model.to_proto())


def test_an_output_that_is_an_input_is_passed_on() -> None:
    proto = calling(f'Q = Neg(X_1) "", "", Z = {CALL}(Q) S = ReduceSum(Z) V = Add(W, S)')
    proto.graph.output.append(proto.graph.input[0])
    assert [node.op_type for node in read(proto).steps[0].algorithm][2] == "Add"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("GraphCall(X_1)", "does not say which graph"),
        ('GraphCall<graph_name = "other">(X_1)', "calls `other`, and only the inference graph, `inference`"),
        (f"{CALL}()", "gives no value for `X`"),
        (f'{CALL}("", W)', "gives no value for `X`"),
        (f"{CALL}(X_1, W, W, W)", "has 4 inputs, and the inference graph has 3"),
        ('GraphCall<input_names=["x"], output_names=["Y"]>(X_1)', "`x` is not an input"),
        ('GraphCall<input_names=["X", "W"], output_names=["Y"]>(X_1)', "1 inputs, and 2 names"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(call: str, said: str) -> None:
    proto = calling(f"Y_1 = {call} V = Neg(W)")
    with pytest.raises(InvalidModelError) as error:
        onward.load(proto)
    assert said in str(error.value) and "prepare" in str(error.value.hint)
    assert [f.code for f in onward.check(proto) if f.code == "OW115"]


def test_a_graph_that_calls_itself_is_refused() -> None:
    proto = calling("V = Neg(W)")
    proto.graph.node.extend(onnx.parser.parse_graph(f"g (float[N,2] X) => (float[N,1] Z) {{ Z = {CALL}(X) }}").node)
    with pytest.raises(InvalidModelError, match="outside of an algorithm"):
        onward.load(proto)


# ---- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_a_file_that_was_cut_off_is_refused(name: str, tmp_path) -> None:
    data = next(file for file in write.FILES if file.__name__ == name)()
    (tmp_path / "cut.onnx").write_bytes(data[:-7])
    message, _ = failed("train", str(tmp_path / "cut.onnx"), "--data", "none.npz")
    assert "damaged" in message


def drafted(*fields: tuple[int, bytes], functions: tuple[bytes, ...] = ()) -> bytes:
    return write.model(write.LINEAR, *((9, item) for item in functions), (21, write.message(*fields)))


def circle() -> bytes:
    calls = {"A": "B", "B": "A"}
    functions = [write.function(a, ["x"], ["y"], [write.node(b, ["x"], ["y"])]) for a, b in calls.items()]
    algorithm = write.function("step", ["1"], ["new"], [write.node("A", ["1"], ["new"])])
    return drafted((4, algorithm), *write.pairs(7, {"new": "1"}), functions=tuple(functions))


def elsewhere() -> bytes:
    tensor = write.message((2, 1), (8, "R"), (13, write.message((1, "location"), (2, "/etc/passwd"))), (14, 1))
    algorithm = write.function("step", ["1"], ["new"], [write.node("Neg", ["1"], ["new"])])
    return drafted((1, tensor), (4, algorithm), *write.pairs(7, {"new": "1"}))


UNCLEAR = {
    "no training at all": (drafted((1, b"\xff")), "unclear"),
    "a number where a message belongs": (write.model(write.LINEAR, (21, 5)), "unclear"),
    "no algorithm": (drafted((1, write.INITIALIZERS[0]), *write.pairs(7, {"new": "1"})), "no FunctionProto"),
    "no loss": (drafted((6, write.adagrad()), (4, b"")), "no loss"),
    "a binding to nothing": (
        drafted((4, write.function("step", [], ["a"], [write.node("Neg", ["1"], ["a"])])), *write.pairs(7, {"a": "b"})),
        "binds `a` and `b`",
    ),
    "functions in a circle": (circle(), "calls itself"),
    "data elsewhere": (elsewhere(), "another file"),
    "a Gradient of others": (
        write.training_linear_model().replace(
            b"\x0a\x05input\x0a\x011\x12\x06grad_1", b"\x0a\x05input\x0a\x012\x12\x06grad_1"
        ),
        "unclear which",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_what_is_unclear_is_refused(what: str) -> None:
    data, said = UNCLEAR[what]
    with pytest.raises(onward.Error, match=said):
        onward.load(data)
    assert any(finding.severity == "error" for finding in onward.check(data))


# ---- frameworks ------------------------------------------------------------------------------------------------------

EXPECTED = adagrad(-0.25, 0.2, 1.0, steps=5)


@needs("torch")
@pytest.mark.parametrize("name", TRAINED)
def test_a_file_of_an_older_form_goes_on_in_pytorch(name: str) -> None:
    import torch

    module, optimizer, _, loss = onward.to_torch(read(path_of(name)))
    assert isinstance(optimizer, torch.optim.Adagrad) and isinstance(loss, torch.nn.MSELoss)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(module(torch.from_numpy(X)), torch.from_numpy(2 * X))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    np.testing.assert_allclose(losses, EXPECTED, rtol=1e-5)


@needs("jax")
def test_a_file_of_an_older_form_goes_on_in_jax() -> None:
    step, state = onward.to_jax(read(path_of("training_linear_model")))[:2]
    losses = []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, EXPECTED, rtol=1e-5)


@needs("keras")
def test_a_file_of_an_older_form_goes_on_in_keras() -> None:
    model = onward.to_keras(read(path_of("training_linear_model")))
    history = model.fit(X, 2 * X, batch_size=5, epochs=5, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], EXPECTED, rtol=1e-5)


@pytest.mark.usefixtures("untried")
@needs("torch")
def test_a_file_of_an_older_form_goes_to_a_program_and_comes_back(tmp_path) -> None:
    old, program, back = path_of("training_linear_model"), str(tmp_path / "run.pt"), str(tmp_path / "back.onnx")
    assert OLDER in run("convert", old, "--to", "torch", "-o", program).stderr
    run("convert", program, "--like", old, "-o", back)
    running = onward.engines.start(onward.load(back), engine="numpy")
    losses = [float(running.step(BATCH)["loss"]) for _ in range(5)]
    np.testing.assert_allclose(losses, EXPECTED, rtol=1e-5)
