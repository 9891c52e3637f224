"""Times as ratios against peers, measured in turns in one run: `make bench`. Results go to benchmarks/results.json."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

import onward

HERE = Path(__file__).parent
ROUNDS = 7


def residual_mlp(layers: int, width: int) -> onnx.ModelProto:
    """`4 * layers` nodes and `2 * layers` weights."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(layers):
        weights += [
            numpy_helper.from_array(rng.standard_normal((width, width), np.float32), f"{i}.weight"),
            numpy_helper.from_array(np.zeros(width, np.float32), f"{i}.bias"),
        ]
        nodes += [
            helper.make_node("MatMul", [x, f"{i}.weight"], [f"{i}.product"], name=f"{i}/MatMul"),
            helper.make_node("Add", [f"{i}.product", f"{i}.bias"], [f"{i}.sum"], name=f"{i}/Add"),
            helper.make_node("Relu", [f"{i}.sum"], [f"{i}.active"], name=f"{i}/Relu"),
            helper.make_node("Add", [f"{i}.active", x], [f"{i}.y"], name=f"{i}/Residual"),
        ]
        x = f"{i}.y"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "residual_mlp", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def in_turns(**contenders: Callable[[], object]) -> dict[str, float]:
    """The median time of each in seconds; they take turns, so that a noisy moment hits all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def reading_and_writing(folder: Path) -> dict[str, dict[str, float]]:
    """A model of 64 MiB in one file, and the same with its weights outside."""
    proto = residual_mlp(64, 512)
    inside, outside = folder / "inside.onnx", folder / "outside.onnx"
    onnx.save(proto, inside)
    onnx.save(proto, outside, save_as_external_data=True, location="outside.bin", size_threshold=1024)
    ours = onward.read(inside)
    copies = [onnx.ModelProto.FromString(proto.SerializeToString()) for _ in range(ROUNDS)]
    return {
        "read, 64 MiB inside": in_turns(
            onward=lambda: onward.read(inside), onnx=lambda: onnx.load(inside), onnx_ir=lambda: ir.load(inside)
        ),
        "read, 64 MiB outside": in_turns(
            onward=lambda: onward.read(outside), onnx=lambda: onnx.load(outside), onnx_ir=lambda: ir.load(outside)
        ),
        "write, 64 MiB outside": in_turns(
            onward=lambda: ours.save(folder / "ours.onnx", data="data"),
            onnx=lambda: onnx.save(  # it moves the weights out of its argument, so each round needs another
                copies.pop(), folder / "peer.onnx", save_as_external_data=True, location="peer.bin"
            ),
        ),
    }


def working_on_large_graphs() -> dict[str, dict[str, float]]:
    """A graph of 4,000 nodes with 2,000 parameters."""
    proto = residual_mlp(1000, 8)
    model = onward.read(proto)
    training = onward.prepare(model, loss="mse", optimizer="adamw")
    combined = ir.to_proto(training.combined())
    return {
        "check, 4,000 nodes": in_turns(
            onward=lambda: onward.check(training), onnx=lambda: onnx.checker.check_model(combined, full_check=True)
        ),
        "prepare, 4,000 nodes": in_turns(onward=lambda: onward.prepare(model, loss="mse", optimizer="adamw")),
        "copy, 4,000 nodes": in_turns(onward=model.copy, onnx_ir=model.ir.clone),
        "describe, 4,000 nodes": in_turns(onward=lambda: onward.describe(training)),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = reading_and_writing(Path(folder)) | working_on_large_graphs()
    print(f"{'':26}{'onward':>10}   ratio to")
    for what, times in results.items():
        peers = ", ".join(f"{name} {times['onward'] / t:.2f}" for name, t in times.items() if name != "onward")
        print(f"{what:26}{times['onward'] * 1000:8.1f} ms   {peers}")
    record = {
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "onnx": onnx.__version__,
        "seconds": results,
    }
    (HERE / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
