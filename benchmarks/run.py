"""Measure work on models against peers, in turns: `make bench`.

Writes benchmarks/results.json, and the table of gradients in docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
from common import ROUNDS, fill_in, in_turns, residual_mlp, write_results
from gradients import differentiating, table

import onward


def reading_and_writing(folder: Path) -> dict[str, dict[str, float]]:
    """Measure a model of 64 MiB in one file, and with its weights as external data."""
    proto = residual_mlp(64, 512)
    inside, outside = folder / "inside.onnx", folder / "outside.onnx"
    onnx.save(proto, inside)
    onnx.save(proto, outside, save_as_external_data=True, location="outside.bin", size_threshold=1024)
    ours = onward.load(inside)
    copies = [onnx.ModelProto.FromString(proto.SerializeToString()) for _ in range(ROUNDS)]
    return {
        "read, 64 MiB inside": in_turns(
            onward=lambda: onward.load(inside), onnx=lambda: onnx.load(inside), onnx_ir=lambda: ir.load(inside)
        ),
        "read, 64 MiB outside": in_turns(
            onward=lambda: onward.load(outside), onnx=lambda: onnx.load(outside), onnx_ir=lambda: ir.load(outside)
        ),
        "write, 64 MiB outside": in_turns(
            onward=lambda: ours.save(folder / "ours.onnx", data="data"),
            onnx=lambda: onnx.save(  # moves the weights out of its argument: each round needs a copy
                copies.pop(), folder / "peer.onnx", save_as_external_data=True, location="peer.bin"
            ),
        ),
    }


def working_on_large_graphs() -> dict[str, dict[str, float]]:
    """Measure a graph of 4,000 nodes with 2,000 parameters."""
    proto = residual_mlp(1000, 8)
    model = onward.load(proto)
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
        gradients = differentiating(Path(folder))
    print(f"{'':26}{'onward':>10}   ratio to")
    for title, times in results.items():
        peers = ", ".join(f"{name} {times['onward'] / t:.2f}" for name, t in times.items() if name != "onward")
        print(f"{title:26}{times['onward'] * 1000:8.1f} ms   {peers}")
    write_results({"seconds": results, "gradients": gradients})
    fill_in("gradients", table(gradients))


if __name__ == "__main__":
    main()
