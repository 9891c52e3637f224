"""Exports of families of models are cut into their layers, whatever they are called, and so are their modules."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from marks import needs
from models import layers_without_names

import onward
from onward.analysis.blocks import find_blocks
from onward.errors import UnsupportedError
from onward.model import load

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import fsdp_blocks  # noqa: E402
from layered_models import CNNS, FAMILIES, export, exported  # noqa: E402
from processes import together  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from onward.frameworks.torch import to_module  # noqa: E402

pytestmark = [needs("torch", "transformers", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]

UNTRACED = ("gpt2", "llama", "mistral", "qwen2", "whisper", "gemma2")
"""The older exporter lacks an operator of their masks."""

families = pytest.mark.parametrize(
    ("name", "exporter"),
    [
        (name, exporter)
        for name, exporter in itertools.product(FAMILIES, ("dynamo", "torchscript"))
        if not (name in UNTRACED and exporter == "torchscript")
    ],
)


def without_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """All names are numbers, and nothing says where a node or a tensor comes from."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    names: dict[str, str] = {"": ""}
    graph = made.graph
    for node in graph.node:
        node.name = node.doc_string = ""
        for values in (node.input, node.output):
            values[:] = [names.setdefault(name, f"v{len(names)}") for name in values]
    described = (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for item in described:
        del item.metadata_props[:]
        if not isinstance(item, onnx.NodeProto):
            item.name = names.setdefault(item.name, f"v{len(names)}")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@families
def test_blocks_are_layers(name: str, exporter: str, named: bool) -> None:
    model = exported(name, exporter)
    blocks = find_blocks(load(model if named else without_names(model)))
    assert len(blocks) == FAMILIES[name].layers
    sizes: dict[object, list[list[int]]] = {}
    for block in blocks:
        sizes.setdefault(block.pattern, []).append([list(value.shape or ()) for value in block.parameters])
    assert all(parameters == kind[0] for kind in sizes.values() for parameters in kind)  # they are aligned
    if name not in CNNS and exporter == "dynamo":
        assert len(sizes) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@families
def test_modules_of_blocks_compute_the_same(name: str, exporter: str, named: bool) -> None:
    model = exported(name, exporter) if named else without_names(exported(name, exporter))
    whole, cut = to_module(model).train(), to_module(model, blocks=True).train()
    cut = pickle.loads(pickle.dumps(copy.deepcopy(cut)))
    blocks = cut.repeated_blocks()
    assert len(blocks) == FAMILIES[name].layers
    for block in blocks:
        block.recomputes = name not in CNNS  # where statistics would be counted twice
    inputs = list(FAMILIES[name].inputs().values())
    results = [next(iter(y.values())) if isinstance(y := module(*inputs), dict) else y for module in (whole, cut)]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    for result in results:
        result.square().mean().backward()
    ours, found = whole.parameters_by_name(), cut.parameters_by_name()
    assert list(found) == list(ours)
    for key, parameter in ours.items():
        torch.testing.assert_close(found[key].grad, parameter.grad, rtol=1e-4, atol=1e-6)  # sums in another order
    for key, array in whole.arrays().items():
        assert (cut.arrays()[key] == array).all()
    if named and exporter == "dynamo":
        keys = list(cut.state_dict())
        if name == "t5":  # of whose first layer all read a table
            assert {key.removeprefix("outside.") for key in keys} == set(whole.state_dict())
        else:
            assert keys == list(whole.state_dict())


def test_runs_of_blocks_are_the_same() -> None:
    """Also of what had its names taken, whose keys then say in which block it is."""
    training = onward.prepare(layers_without_names(3), loss="mse", optimizer="adamw:lr=1e-2")
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    found = []
    for blocks in (False, True):
        module, optimizer, _, loss = onward.to_torch(training, blocks=blocks)
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()
        found.append(module)
    whole, cut = found
    assert [len(list(block.parameters())) for block in cut.repeated_blocks()] == [4, 4, 4]
    assert not whole.repeated_blocks()
    names = set(whole.state_dict())
    assert {re.sub(r"^block\d\.", "", key) for key in cut.state_dict()} == names != set(cut.state_dict())
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(cut.arrays()[name], array)
    onward.check(cut.to_model())
    with pytest.raises(UnsupportedError, match="own layers"):
        onward.to_torch(training, live=False, blocks=True)


def test_equal_blocks_are_compiled_once() -> None:
    whole, cut = (to_module(layers_without_names(3), blocks=True) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    for block in cut.repeated_blocks():
        block.compile(backend=counter)
    x = torch.randn(4, 3)
    for module in (whole, cut):
        module.eval()(x).square().mean().backward()
    assert counter.frame_count == 1
    for parameter, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_blocks_are_sharded(recomputes: bool, tmp_path: Path) -> None:
    """Two processes make the steps of one, and each holds half of what one does."""
    model = str(tmp_path / "gpt.onnx")
    onnx.save(export(fsdp_blocks.GPT, "dynamo"), model)
    alone = fsdp_blocks.train(to_module(model).train(), 0, 1)
    result = tmp_path / "result.json"
    job = {"model": model, "to": str(result), "recomputes": recomputes}
    together(fsdp_blocks.__file__, 2, job)
    found = json.loads(result.read_text())
    assert found["blocks"] == 12
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["sums"] == pytest.approx(alone["sums"], rel=1e-4)
    assert found["bytes"] <= 0.6 * alone["bytes"]
