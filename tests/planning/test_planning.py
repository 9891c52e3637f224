"""`onward plan`: against published arithmetic, against what PyTorch keeps and holds, and as a part of the file."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import failed, run
from marks import needs
from models import digits_mlp
from onnx import TensorProto, helper
from paths import ROOT

import onward
from onward.options import PlanOptions, Strategy
from onward.planning import STRATEGIES, Plan
from onward.planning.strategies import OTHER_NAMES

sys.path.insert(0, str(ROOT / "examples"))

import itertools

from llama import SIZES, llama

GB = 10**9


def chain(*widths: int, type_: int = TensorProto.BFLOAT16) -> onnx.ModelProto:
    """Products one after another, with weights that are nowhere."""
    nodes, weights = [], []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        weight = TensorProto(name=f"{i}.weight", dims=[a, b], data_type=type_, data_location=TensorProto.EXTERNAL)
        weight.external_data.add(key="location", value="nowhere")
        weights.append(weight)
        nodes += [
            helper.make_node("MatMul", [f"x{i}", f"{i}.weight"], [f"h{i}"]),
            helper.make_node("Relu", [f"h{i}"], [f"x{i + 1}"]),
        ]
    ends = [("x0", widths[0]), (f"x{len(widths) - 1}", widths[-1])]
    first, last = (helper.make_tensor_value_info(name, type_, ["N", width]) for name, width in ends)
    graph = helper.make_graph(nodes, "chain", [first], [last], weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


@functools.cache
def seven_billion() -> Plan:
    return onward.plan(llama(SIZES["7b"]), devices=8, shape={"tokens": ("N", 2048)})


# ---- against what others have computed -------------------------------------------------------------------------------


def test_the_arithmetic_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, Adam with mixed precision, 64 devices."""
    found = onward.plan(chain(*[50_000] * 4), loss="mse", optimizer="adam", devices=64)
    assert found.model["parameters"] == 7_500_000_000
    states = {n: e.memory.parameters + e.memory.gradients + e.memory.state for n, e in found.estimates.items()}
    assert states["ddp"] / GB == pytest.approx(120, rel=1e-3)
    assert states["zero1"] / GB == pytest.approx(31.4, rel=3e-3)
    assert states["zero2"] / GB == pytest.approx(16.6, rel=3e-3)
    assert states["fsdp"] / GB == pytest.approx(1.88, rel=3e-3)


def test_what_is_sent_is_that_of_the_zero_paper() -> None:
    """Section 7: a ring sends twice the gradients; with parameters divided, half as much more."""
    found = onward.plan(chain(*[512] * 5), loss="mse", devices=64).estimates
    weights = 4 * 512 * 512 * 2
    assert found["ddp"].sent == found["zero1"].sent == found["zero2"].sent == 2 * weights * 63 // 64
    blocks = onward.plan(llama(SIZES["tiny"]), devices=64, shape={"tokens": ("N", 16)})
    sent, outside = blocks.estimates["fsdp"].sent, 2 * (2 * 256 * 64 + 64)  # what is in no block is gathered once
    assert sent == pytest.approx((3 * blocks.model["bytes"] - outside) * 63 / 64, rel=1e-5)


def test_llama_of_seven_billion() -> None:
    found = seven_billion()
    model = found.model
    assert model["parameters"] == 6_738_415_616
    assert model["bytes"] + model["gradient_bytes"] + model["state_bytes"] == pytest.approx(16 * 6_738_415_616)
    products = 2 * (6_738_415_616 - 32000 * 4096) * 2048  # of which the table of words has none
    attention = 2 * 2 * 32 * 2048 * 2048 * 4096
    assert model["forward_flops"] == pytest.approx(products + attention, rel=0.01)
    assert model["backward_flops"] == pytest.approx(2 * model["forward_flops"], rel=0.01)
    assert model["blocks"] == 32 and model["block_bytes"] == 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert found.estimates["fsdp"].largest_block == model["block_bytes"]


def test_products_are_divided_as_megatron_divides_them() -> None:
    """Shoeybi et al. 2019: columns, then rows; two sums of activations on the way forward and two back in a block."""
    one = seven_billion().estimates["tensor"]
    (sums,) = (each for each in one.communication if each.kind == "all-reduce")
    activations = 2048 * 4096 * 2
    assert sums.sent == 2 * (4 * 32 + 2) * activations * 7 // 8  # and one each for the words and the head
    axes = {name: next(iter(axes)) for name, axes in one.sharding.tensors.items() if ".layers.5." in name}
    columns = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name.split(".")[-2] for name, axis in axes.items() if axis == 1} == columns
    assert {name.split(".")[-2] for name, axis in axes.items() if axis == 0} == {"o_proj", "down_proj"}
    assert one.memory.parameters == pytest.approx(2 * 6_738_415_616 / 8, rel=1e-3)
    assert one.flops == pytest.approx(seven_billion().estimates["ddp"].flops / 8, rel=0.05)


TURNED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[N,8] x) => (float[N,4] y) <float[16,8] a, float[16] a_bias, float[4,16] b, float[4] b_bias> {
  a_turned = Transpose <perm = [1, 0]> (a)
  a_product = MatMul(x, a_turned)
  a_sum = Add(a_product, a_bias)
  h = Relu(a_sum)
  b_turned = Transpose <perm = [1, 0]> (b)
  b_product = MatMul(h, b_turned)
  y = Add(b_product, b_bias)
}
"""


def test_weights_that_an_exporter_has_turned_are_divided_the_other_way() -> None:
    proto = onnx.parser.parse_model(TURNED)
    for info in list(proto.graph.value_info):
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), info.name))
    one = onward.plan(proto, loss="mse", devices=4, strategy="tensor").estimates["tensor"]
    axes = {name: dict(axes) for name, axes in one.sharding.tensors.items()}
    assert axes == {"a": {0: ("tensor",)}, "a_bias": {0: ("tensor",)}, "b": {1: ("tensor",)}}
    assert [(each.kind, each.sent) for each in one.communication] == [("all-reduce", 2 * 4 * 4 * 3 // 4)]


def test_computing_blocks_twice_keeps_what_goes_from_one_to_the_next() -> None:
    model = seven_billion().model
    carried, head = 32 * 2048 * 4096 * 2, 2048 * 32000 * 2
    assert carried + head < model["kept_bytes_with_recompute"] < 2.2 * carried + head  # at most two values each
    assert model["recompute_flops"] == pytest.approx(model["forward_flops"], rel=0.03)
    assert model["peak_bytes_with_recompute"] < model["peak_bytes"] / 4


def test_scores_of_attention_are_kept_only_where_an_engine_keeps_them() -> None:
    kept = {
        engine: onward.plan(llama(SIZES["tiny"]), engine=engine, shape={"tokens": (1, 512)}).model["kept_bytes"]
        for engine in ("torch", "onnxruntime")
    }
    assert kept["onnxruntime"] - kept["torch"] == 2 * 4 * 512 * 512 * 2  # layers, heads, bfloat16


@needs("torch")
def test_what_is_kept_is_what_pytorch_keeps(tmp_path: Path) -> None:
    """By PyTorch's own derivative: all that it saves for the backward pass, each storage once."""
    import torch

    proto = llama(SIZES["tiny"], TensorProto.FLOAT)
    onnx.save(proto, tmp_path / "model.onnx")
    count = sum(int(np.prod(t.dims)) for t in proto.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    np.random.default_rng(0).normal(0, 0.1, count).astype(np.float32).tofile(tmp_path / "weights.data")
    training = onward.prepare(tmp_path / "model.onnx", loss="cross_entropy:axis=-1")
    module, _, _, loss_of = onward.to_torch(training, probe=False)
    tokens = torch.randint(0, 256, (2, 96))
    given = [tokens, torch.ones(96, 16), torch.ones(96, 16), torch.zeros(96, 96)]
    held = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers(), *given)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(module(*given), tokens)
    found = sum(size for place, size in saved.items() if place not in held)
    planned = onward.plan(training, batch_size=2, shape={"tokens": ("N", 96)}).model["kept_bytes"]
    assert loss.isfinite()
    assert 0.93 < planned / found < 1.01  # with a mask that it does not know, attention keeps its result twice


# ---- choosing --------------------------------------------------------------------------------------------------------


def test_what_fits_is_recommended_and_the_quickest_first() -> None:
    wide = {"loss": "mse", "flops": "100T", "devices": 8}
    found = onward.plan(chain(*[8192] * 4), **wide, batch_size=2**16, memory="3GB", bandwidth="450GB")
    assert not found.estimates["ddp"].fits and found.estimates["zero1"].fits
    assert found.recommended == "zero1"  # what it sends is sent meanwhile
    slow = onward.plan(chain(*[8192] * 4), **wide, batch_size=64, bandwidth="100MB")
    assert slow.estimates["zero1"].step_seconds == pytest.approx(slow.estimates["zero1"].sent / 1e8)
    assert slow.recommended == "tensor"  # since activations are smaller than weights
    none = onward.plan(llama(SIZES["tiny"]), shape={"tokens": ("N", 64)}, devices=2, memory="1kB")
    assert none.recommended is None and "nothing fits: recompute blocks, or use more devices" in str(none)


def test_batches_are_divided_among_those_that_compute_different_samples() -> None:
    found = onward.plan(digits_mlp(), loss="cross_entropy", devices=16, batch_size=32, accumulate=3)
    samples = {name: each.samples for name, each in found.estimates.items()}
    assert set(samples.values()) == {32 * 3}
    assert found.estimates["tensor"].memory.activations > found.estimates["ddp"].memory.activations  # 16 samples, not 2
    assert found.estimates["zero2"].sent > found.estimates["zero1"].sent  # gradients are divided for each batch
    odd = onward.plan(digits_mlp(), loss="cross_entropy", devices=16, batch_size=6)
    assert list(odd.estimates) == ["tensor", "tensor+fsdp"] and "cannot be divided among 16" in odd.refused["fsdp"]


def test_the_names_of_strategies() -> None:
    assert {*Strategy.__args__} == {*STRATEGIES, *OTHER_NAMES}
    assert set(PlanOptions(model=0).shape) == set()
    named = onward.plan(digits_mlp(), loss="cross_entropy", devices=4, strategy="zero3")
    assert list(named.estimates) == ["fsdp"]


# ---- in the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "hybrid", "tensor", "tensor+fsdp"])
def test_a_sharding_goes_into_the_file_and_comes_back(strategy: str, tmp_path: Path) -> None:
    training = onward.prepare(digits_mlp(64), loss="cross_entropy", optimizer="adamw")
    sharding = onward.plan(training, devices=16, strategy=strategy).sharding()
    assert sharding.tensors and sharding.devices == 16
    sharding.write_to(training)
    assert onward.check(training) == []
    path = training.save(tmp_path / "sharded.onnx")
    again = onward.load(path)
    again.save(tmp_path / "again.onnx")
    for file in (path, tmp_path / "again.onnx"):
        assert onward.Sharding.of(file) == sharding == onward.Sharding.of(file, strategy)
    assert not [node for node in onward.lower(again).graph.all_nodes() if node.device_configurations]


def test_what_a_sharding_means() -> None:
    """Each device has the part that the specification gives it, by the proposal's own loop over axes."""
    sharding = onward.Sharding("x", {"replica": 2, "shard": 2, "tensor": 3}, {"w": {1: ("tensor",), 0: ("shard",)}})
    model = onward.load(chain_of_floats())
    sharding.write_to(model)
    (spec,) = model.to_proto().graph.node[0].device_configurations[0].sharding_spec
    assert [(dim.axis, dim.simple_sharding[0].num_shards) for dim in spec.sharded_dim] == [(1, 3), (0, 2)]
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    parts = [(column, row) for column in range(3) for row in range(2)]
    place = {device: part for key, part in zip(spec.device, parts, strict=True) for device in groups[key]}
    assert place == {d: (d % 3, d // 3 % 2) for d in range(12)}
    assert onward.Sharding.of(model).spec("w", 2) == (("shard",), ("tensor",))
    assert onward.Sharding.of(model).placements("w") == (None, 0, 1)


def chain_of_floats() -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.zeros((4, 6), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size]) for name, size in (("x", 4), ("y", 6))]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def test_a_sharding_that_cannot_be_is_refused() -> None:
    model = onward.load(chain_of_floats())
    for tensors, message in [
        ({"v": {0: ("shard",)}}, "no tensor `v`"),
        ({"w": {2: ("shard",)}}, "axis 2 cannot be divided"),
        ({"w": {0: ("shard", "tensor")}}, "too short for 8 parts"),
        ({"w": {0: ("replica",)}}, "no axis `replica`"),
        ({"w": {0: ("shard",), 1: ("shard",)}}, "twice"),
    ]:
        with pytest.raises(onward.Error, match=message):
            onward.Sharding("x", {"shard": 2, "tensor": 4}, tensors).write_to(model)
    with pytest.raises(onward.Error, match="has no device configuration"):
        onward.Sharding.of(model)
    proto = chain_of_floats()
    proto.ir_version = 11
    proto.configuration.add(name="claims", num_devices=2**31 - 1, device=[f"a={2**29}"])
    spec = proto.graph.node[0].device_configurations.add(configuration_id="claims").sharding_spec.add(tensor_name="w")
    spec.sharded_dim.add(axis=0).simple_sharding.add(num_shards=2**31 - 1)
    with pytest.raises(onward.Error, match="follows no axes"):  # at once
        onward.Sharding.of(proto)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the model are nowhere, and stay so in the file that is written."""
    monkeypatch.chdir(tmp_path)
    onnx.save(llama(SIZES["tiny"]), "tiny.onnx")
    options = ["--shape", "tokens=N,64", "--devices", "4", "--memory", "1GiB"]
    printed = run("plan", "tiny.onnx", *options).stdout
    assert "123,712 parameters" in printed and "recommended: ddp" in printed and "cross_entropy:axis=-1" in printed
    result = run("plan", "tiny.onnx", *options, "--strategy", "fsdp", "--json", "-o", "sharded.onnx")
    found = json.loads(result.stdout)
    (one,) = found["estimates"]
    assert one["memory"]["total"] == sum(size for part, size in one["memory"].items() if part != "total")
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.onnx", "sharded.onnx"}
    assert onward.Sharding.of("sharded.onnx").tensors["lm_head.weight"] == {0: ("shard",)}
    (tmp_path / "elsewhere").mkdir()
    message, hint = failed("plan", "tiny.onnx", *options, "-o", "elsewhere")
    assert "cannot copy the missing data" in message and "next to the model" in hint
    message, hint = failed("plan", "tiny.onnx", "--devices", "4")
    assert "the sizes of `tokens` are open" in message and "--shape tokens=" in hint


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/scale.md").read_text()
    shown = re.findall(r"^\$ (onward plan llama-(\w+)\.onnx .*)\n((?:.*\n)+?)```", page, re.MULTILINE)
    assert len(shown) == 3
    monkeypatch.chdir(tmp_path)
    for command, size, output in shown:
        onnx.save(llama(SIZES[size]), f"llama-{size}.onnx")
        assert run(*command.split()[1:]).stdout.rstrip() == output.rstrip()
