"""Checkpoints of DeepSpeed: what Onward puts together is what DeepSpeed does, and what it writes is resumed exactly."""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from deepspeed_runs import configured, run
from paths import CHECKPOINTS

import onward
from onward.checkpoint.format import Checkpoint
from onward.checkpoint.formats.deepspeed import FORMAT
from onward.checkpoint.pytorch.archive import read_torch_file, write_torch_file
from onward.checkpoint.pytorch.pickle_objects import Name, Object
from onward.checkpoint.zero import scheduler_of
from onward.recipe.spec import Spec

RECORDED = CHECKPOINTS / "deepspeed"
TRAINED = ["embed.weight", "hidden.weight", "norm.weight", "norm.bias", "hidden.bias"]


def slots_agree(found: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    """What is put together is what DeepSpeed's tools put together."""
    (optimizer,) = found.optimizers
    assert [name for group in optimizer.groups for name in group.parameters] == TRAINED
    for key, value in expected.items():
        name, slot = key.split(":")
        held = (
            optimizer.slots[name].get("master", found.tensors[name]) if slot == "fp32" else optimizer.slots[name][slot]
        )
        assert held.dtype == np.float32 and held.shape == found.tensors[name].shape
        assert np.array_equal(held.array().reshape(-1), value.reshape(-1)), key


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "universal"])
def test_partitions_are_put_together_as_deepspeed_does(name: str) -> None:
    found = onward.open_checkpoint(RECORDED / name)
    slots_agree(found, dict(np.load(RECORDED / ("zero2" if name == "universal" else name) / "merged.npz")))
    stage = {"zero1": 1, "zero3": 3}.get(name, 2)
    assert found.layout == {"zero_stage": stage, "dp_world_size": 2, "mp_world_size": 1, "pp_degree": 1, "tp_degree": 1}
    kind = np.dtype(np.float32) if name == "zero1" else np.dtype(ml_dtypes.bfloat16)
    for parameter in TRAINED:
        held = found.optimizers[0].slots[parameter]
        assert found.tensors[parameter].dtype == kind and ("master" in held) == (kind != np.float32)
        master = held.get("master", found.tensors[parameter]).array()
        assert np.array_equal(found.tensors[parameter].array(), master.astype(kind))


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "universal"])
def test_facts_of_deepspeed(name: str) -> None:
    found = onward.open_checkpoint(RECORDED / name)
    assert found.format == "deepspeed" and found.title.startswith("DeepSpeed 0.19.8")
    assert found.step == 5 and found.progress == {
        "global_steps": 5, "epoch": 2, "global_samples": 40, "skipped_steps": 0,
    }  # fmt: skip
    assert found.clip == {"norm": 0.5, "variant": "torch"} and found.tied == {"head.weight": "embed.weight"}
    assert set(found.tensors) == {*TRAINED, "scale", "calls"}
    assert np.array_equal(found.tensors["scale"].array().astype(float), [1.5, 1.5, 1.5])
    assert found.tensors["calls"].array() == 5
    first, second = found.optimizers[0].groups
    rate = {"lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "amsgrad": False, "variant": "torch",
            "maximize": False}  # fmt: skip
    assert first.optimizer == Spec("adamw", {**rate, "weight_decay": 0.1})
    assert second.optimizer == Spec("adamw", {**rate, "weight_decay": 0.0})
    made = 6 if name == "zero0" else 5  # in bfloat16, stage 0 makes a step with no gradients before the first
    assert found.optimizers[0].count == made and found.schedules[0].position == 5
    assert found.optimizers[0].has_names == (name != "zero0")
    assert not found.scaler and "state of random numbers" in found.missing


def test_what_a_large_parameter_costs() -> None:
    """A parameter in pieces is a place in a file for each of them: to open reads no partition."""
    found = onward.open_checkpoint(RECORDED / "zero3")
    moment = found.optimizers[0].slots["embed.weight"]["exp_avg"]
    assert [piece.shape for piece in moment.pieces] == [(8,), (7,)]
    for tensor in (moment, found.tensors["embed.weight"]):  # which is rounded piece by piece
        file = io.BytesIO()
        tensor.write_to(file)
        assert file.getvalue() == tensor.array().tobytes()


def rates(words: tuple[Spec, ...], base: float, count: int) -> list[float]:
    """The rates of a schedule in words, computed from their definitions in Python."""

    def rate(step: int) -> float:
        start = 0
        for spec in words:
            end = spec.options.get("until", math.inf)
            if step < end:
                return one(spec, step - start)
            start = end
        raise AssertionError

    def one(spec: Spec, step: int) -> float:
        done = min(step / spec.options.get("steps", 1), 1)
        if spec.name == "cosine":
            low = spec.options["min"]
            return low + (base - low) * (1 + math.cos(math.pi * done)) / 2
        if spec.name == "constant":
            return base
        begin, end = spec.options.get("start_factor", 1.0), spec.options.get("end_factor", 0.0)
        return base * (begin + (end - begin) * done)

    return [rate(step) for step in range(count)]


SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "a warm-up": ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4,
                               "warmup_type": "linear"}),
    "a warm-up to the optimizer's rate": ("WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear"}),
    "a logarithm": ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}),
    "a decay": ("WarmupDecayLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4,
                                  "total_num_steps": 9, "warmup_type": "linear"}),
    "a decay that is over": ("WarmupDecayLR", {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "total_num_steps": 4}),
    "a cosine": ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 3, "cos_min_ratio": 0.1}),
}  # fmt: skip


def test_words_begin_where_they_are_known() -> None:
    for kind, numbers in SCHEDULES.values():
        known = [
            scheduler_of({"last_batch_iteration": at}, {"type": kind, "params": numbers}, 1e-2).schedule.words
            is not None
            for at in range(-1, 8)
        ]
        first = known.index(True)
        linear = numbers.get("warmup_type") == "linear"
        assert all(known[first:]) and first == (
            0 if linear and kind != "WarmupCosineLR" else numbers["warmup_num_steps"] + 1
        )
    strange = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    assert scheduler_of({"last_batch_iteration": 3}, strange, None).schedule.words is None
    assert (
        scheduler_of({"last_batch_iteration": 3}, {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, 1.0)[1]
        is None
    )
    assert scheduler_of(None, {}, 0.1).schedule.words == ()
    assert scheduler_of(None, {}, 0.1, [{"lr": 0.05, "initial_lr": 0.1}]).schedule.words is None


def copy_of(name: str, place: Path) -> Path:
    shutil.copytree(RECORDED / name, place)
    return place


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for name in ("zero1", "zero3"):
        found = onward.open_checkpoint(RECORDED / name)
        FORMAT.write(found, tmp_path / name)
        again = onward.open_checkpoint(tmp_path / name)
        slots_agree(again, dict(np.load(RECORDED / name / "merged.npz")))
        assert again.tied == found.tied and again.step == 5 and again.clip == found.clip
        assert again.progress == found.progress and again.schedules == found.schedules
        assert [group.optimizer for group in again.optimizers[0].groups] == [
            group.optimizer for group in found.optimizers[0].groups
        ]
        for parameter, tensor in found.tensors.items():
            other = again.tensors[parameter]
            assert other.dtype == tensor.dtype and np.array_equal(other.array(), tensor.array())


def test_a_trainer_with_deepspeed_inside(tmp_path: Path) -> None:
    """What transformers leaves when it trains with DeepSpeed: its own files around those of DeepSpeed."""
    place = copy_of("zero2", tmp_path / "checkpoint-5")
    for name in ("trainer_state.json", "training_args.bin", "config.json", "rng_state.pth", "model.safetensors"):
        shutil.copy(RECORDED.parent / "trainer" / name, place)
    found = onward.open_checkpoint(place)
    slots_agree(found, dict(np.load(RECORDED / "zero2" / "merged.npz")))
    assert found.title == "Hugging Face Trainer, DeepSpeed 0.19.8" and found.format == "deepspeed"
    assert found.configuration["architectures"] and found.arguments["zero_optimization"] == {"stage": 2}
    assert found.progress["global_steps"] == 5 and found.progress["max_steps"] == 6
    assert {each.kind for each in found.randomness} == {"torch, CPU", "numpy", "Python"} and found.missing == ("loss",)
    shutil.copy(RECORDED.parent / "trainer" / "scheduler.pt", place)
    assert onward.open_checkpoint(place).schedules == found.schedules
    spoilt(place / "global_step5" / "mp_rank_00_model_states.pt", lambda tree: tree.update(lr_scheduler=None))
    outside = onward.open_checkpoint(place).schedules[0]  # the Trainer keeps its own to itself
    assert outside == onward.open_checkpoint(RECORDED.parent / "trainer").schedules[0] and outside.words


def test_what_deepspeed_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(onward.Error, match="no parameter names"):
        FORMAT.write(onward.open_checkpoint(RECORDED / "zero0"), tmp_path / "a")
    with pytest.raises(onward.Error, match="one optimizer"):
        FORMAT.write(Checkpoint(path=tmp_path), tmp_path / "b")


def spoilt(place: Path, change: Any) -> None:
    tree = read_torch_file(place)
    held = tree.get("optimizer_state_dict", tree)
    change(held)
    write_torch_file(place.with_suffix(".new"), tree)
    place.with_suffix(".new").rename(place)


def test_a_scaler_of_the_loss_is_carried(tmp_path: Path) -> None:
    scaler = Object(Name("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"), is_instance=True)
    scaler.state = {"cur_scale": 1024.0, "cur_iter": 5, "last_overflow_iter": -1, "scale_window": 100, "dynamic": True}
    place = copy_of("zero2", tmp_path / "x") / "global_step5" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    spoilt(place, lambda tree: tree.update(loss_scaler=scaler, dynamic_loss_scale=True))
    found = onward.open_checkpoint(tmp_path / "x")
    onward.to_checkpoint(found, tmp_path / "y", format="deepspeed")
    assert found.scaler == scaler.state == onward.open_checkpoint(tmp_path / "y").scaler


HOSTILE = {
    "a process is missing": ("zero3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", None, "1 parts"),
    "a shape is too large": ("zero1", "mp_rank_00_model_states.pt",
                             lambda tree: tree["param_shapes"][0].update({"embed.weight": (10**6, 3)}), "shorter"),
    "a shape is none": ("zero1", "mp_rank_00_model_states.pt",
                        lambda tree: tree["param_shapes"][0].update({"embed.weight": ("x", -3)}), "invalid shape"),
    "a partition is a number": ("zero2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
                                lambda tree: tree["single_partition_of_fp32_groups"].__setitem__(0, 3), "flat tensor"),
    "a group of no line": ("zero2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                           lambda tree: tree["base_optimizer_state"]["param_groups"][0].update(params=[7]), "whole"),
    "a name that leads elsewhere": ("universal", "mp_rank_00_model_states.pt",
                                    lambda tree: tree["param_shapes"][0].update({"../../x": (2,)}), "leads out"),
    "an elastic checkpoint": ("zero2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                       lambda tree: tree.update(base_optimizer_state=[]), "elastic"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_checkpoints_of_deepspeed(case: str, tmp_path: Path) -> None:
    name, file, change, words = HOSTILE[case]
    place = copy_of(name, tmp_path / "x") / "global_step5" / file
    if change is None:
        place.unlink()
    else:
        spoilt(place, change)
    with pytest.raises(onward.Error, match=words):
        onward.open_checkpoint(tmp_path / "x")


def test_other_ways_of_cutting_are_refused(tmp_path: Path) -> None:
    folder = copy_of("zero1", tmp_path / "x") / "global_step5"
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    with pytest.raises(onward.Error, match="tensor parallelism"):
        onward.open_checkpoint(tmp_path / "x")
    (folder / "mp_rank_01_model_states.pt").rename(folder / "layer_00-model_00-model_states.pt")
    with pytest.raises(onward.Error, match="pipeline"):
        onward.open_checkpoint(folder)
    (tmp_path / "x" / "latest").write_text("../../etc")
    with pytest.raises(onward.Error, match="no known checkpoint format"):
        onward.open_checkpoint(tmp_path / "x")


# ---- with DeepSpeed --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rates_are_those_of_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    import torch
    from deepspeed.runtime import lr_schedules

    for kind, numbers in SCHEDULES.values():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-2)
        scheduler = getattr(lr_schedules, kind)(optimizer, **numbers)
        theirs, known = [], None
        for step in range(15):
            theirs.append(optimizer.param_groups[0]["lr"])
            said = scheduler_of(scheduler.state_dict(), {"type": kind, "params": numbers}, 1e-2)
            assert said.schedule.position == step
            if said.schedule.words is not None and said.base is not None:
                known = known or (step, said.schedule.words, said.base)
                assert known[1:] == (said.schedule.words, said.base)
            scheduler.step()
        assert known is not None
        first, words, base = known
        assert np.allclose(rates(words, base, 15)[first:], theirs[first:], rtol=1e-12, atol=1e-15), (kind, numbers)


UNIVERSAL = {"checkpoint": {"load_universal": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kind", "groups", "worlds"),
    [(1, "fp32", 2, (2,)), (2, "bf16", 2, (1, 2, 3)), (3, "fp32", 1, (1, 2, 3)), (3, "bf16", 1, (2,))],
)
def test_deepspeed_goes_on(stage: int, kind: str, groups: int, worlds: tuple[int, ...], tmp_path: Path) -> None:
    """Five steps on two processes, saved; a training model; a universal checkpoint: the next losses are the same."""
    pytest.importorskip("deepspeed")
    config = configured(stage, kind)
    whole = run(tmp_path / "whole", 2, config, steps=10, groups=groups)
    begun = run(tmp_path / "begun", 2, config, tag="global_step5", groups=groups)
    assert begun == whole[:5]
    FORMAT.write(onward.open_checkpoint(tmp_path / "begun"), tmp_path / "universal")
    for world in worlds:
        rest = run(
            tmp_path / f"rest{world}", world, {**config, **UNIVERSAL}, load=tmp_path / "universal", groups=groups
        )
        assert rest == whole[5:] if world == 2 else np.allclose(rest, whole[5:], rtol=2e-6), world


@pytest.mark.slow
def test_what_is_written_goes_on_in_another_stage(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    whole = run(tmp_path / "whole", 2, configured(2), steps=10, groups=1)
    run(tmp_path / "begun", 2, configured(3), tag="global_step5", groups=1)
    FORMAT.write(onward.open_checkpoint(tmp_path / "begun"), tmp_path / "universal")
    rest = run(tmp_path / "rest", 2, configured(1, **UNIVERSAL), load=tmp_path / "universal", groups=1)
    assert np.allclose(rest, whole[5:], rtol=2e-6)


def like(kind: str) -> onward.Model:
    """The module that all these runs train, as a graph."""
    number = {"fp32": onnx.TensorProto.FLOAT, "bf16": onnx.TensorProto.BFLOAT16}[kind]
    shapes = {"embed.weight": (5, 3), "norm.weight": (3,), "norm.bias": (3,), "hidden.weight": (3, 3),
              "hidden.bias": (3,), "scale": (3,)}  # fmt: skip
    nodes = [
        ("Gather", ["embed.weight", "tokens"], "embedded", {}),
        ("LayerNormalization", ["embedded", "norm.weight", "norm.bias"], "normal", {}),
        ("Gemm", ["normal", "hidden.weight", "hidden.bias"], "hidden", {"transB": 1}),
        ("Tanh", ["hidden"], "active", {}),
        ("Mul", ["active", "scale"], "scaled", {}),
        ("Gemm", ["scaled", "embed.weight"], "logits", {"transB": 1}),
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(kind, inputs, [output], **more) for kind, inputs, output, more in nodes],
        "module",
        [onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, [4])],
        [onnx.helper.make_tensor_value_info("logits", number, [4, 5])],
        [onnx.helper.make_tensor(name, number, shape, [0.5] * math.prod(shape)) for name, shape in shapes.items()],
    )
    return onward.load(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.parametrize(("name", "kind"), [("zero1", "fp32"), ("zero3", "bf16")])
def test_through_a_training_model(name: str, kind: str, tmp_path: Path) -> None:
    """All that a checkpoint of DeepSpeed has is there again when it was a training model in between."""
    model = onward.from_checkpoint(RECORDED / name, like(kind), loss="cross_entropy")
    model.save(tmp_path / "run.onnx")
    onward.to_checkpoint(tmp_path / "run.onnx", tmp_path / "again", format="deepspeed")
    found, again = onward.open_checkpoint(RECORDED / name), onward.open_checkpoint(tmp_path / "again")
    slots_agree(again, dict(np.load(RECORDED / name / "merged.npz")))
    assert (again.tied, again.progress, again.clip) == (found.tied, found.progress, found.clip)
    assert again.schedules[0].words == found.schedules[0].words and again.arguments == found.arguments
    for before, after in zip(found.optimizers[0].groups, again.optimizers[0].groups, strict=True):
        assert before.parameters == after.parameters
        assert math.isclose(before.settings["lr"], after.settings["lr"]) and before.optimizer is not None
    for parameter, tensor in found.tensors.items():
        assert np.array_equal(again.tensors[parameter].array(), tensor.array())


@pytest.mark.slow
def test_from_zero_3_to_fsdp(tmp_path: Path) -> None:
    """DeepSpeed's stage 3, a training model, FSDP2: losses go on."""
    pytest.importorskip("deepspeed")
    config = {key: value for key, value in configured(3).items() if key != "scheduler"}
    whole = run(tmp_path / "whole", 2, config, steps=10)
    run(tmp_path / "begun", 2, config, tag="global_step5")
    model = onward.from_checkpoint(tmp_path / "begun", like("fp32"), loss="cross_entropy")
    onward.to_checkpoint(model, tmp_path / "dcp", format="dcp")
    for world in (1, 2):
        rest = run(tmp_path / f"rest{world}", world, config, load=tmp_path / "dcp", fsdp=True)
        assert np.allclose(rest, whole[5:], rtol=2e-6), world
