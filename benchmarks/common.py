"""What the benchmarks share: taking turns, a model of any size, and where results go."""

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


def machine(threads: int) -> str:
    """The processor, and how much of it is used."""
    described = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", described.read_text(), re.MULTILINE) if described.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name}, {threads} threads, {os.cpu_count()} cores"


def kept(name: str) -> dict[str, Any]:
    """What results.json has of a benchmark."""
    return json.loads(RESULTS.read_text()).get(name, {}) if RESULTS.exists() else {}


def keep(results: dict[str, Any]) -> None:
    """Put results beside those that results.json has already."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record |= {"python": sys.version.split()[0], "machine": platform.machine(), "onnx": onnx.__version__, **results}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def fill_in(name: str, text: str) -> None:
    """Put a text between its marks in docs/benchmarks.md."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", PAGE.read_text()))
