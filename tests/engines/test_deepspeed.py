"""Training models on DeepSpeed: `--strategy deepspeed`, with its own configuration file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import parallel_models
import parallel_runs
import pytest
from marks import needs

import onward
from onward.engines.distributed.deepspeed_config import settle, with_batch_size

# ---- its configuration file ------------------------------------------------------------------------------------------


NET = """
    <ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 2] y)
    <float[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"""


@pytest.fixture(scope="module")
def training() -> onward.Model:
    return onward.prepare(onnx.parser.parse_model(NET), loss="mse", clip="norm:1", accumulate=2)


AS_OTHERS_WRITE_IT = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "offload_optimizer": None,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
"""The example of Hugging Face's Trainer, with its `auto`s."""


def test_what_is_left_open_is_the_training_models(training: onward.Model) -> None:
    config = settle(with_batch_size(AS_OTHERS_WRITE_IT, training, 16, 2), training, 2)
    assert config["train_micro_batch_size_per_gpu"] == 8 and config["steps_per_print"] == 2000
    zero = config["zero_optimization"]
    assert zero == {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9}
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0, 1)  # which the update does
    same = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "train_batch_size": 32}
    assert settle(with_batch_size(same, training, 16, 2), training, 2)["train_micro_batch_size_per_gpu"] == 8


@pytest.mark.parametrize(
    ("config", "said", "hint"),
    [
        ({"gradient_clipping": 0.5}, "`gradient_clipping` .* is 0.5", "--clip norm:0.5"),
        ({"gradient_accumulation_steps": 4}, "`gradient_accumulation_steps` .* is 4", "--accumulate 4"),
        ({"train_batch_size": 16}, "on 2 processes is 32", "--batch-size"),
        ({"train_micro_batch_size_per_gpu": 16}, "on 2 processes is 8", "auto"),
        ({"bf16": {"enabled": True}}, "bf16", "--precision"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer", "--optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "--schedule"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "leave it out"),
        ({"compression_training": {"a": 1}}, "compression_training", "leave it out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer", "leave it out"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients", "leave it out"),
        ({"zero_optimization": {"stage": 4}}, "stage 4", "0, 1, 2 or 3"),
    ],
)
def test_contradictions_are_refused(training: onward.Model, config: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(onward.Error, match=said) as caught:
        settle(with_batch_size(config, training, 16, 2), training, 2)
    assert hint in str(caught.value.hint)


def test_options_that_do_not_fit(training: onward.Model) -> None:
    with pytest.raises(onward.Error, match="no effect without DeepSpeed"):
        onward.engines.start(training, engine="torch", strategy="fsdp", deepspeed_config={})
    with pytest.raises(onward.Error, match="no strategy `deepspeed`"):
        onward.engines.start(training, strategy="deepspeed")


# ---- on processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return parallel_models.write_both(tmp_path_factory.mktemp("models"))


def with_stage(stage: int) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 1.0, "gradient_accumulation_steps": "auto"}
    return {"engine": "torch", "strategy": "deepspeed", "deepspeed_config": config, "compile": False}


@needs("torch", "deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["cnn", "gpt"])
def test_stages_have_the_losses_of_one_process(models: dict[str, str], kind: str, world: int, tmp_path: Path) -> None:
    """Clipping and accumulation, BatchNormalization, labels that are ignored, batches of any size; and what is held."""
    runs = [(models[kind], with_stage(stage)) for stage in (0, 1, 2, 3)]
    whole, one, two, three = (made["bytes"] for made in parallel_runs.compare(runs, world, tmp_path / "found.json"))
    assert whole > one == two > three


@needs("torch", "deepspeed")
@pytest.mark.slow
def test_updates_of_whole_matrices_are_refused(tmp_path: Path) -> None:
    onward.prepare(onnx.parser.parse_model(NET), loss="mse", optimizer="muon").save(tmp_path / "muon.onnx")
    options = {**with_stage(1), "deepspeed_config": {"zero_optimization": {"stage": 1}}}
    with pytest.raises(RuntimeError, match="needs whole tensors"):
        parallel_runs.compare([(str(tmp_path / "muon.onnx"), options)], 2, tmp_path / "found.json")


@needs("torch", "deepspeed")
@pytest.mark.slow
def test_runs_go_on_with_other_strategies(models: dict[str, str], tmp_path: Path) -> None:
    """ZeRO 3 in two processes, then FSDP in three, ZeRO 2 in one, and ONNX Runtime: the curve of one process."""
    data = parallel_models.batches(onward.load(models["gpt"]), 1, 50)[0]
    np.savez(tmp_path / "data.npz", **data)
    options = ["--data", str(tmp_path / "data.npz"), "--batch-size", "12", "--validation", "0.2", "--no-compile"]
    for stage in (2, 3):
        config = {"zero_optimization": {"stage": stage}, "train_batch_size": 24}
        (tmp_path / f"zero{stage}.json").write_text(json.dumps(config))
    train([models["gpt"], *options, "--epochs", "4", "--run", str(tmp_path / "alone")])
    run = str(tmp_path / "run")
    zero3, zero2 = (["--strategy", "deepspeed", "--deepspeed-config", str(tmp_path / f"zero{n}.json")] for n in (3, 2))
    train([models["gpt"], *options, "--epochs", "1", "--run", run, "--engine", "torch", *zero3, "--nproc", "2"])
    assert onward.Run(run).config["deepspeed_config"]["zero_optimization"] == {"stage": 3}
    train(["--resume", run, "--epochs", "2", "--strategy", "fsdp", "--nproc", "3"])
    train(["--resume", run, "--epochs", "3", *zero2])
    train(["--resume", run, "--epochs", "4", "--engine", "onnxruntime"])
    expected = [
        event["loss"] for event in onward.Run(tmp_path / "alone").log if event["event"] in ("step", "validation")
    ]
    found = [event["loss"] for event in onward.Run(run).log if event["event"] in ("step", "validation")]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def train(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onward", "train", *arguments, "--quiet"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
