"""Shared code of the benchmarks: measurements in turns, a model of any size, and storage of results."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROUNDS = 7
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"


def residual_mlp(layers: int, width: int) -> onnx.ModelProto:
    """Return a chain of residual blocks, with `4 * layers` nodes and `2 * layers` weights."""
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
    """Return the median seconds of each contender. They take turns, so that other load hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine(threads: int) -> str:
    """Return the name of the processor, with its numbers of threads in use and of cores."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    name = match[1].strip() if match else platform.processor() or platform.machine()
    return f"{name}, {threads} threads, {os.cpu_count()} cores"


def read_results(name: str) -> dict[str, Any]:
    """Return the results of a benchmark in results.json."""
    return json.loads(RESULTS.read_text()).get(name, {}) if RESULTS.exists() else {}


def write_results(results: dict[str, Any]) -> None:
    """Merge results into results.json."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record |= {"python": sys.version.split()[0], "machine": platform.machine(), "onnx": onnx.__version__, **results}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def fill_in(name: str, text: str) -> None:
    """Replace the text between two marks in docs/benchmarks.md."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", PAGE.read_text()))
