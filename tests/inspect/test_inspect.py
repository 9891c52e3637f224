"""Showing models: the numbers are right, the screen is one screen, the picture is a picture, and names do no harm."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from broken_models import DAMAGES, GOOD
from marks import needs
from models import digits_mlp, small_cnn
from onnx import TensorProto, helper, numpy_helper, parser
from rich.cells import cell_len
from rich.console import Console

import onward
from onward.errors import Error, UnknownNameError
from onward.inspect import Summary, describe, draw, render, render_parameters
from onward.model.storage.tensor_sites import HeldTensor
from onward.recipe.optimizers import OPTIMIZERS

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
WHEEL = sorted([*(DATA / "simple").rglob("*.onnx"), *(DATA / "light").glob("*.onnx")])
SVG = "{http://www.w3.org/2000/svg}"

RECIPES: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "sgd"},
    "adamw": {
        "optimizer": "adamw:lr=1e-3,weight_decay=0.01",
        "schedule": "cosine:steps=1000,warmup=50",
        "clip": "norm:1",
        "freeze": "fc*.bias",
    },
    "everything": {
        "optimizer": "momentum:weight_decay=0.1",
        "schedule": ["warmup:steps=10,until=10", "cosine:steps=90"],
        "groups": ["*.bias:weight_decay=0"],
        "clip": "value:0.5",
        "accumulate": 4,
        "ema": 0.99,
        "loss_scale": "dynamic",
    },
}


def prepared(model: onnx.ModelProto, recipe: str, **changes: Any) -> onward.Model:
    return onward.prepare(model, **{"loss": "cross_entropy", **RECIPES[recipe], **changes})


def screen(show: Any, summary: Summary, width: int = 80, **console: Any) -> list[str]:
    file = io.StringIO()
    show(summary, Console(file=file, width=width, **console))
    return file.getvalue().splitlines()


def picture(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def titles(svg: str) -> str:
    return "\n".join(element.text or "" for element in picture(svg).iter(f"{SVG}title"))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_parameters_of_a_training_model() -> None:
    summary = describe(prepared(digits_mlp(), "adamw", freeze="fc1.*"))
    counts = {role: (amount.tensors, amount.numbers, amount.bytes) for role, amount in summary.parameters.items()}
    assert counts == {
        "trained": (2, 10 * 32 + 10, 4 * 330),
        "frozen": (2, 64 * 32 + 32, 4 * 2080),
        "trainable": (0, 0, 0),
        "statistics": (0, 0, 0),
        "constant": (0, 0, 0),
    }
    assert [(w.name, w.role, w.reason, w.group, w.steps) for w in summary.weights] == [
        ("fc1.weight", "frozen", "frozen by `fc1.*`", None, ()),
        ("fc1.bias", "frozen", "frozen by `fc1.*`", None, ()),
        ("fc2.weight", "trained", "read by Gemm", "group0", (0,)),
        ("fc2.bias", "trained", "read by Gemm", "group0", (0,)),
    ]


def test_state_of_a_training_model() -> None:
    step = describe(prepared(small_cnn(), "everything")).steps[0]
    parameters = 8 * 9 + 8 + 8 + 8 + 1280 + 10
    assert (step.trained.tensors, step.trained.numbers) == (6, parameters)
    assert {state.role: (state.tensors, state.bytes) for state in step.state} == {
        "parameter": (6, 4 * parameters),
        "optimizer_state": (6, 4 * parameters),
        "ema": (6, 4 * parameters),
        "accum": (6, 4 * parameters),
        "statistics": (2, 4 * 16),
        "rng": (1, 8),
        "scaler": (2, 12),
        "counter": (3, 24),
    }
    assert step.initialization


def test_what_goes_in_and_out() -> None:
    summary = describe(prepared(digits_mlp(), "adamw"))
    step = summary.steps[0]
    assert [(p.name, p.type, p.shape) for p in summary.inputs] == [("image", "float32", ("N", 64))]
    assert [(p.name, p.type, p.shape) for p in summary.outputs] == [("logits", "float32", ("N", 10))]
    assert [(p.name, p.type, p.shape) for p in step.inputs] == [("labels", "int64", ("N",))]
    assert [p.name for p in step.metrics] == ["loss", "lr", "grad_norm"]


@needs("torch")
@pytest.mark.parametrize("is_training", [True, False])
def test_a_model_that_was_exported_in_training_mode(tmp_path: Path, is_training: bool) -> None:
    """Its Dropout drops values also when the trained model runs."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5))
    options = {"input_names": ["x"], "output_names": ["y"], "dynamic_shapes": ({0: "N"},), "optimize": False}
    torch.onnx.export(net.train(is_training), (torch.rand(5, 4),), tmp_path / "net.onnx", verbose=False, **options)
    remarks = [remark for remark in describe(tmp_path / "net.onnx").remarks if "in training mode" in remark]
    assert len(remarks) == is_training
    assert all("dropout" in remark and "module.eval()" in remark for remark in remarks)


def test_the_file(tmp_path: Path) -> None:
    path = prepared(digits_mlp(), "adamw").save(tmp_path / "training.onnx")
    summary = describe(path)
    assert summary.name == "training.onnx"
    file = summary.file
    assert (file.path, file.bytes, file.external_bytes) == (str(path), path.stat().st_size, 0)
    assert (file.opset, file.ir_version, file.producer, file.nodes) == (21, 10, "onward-tests", 3)
    assert file.opsets["ai.onnx"] == 21
    assert "onward.AdamW" in file.functions


def test_loss_and_what_is_around_the_optimizer() -> None:
    loss = {"logits": ["cross_entropy:label_smoothing=0.1", "mse:scale=0.5"]}
    step = describe(prepared(small_cnn(), "everything", loss=loss)).steps[0]
    assert step.loss.differentiated == ("scaled_loss",)
    assert [(t.name, t.output, t.options, t.scale) for t in step.loss.terms] == [
        ("cross_entropy", "logits", {"label_smoothing": 0.1}, 1.0),
        ("mse", "logits", {}, 0.5),
    ]
    assert step.clip is not None and (step.clip.kind, step.clip.limit) == ("value", 0.5)
    assert step.accumulation is not None and (step.accumulation.batches, step.accumulation.seen) == (4, 0)
    assert step.average is not None and (step.average.decay, step.average.updates) == (0.99, 0)
    assert step.loss_scale is not None and step.loss_scale.dynamic
    assert (step.loss_scale.scale, step.loss_scale.settings["growth_interval"]) == (65536, 2000)


@pytest.mark.parametrize(
    ("clip", "kind", "limit"),
    [(2.0, "norm", 2.0), ("norm:1,variant=optax", "norm", 1.0), ("tensor_norm:3", "tensor_norm", 3.0)],
)
def test_clipping(clip: Any, kind: str, limit: float) -> None:
    found = describe(prepared(digits_mlp(), "plain", clip=clip)).steps[0].clip
    assert found is not None and (found.kind, found.limit) == (kind, limit)


def test_a_fixed_loss_scale() -> None:
    found = describe(prepared(digits_mlp(), "plain", loss_scale=128)).steps[0].loss_scale
    assert found is not None and (found.scale, found.dynamic) == (128, False)


# ---- hyper-parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_hyper_parameter_of(name: str) -> None:
    changes = {"trainable": "*.weight"} if name == "muon" else {}
    model = prepared(digits_mlp(), "plain", optimizer=f"{name}:lr=0.25", **changes)
    [group] = describe(model).steps[0].groups
    assert group.optimizer == name
    assert group.hyper == pytest.approx({**OPTIMIZERS[name].hyper, "lr": 0.25})
    assert next(iter(group.hyper)) == "lr"
    slots = {state.metadata_props.get("train.slot") for state in _tensors(model)} - {None}
    assert set(group.slots) == slots


def _tensors(model: onward.Model) -> list[Any]:
    return [value.const_value for value in model.steps[0].algorithm.initializers.values()]


def test_hyper_parameters_are_those_of_now() -> None:
    model = prepared(digits_mlp(), "adamw")
    model.set("group0/lr", 0.5)
    model.set("group0/weight_decay", 0.25)
    model.set("clip/limit", 7.0)
    model.set("schedule/steps", 2000.0)
    step = describe(model).steps[0]
    assert (step.groups[0].hyper["lr"], step.groups[0].hyper["weight_decay"]) == (0.5, 0.25)
    assert step.clip is not None and step.clip.limit == 7.0
    assert step.schedule[0].numbers["steps"] == step.progress.steps == 2000
    assert step.hyperparameters["group0/lr"] == 0.5


def test_attributes_of_standard_operators_are_those_of_now() -> None:
    model = prepared(digits_mlp(), "plain", optimizer="momentum:dampening=0.5")
    for node in model.steps[0].algorithm:
        if node.op_type == "Momentum":
            node.attributes["alpha"] = ir.AttrFloat32("alpha", 0.8)
    [group] = describe(onward.load(model.to_proto())).steps[0].groups
    assert group.operators == ("ai.onnx.preview.training.Momentum",)
    assert (group.hyper["momentum"], group.hyper["dampening"]) == (0.8, 0.5)


def test_groups() -> None:
    first, second = describe(prepared(small_cnn(), "everything")).steps[0].groups
    assert first.parameters == ("conv.bias", "bn.bias", "fc.bias")
    assert second.parameters == ("conv.weight", "bn.weight", "fc.weight")
    assert (first.hyper["weight_decay"], second.hyper["weight_decay"]) == (0.0, 0.1)


@pytest.mark.parametrize(
    ("schedule", "step", "steps", "rate"),
    [
        (None, 3, None, 0.1),
        ("constant", 3, None, 0.1),
        ("cosine:steps=1000", 500, 1000, 0.05),
        ("cosine:steps=1050,warmup=50", 25, 1050, 0.05),
        ("multistep:milestones=[2,4],gamma=0.1", 3, None, 0.01),
        (["warmup:steps=10,until=10", "linear:steps=90"], 55, 100, 0.05),
    ],
)
def test_schedules_and_progress(schedule: Any, step: int, steps: int | None, rate: float) -> None:
    model = prepared(digits_mlp(), "plain", optimizer="sgd:lr=0.1", schedule=schedule)
    model.set("step", step)
    found = describe(model).steps[0]
    assert (found.progress.step, found.progress.steps) == (step, steps)
    assert found.groups[0].lr_now == pytest.approx(rate)


def test_a_schedule_that_is_not_ours_is_shown_as_recorded() -> None:
    model = prepared(digits_mlp(), "plain")
    model.steps[0].metadata["train.lr_scheduler"] = json.dumps([{"name": "plateau", "patience": 3}])
    step = describe(model).steps[0]
    assert (step.schedule[0].name, step.schedule[0].numbers) == ("plateau", {"patience": 3})
    assert step.groups[0].lr_now is None


def test_numbers_of_a_second_step_are_its_own() -> None:
    first = prepared(digits_mlp(), "adamw", optimizer="adamw:lr=0.5")
    second = onward.prepare(first, loss="mse", optimizer="adamw:lr=0.25", schedule="cosine:steps=7", append=True)
    one, two = describe(second).steps
    assert (one.groups[0].hyper["lr"], two.groups[0].hyper["lr"]) == (0.5, 0.25)
    assert (one.progress.steps, two.progress.steps) == (1000, 7)


# ---- the JSON form ---------------------------------------------------------------------------------------------------

WEIGHT = "bytes group name numbers reason role shape steps type"
AMOUNT = "bytes numbers tensors"
KEYS = {
    "": "file format inputs name outputs parameters quantization remarks steps weights",
    "file": "bytes external_bytes external_files functions ir_version nodes opset opsets path producer says",
    "inputs": "name shape type",
    "outputs": "name shape type",
    "parameters": "constant frozen statistics trainable trained",
    **{f"parameters.{role}": AMOUNT for role in ("constant", "frozen", "statistics", "trainable", "trained")},
    "weights": WEIGHT,
    "steps": (
        "accumulation average clip groups hyperparameters initialization inputs loss loss_scale metrics name nodes "
        "progress schedule state trained"
    ),
    "steps.accumulation": "batches seen",
    "steps.average": "decay updates",
    "steps.clip": "kind limit operator",
    "steps.groups": "hyper is_function lr_now name operators optimizer options parameters slots",
    "steps.inputs": "name shape type",
    "steps.loss": "differentiated operators outputs terms",
    "steps.loss.terms": "inputs name options output scale",
    "steps.loss_scale": "dynamic scale settings",
    "steps.metrics": "name shape type",
    "steps.progress": "recorded step steps",
    "steps.schedule": "choices name numbers",
    "steps.state": "bytes role tensors",
    "steps.trained": AMOUNT,
}
FREE = {"opsets", "hyper", "options", "numbers", "choices", "settings", "recorded", "hyperparameters", "says"}


def keys(item: Any, place: str = "") -> dict[str, str]:
    """The keys at each place; lists stand for their items, and objects with keys that files choose are left out."""
    if isinstance(item, list):
        return {k: v for one in item for k, v in keys(one, place).items()}
    if not isinstance(item, dict) or place.rpartition(".")[2] in FREE:
        return {}
    found = {place: " ".join(sorted(item))}
    for key, value in item.items():
        found |= keys(value, f"{place}.{key}".lstrip("."))
    return found


def test_the_keys_of_the_json_form_are_stable() -> None:
    data = describe(prepared(small_cnn(), "everything")).to_json()
    assert keys(data) == KEYS
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_the_docstring_names_every_key() -> None:
    documented = set(re.findall(r"\w+", Summary.__doc__ or ""))
    assert {key for line in KEYS.values() for key in line.split()} <= documented


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_file_says_the_same_as_the_model(recipe: str, tmp_path: Path) -> None:
    model = prepared(small_cnn(), recipe)
    before = describe(model).to_json()
    after = describe(model.save(tmp_path / "model.onnx")).to_json()
    for data in (before, after):
        del data["name"], data["file"]
    assert after == before


@pytest.mark.parametrize("recipe", RECIPES)
def test_describing_changes_nothing(recipe: str) -> None:
    for model in (prepared(small_cnn(), recipe), onward.load(small_cnn())):
        before = model.to_proto().SerializeToString(deterministic=True)
        describe(model)
        assert model.to_proto().SerializeToString(deterministic=True) == before


# ---- models that others made -----------------------------------------------------------------------------------------


def foreign(algorithm: str, inputs: str = "int64[N] labels", **updates: str) -> onnx.ModelProto:
    """A training model without a word about itself: y = Softmax(x W + b), trained by `algorithm`."""
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
        classifier (float[N, 4] x) => (float[N, 3] y)
        <float[4, 3] W = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] b = {0, 0, 0}, float[3] limits = {9, 9, 9}>
        { xw = MatMul (x, W)  z = Add (xw, b)  y = Min (z, limits) }
    """)
    step = model.training_info.add()
    step.algorithm.CopyFrom(parser.parse_graph(f"train ({inputs}) => () {algorithm}"))
    for key, value in updates.items():
        step.update_binding.add(key=key, value=value)
        step.algorithm.output.add(name=value)
    return model


ADAM = """
    <float R = {0.01}, int64 T = {5}, float[4, 3] V = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     float[4, 3] H = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>
    {
        L = SoftmaxCrossEntropyLoss (y, labels)
        G = ai.onnx.preview.training.Gradient <xs = ["W"], zs = ["x", "labels"], y = "L"> (W, x, labels)
        W2, V2, H2 = ai.onnx.preview.training.Adam <alpha = 0.8, norm_coefficient = 0.001> (R, T, W, G, V, H)
        one = Constant <value_int = 1> ()
        T2 = Add (T, one)
    }
"""
SGD = """
    <float rate = {0.5}>
    {
        L = SoftmaxCrossEntropyLoss (y, labels)
        GW, Gb = ai.onnx.preview.training.Gradient <xs = ["W", "b"], zs = ["x", "labels"], y = "L"> (W, b, x, labels)
        dW = Mul (rate, GW)  W2 = Sub (W, dW)
        db = Mul (rate, Gb)  b2 = Sub (b, db)
    }
"""


def test_a_foreign_model_with_a_standard_optimizer() -> None:
    summary = describe(foreign(ADAM, W="W2", V="V2", H="H2", T="T2"))
    step = summary.steps[0]
    assert (step.loss.differentiated, step.loss.operators, step.loss.outputs) == (
        ("L",),
        ("SoftmaxCrossEntropyLoss",),
        ("y",),
    )
    [group] = step.groups
    assert (group.optimizer, group.operators) == ("adam", ("ai.onnx.preview.training.Adam",))
    assert group.hyper == {"lr": 0.01, "beta1": 0.8, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.001} | {
        "lr": pytest.approx(0.01)
    }
    assert (step.progress.step, step.progress.steps) == (5, None)
    assert [(w.name, w.role, w.reason) for w in summary.weights] == [
        ("W", "trained", "read by MatMul"),
        ("b", "frozen", "no step trains it"),
        ("limits", "constant", "a setting of Min"),
    ]
    assert {state.role: state.tensors for state in step.state} == {"parameter": 1, "counter": 1, "state": 2}
    assert not step.initialization


def test_a_foreign_model_with_an_update_in_plain_operators() -> None:
    step = describe(foreign(SGD, W="W2", b="b2")).steps[0]
    [group] = step.groups
    assert (group.optimizer, group.operators, group.parameters) == (None, ("Sub",), ("W", "b"))
    text = "\n".join(screen(render, describe(foreign(SGD, W="W2", b="b2"))))
    assert "unknown: plain operators, the last one Sub" in text
    assert "step unknown" in text


def test_a_learning_rate_that_is_an_input() -> None:
    algorithm = ADAM.replace("float R = {0.01}, ", "")
    model = foreign(algorithm, inputs="int64[N] labels, float R", W="W2", V="V2", H="H2", T="T2")
    [group] = describe(model).steps[0].groups
    assert (group.hyper["lr"], group.lr_now) == ("input `R`", None)


def test_an_algorithm_without_gradients() -> None:
    model = foreign("<float[3] g = {1, 2, 3}> { b2 = Sub (b, g) }", inputs="", b="b2")
    summary = describe(model)
    assert {w.name: (w.role, w.reason) for w in summary.weights}["b"] == ("trained", "updated without a Gradient")
    assert "no Gradient" in "\n".join(screen(render, summary))


def test_each_step_has_a_section() -> None:
    summary = describe(GOOD["gan"]())
    assert [group.optimizer for step in summary.steps for group in step.groups] == ["momentum", "adagrad"]
    assert {w.name: w.steps for w in summary.weights} == {"g": (1,), "d": (0,)}
    text = "\n".join(screen(render, summary))
    assert "step 0: train_d" in text and "step 1: train_g" in text and "mode nesterov" in text


def test_facts_that_are_not_what_they_should_be() -> None:
    model = prepared(digits_mlp(), "adamw")
    for key in list(model.steps[0].metadata):
        for value in ("7", "null", "[[]]", '{"a": 1}', '[{"name": 3, "params": 7, "hyper": [1]}]', '"text"', "{"):
            model.steps[0].metadata[key] = value
            screen(render, describe(model))


# ---- inference models ------------------------------------------------------------------------------------------------


def test_an_inference_model_says_what_would_be_trained() -> None:
    summary = describe(small_cnn())
    chosen = onward.prepare(small_cnn(), loss="cross_entropy").steps[0].differentiated()
    assert [w.name for w in summary.with_role("trainable")] == chosen
    assert summary.parameters["statistics"].tensors == 2
    assert {w.name: w.reason for w in summary.with_role("constant")} == {"dropout.ratio": "a setting of Dropout"}
    assert not summary.steps
    lines = screen(render, summary)
    assert lines[-1] == "make it a training model: onward prepare model.onnx --loss ..."


def test_parameters_that_hide_in_nodes_are_counted() -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        hidden (float[N, 2] x) => (float[N, 3] y)
        <int8[2, 3] q = {1, 2, 3, 4, 5, 6}, float scale = {0.1}, int64[1] size = {3}>
        {
            w = DequantizeLinear (q, scale)
            c = Constant <value = float[2] {1, 2}> ()
            b = ConstantOfShape (size)
            xc = Mul (x, c)  xw = MatMul (xc, w)  y = Add (xw, b)
        }
    """)
    found = {w.name: (w.type, w.shape, w.numbers, w.bytes) for w in describe(model).with_role("trainable")}
    assert found == {
        "w": ("float32", (2, 3), 6, 24),
        "c": ("float32", (2,), 2, 8),
        "b": ("float32", (3,), 3, 12),
    }


@pytest.mark.parametrize("path", WHEEL, ids=lambda path: path.parent.name if path.stem == "model" else path.stem)
def test_models_of_the_wheel(path: Path) -> None:
    summary = describe(path)
    assert len(screen(render, summary)) <= 35
    screen(render_parameters, summary)
    json.dumps(summary.to_json(), allow_nan=False)
    picture(draw(path))


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_broken_models_are_described_or_refused(damage: Any) -> None:
    model = GOOD[damage.of]()
    damage.apply(model)
    try:
        summary = describe(model)
    except Error:
        return
    screen(render, summary)
    screen(render_parameters, summary)


# ---- large models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A model with 8 GiB of weights in a file that has none of them on disk."""
    rows, layers = 1 << 14, 8
    weights = [TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[rows, rows]) for i in range(layers)]
    masks = [TensorProto(name=f"m{i}", data_type=TensorProto.FLOAT, dims=[rows]) for i in range(layers)]
    offset = 0
    for tensor in (*weights, *masks):
        tensor.data_location = TensorProto.EXTERNAL
        length = 4 * int(np.prod(tensor.dims))
        for key, value in {"location": "huge.data", "offset": offset, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        offset += length
    nodes = []
    for i in range(layers):
        nodes.append(helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"p{i}"], name=f"p{i}"))
        nodes.append(helper.make_node("Add", [f"p{i}", f"m{i}"], [f"h{i + 1}"], name=f"a{i}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", rows]) for name in ("h0", f"h{layers}")]
    graph = helper.make_graph(nodes, "huge", ends[:1], ends[1:], [*weights, *masks])
    path = tmp_path / "huge.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString()
    )
    with (tmp_path / "huge.data").open("wb") as file:
        file.truncate(offset)
    return path


def test_weights_outside_the_file_are_not_loaded(huge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(tensor: ir.ExternalTensor, *_: Any) -> Any:
        raise AssertionError(f"`{tensor.name}` was loaded")

    for method in ("numpy", "tobytes", "tofile", "__array__"):
        monkeypatch.setattr(HeldTensor, method, loaded)
    start = time.process_time()
    summary = describe(huge)
    assert time.process_time() - start < 2
    assert summary.parameters["trainable"].numbers == 8 * (2**28 + 2**14)
    assert summary.file.external_bytes == 4 * summary.parameters["trainable"].numbers
    assert "8.0 GiB in huge.data" in "\n".join(screen(render, summary))


# ---- the screen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [digits_mlp, small_cnn])
def test_one_screen(build: Any, recipe: str) -> None:
    summary = describe(prepared(build(), recipe))
    for terminal in (False, True):
        lines = screen(render, summary, force_terminal=terminal, color_system=None)
        assert len(lines) <= 35
        assert max(cell_len(line) for line in lines) <= 80
    table = screen(render_parameters, summary, force_terminal=True, color_system=None)
    assert max(cell_len(line) for line in table) <= 80


def test_the_screen_of_a_training_model() -> None:
    model = prepared(digits_mlp(), "adamw", freeze="fc1.*")
    model.set("step", 525)
    assert (
        screen(render, describe(model))
        == """\
digits_mlp  training model
  file        opset 21, IR 10, 3 nodes + 18 for training, 7 functions
  made by     onward-tests
  in          image  float32 [N, 64]
  out         logits  float32 [N, 10]
  parameters  2,410 in 4 tensors, 9.4 KiB
    trained   330 in 2 tensors, 1.3 KiB (14 %)
    frozen    2,080 in 2 tensors, 8.1 KiB
              fc1.weight, fc1.bias: frozen by `fc1.*`

training
  in          labels  int64 [N]
  metrics     loss, lr, grad_norm
  loss        cross_entropy on logits against labels; differentiated: loss
  optimizer   adamw: lr 0.001 (now 0.0005), beta1 0.9, beta2 0.999, eps 1e-8,
              weight_decay 0.01
  schedule    cosine: steps 1,000, warmup 50, min 0, warmup_start 0
  clipping    norm of all gradients: at most 1
  progress    step 525 of 1,000 (52 %)
  state       parameters 2 (1.3 KiB), optimizer slots 4 (2.6 KiB),
              counters 1 (8 B)""".splitlines()
    )


def test_a_table_of_parameters() -> None:
    lines = screen(render_parameters, describe(prepared(digits_mlp(), "adamw", freeze="fc1.*")))
    assert lines == [
        "name        shape    type        size  role     reason",
        "fc1.weight  [32,64]  float32  8.0 KiB  frozen   frozen by `fc1.*`",
        "fc1.bias    [32]     float32    128 B  frozen   frozen by `fc1.*`",
        "fc2.weight  [10,32]  float32  1.2 KiB  trained  read by Gemm",
        "fc2.bias    [10]     float32     40 B  trained  read by Gemm",
        "total  2,410 in 4 tensors, 9.4 KiB: 330 trained, 2,080 frozen",
    ]


def test_a_long_table_keeps_everything_on_a_narrow_screen() -> None:
    summary = describe(prepared(small_cnn(), "everything"))
    lines = screen(render_parameters, summary, width=60, force_terminal=True, color_system=None)
    text = "".join(line[:15].strip() for line in lines)
    assert "bn.running_mean" in text


def test_options_that_are_not_the_usual_ones_are_shown() -> None:
    model = prepared(digits_mlp(), "plain", optimizer="adam:amsgrad=true,variant=keras")
    text = "\n".join(screen(render, describe(model)))
    assert "amsgrad true" in text and "variant keras" in text and "maximize" not in text


def test_many_frozen_tensors_are_gathered() -> None:
    summary = describe(prepared(scoped(30), "plain", freeze=["encoder.*"]))
    assert "encoder.* (60 tensors): frozen by `encoder.*`" in "\n".join(screen(render, summary))


def test_an_encoding_that_lacks_characters() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    render(describe(renamed("größe")), Console(file=file, width=80))
    file.flush()
    assert rb"gr\xf6\xdfe" in raw.getvalue()


# ---- hostile names ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "a\nb\tc",
    "<script>alert(1)</script>",
    "[red]red[/red] [/]",
    "]]>&amp;<!--",
    "\x1b[31mred\x07\x00",
    "重み" * 30,
    "\u202eevil\u2028",
    'quote" onload="alert(1)',
    "x" * 5000,
]


def renamed(name: str) -> onnx.ModelProto:
    """A model in which everything that has a name has this one, as far as names may be the same."""
    model = digits_mlp()
    model.graph.name = model.producer_name = name
    names = {"image": f"{name}i", "logits": f"{name}o", "fc2.weight": f"{name}w", "hidden": f"{name}h"}
    for node in model.graph.node:
        node.name = name + node.name
        node.input[:] = [names.get(one, one) for one in node.input]
        node.output[:] = [names.get(one, one) for one in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
    return model


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_hostile_names_on_the_screen(name: str) -> None:
    for model in (onward.load(renamed(name)), onward.prepare(renamed(name), loss="cross_entropy", freeze="fc1*")):
        summary = describe(model)
        lines = [*screen(render, summary, width=100), *screen(render_parameters, summary)]
        assert all(line.isprintable() for line in lines)
        if name.startswith("["):
            assert "[red]red[/red] [/]w" in "\n".join(lines)
        assert len(screen(render, summary)) <= 35


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
def test_hostile_names_in_a_picture(name: str) -> None:
    strange = renamed(name)
    strange.graph.node[1].op_type = strange.graph.node[1].domain = name
    for model in (onward.load(strange), onward.prepare(renamed(name), loss="cross_entropy")):
        root = picture(draw(model))
        allowed = {"svg", "title", "style", "rect", "marker", "path", "text", "g", "circle"}
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
        assert not [key for element in root.iter() for key in element.attrib if key.startswith("on")]
        assert float(root.attrib["width"]) < 2000


# ---- pictures --------------------------------------------------------------------------------------------------------


def scoped(layers: int, *, names: bool = True) -> onnx.ModelProto:
    """A deep model whose nodes are named after the layers they are in, or not at all."""
    nodes, weights = [], {"head.weight": np.ones((10, 4), np.float32)}
    for i in range(layers):
        scope = f"/encoder/layer.{i}" if names else ""
        weights |= {f"encoder.{i}.weight": np.eye(4, dtype=np.float32), f"encoder.{i}.bias": np.ones(4, np.float32)}
        steps = [
            helper.make_node("MatMul", [f"h{i}", f"encoder.{i}.weight"], [f"m{i}"], name=f"{scope}/fc/MatMul"),
            helper.make_node("Add", [f"m{i}", f"encoder.{i}.bias"], [f"b{i}"], name=f"{scope}/fc/Add"),
            helper.make_node("Relu", [f"b{i}"], [f"r{i}"], name=f"{scope}/Relu"),
            helper.make_node("Mul", [f"r{i}", "mask"], [f"k{i}"], name=f"{scope}/Mul"),
            helper.make_node("Add", [f"h{i}", f"k{i}"], [f"h{i + 1}"], name=f"{scope}/Add"),
        ]
        nodes += steps
    nodes.append(helper.make_node("Gemm", [f"h{layers}", "head.weight"], ["logits"], name="/head", transB=1))
    if not names:
        for node in nodes:
            node.name = ""
    graph = helper.make_graph(
        nodes,
        "scoped",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("h0", "mask")],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def blocks(svg: str) -> list[str]:
    """The kinds of the blocks that are drawn; each is a group with a title."""
    found = []
    for group in picture(svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        if box is not None and group.find(f"{SVG}title") is not None:
            found.append(box.attrib["class"].removeprefix("block "))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [digits_mlp, small_cnn])
def test_a_picture_shows_everything(build: Any, recipe: str) -> None:
    model = prepared(build(), recipe)
    svg = draw(model)
    text = titles(svg)
    for name in (*model.graph.initializers, *model.steps[0].update):
        assert name in text
    for node in model.graph:
        assert f"{node.op_type} {node.name}" in text
    kinds = blocks(svg)
    groups = len(describe(model).steps[0].groups)
    assert (kinds.count("gradient"), kinds.count("optimizer")) == (1, groups)
    assert kinds.count("inference") == len(model.graph)
    assert ("training" in kinds) == (build is small_cnn)
    assert {"input", "output", "loss", "state", "metric"} <= set(kinds)


def test_a_picture_stands_alone() -> None:
    svg = draw(prepared(small_cnn(), "everything"))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|@import|<image|<foreignObject", svg)
    assert re.findall(r"url\(([^)]*)\)", svg.replace("marker-end=", "")) == ["#arrow"] * svg.count("url(#arrow)")
    root = picture(svg)
    assert root.attrib["viewBox"].startswith("0 0 ") and "max-width:100%" in root.attrib["style"]
    assert "prefers-color-scheme:dark" in svg


def test_a_picture_is_the_same_every_time() -> None:
    assert draw(prepared(small_cnn(), "everything")) == draw(prepared(small_cnn(), "everything"))


def test_blocks_do_not_overlap_and_lie_inside() -> None:
    for model in (prepared(small_cnn(), "everything"), prepared(scoped(40), "adamw", freeze=[]), GOOD["gan"]()):
        root = picture(draw(model))
        width = float(root.attrib["viewBox"].split()[2])
        boxes = []
        graph = [child for child in root if child.tag == f"{SVG}g"][-1]
        left = float(re.findall(r"[\d.]+", graph.attrib["transform"])[0])
        for group in graph.iter(f"{SVG}g"):
            box = group.find(f"{SVG}rect")
            if box is None:
                continue
            x, y = (float(n) for n in re.findall(r"-?[\d.]+", group.attrib["transform"]))
            boxes.append((x, y, x + float(box.attrib["width"]), y + float(box.attrib["height"])))
        assert all(x + left >= 0 and right + left <= width for x, _, right, _ in boxes)
        for i, (x, y, right, bottom) in enumerate(boxes):
            assert not [b for b in boxes[i + 1 :] if b[0] < right and x < b[2] and b[1] < bottom and y < b[3]]


@pytest.mark.slow("named")
@pytest.mark.parametrize("names", [True, False], ids=["named", "nameless"])
def test_a_large_model_is_drawn_by_parts(names: bool) -> None:
    model = prepared(scoped(250, names=names), "adamw", freeze=[])
    start = time.process_time()
    svg = draw(model)
    assert time.process_time() - start < 20
    kinds = blocks(svg)
    assert 8 <= kinds.count("inference") <= 80
    assert kinds.count("optimizer") == 1
    text = titles(svg)
    assert all(name in text for name in model.graph.initializers)
    assert ("encoder/layer.0 to layer." in text) == names


def test_each_step_has_a_picture() -> None:
    first, second = draw(GOOD["gan"](), 0), draw(GOOD["gan"](), -1)
    assert "momentum ×1" in first and "adagrad ×1" in second
    assert "step 1" in titles(second)


def test_there_is_no_picture_of_a_step_that_is_not_there() -> None:
    with pytest.raises(UnknownNameError):
        draw(digits_mlp(), 1)
    with pytest.raises(UnknownNameError):
        draw(GOOD["gan"](), 2)


@pytest.mark.parametrize("name", GOOD)
def test_pictures_of_foreign_models(name: str) -> None:
    kinds = blocks(draw(GOOD[name]()))
    assert "gradient" in kinds and "state" in kinds and "optimizer" in kinds


def test_a_model_of_nothing() -> None:
    empty = helper.make_model(helper.make_graph([], "empty", [], []), ir_version=10)
    assert screen(render_parameters, describe(empty)) == ["total  0 in 0 tensors, 0 B"]
    assert len(screen(render, describe(empty))) >= 2


@pytest.mark.parametrize("schedule", ["cosine:steps=9", "cosine:steps=9,warmup=0", "cosine:steps=9,warmup=0,every=1"])
def test_the_rate_now_is_known_without_a_warm_up(schedule: str) -> None:
    model = onward.prepare(digits_mlp(), loss="ce", optimizer="sgd:lr=1", schedule=schedule)
    model.set("step", 3)
    (group,) = onward.describe(model).steps[0].groups
    assert group.lr_now == pytest.approx(0.75)  # half a cosine after a third of its way
