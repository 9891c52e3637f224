"""Blocks that are repeated, and the loops that programs make of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import onnx
import pytest
from commands import run
from models import digits_mlp, layers_without_names

from onward.analysis.blocks import cut_into_parts, find_blocks
from onward.analysis.repeats import Item, find_repeats
from onward.frameworks.program.calls import ProgramStep, Value, fold_repeats
from onward.frameworks.program.printing import Expression, FunctionWriter, Printer
from onward.model import load


def residual(count: int, *, odd: int | None = None, leak: int | None = None) -> tuple[list[Item], list[str]]:
    """x + f(x w), `count` times; one block may compute something else, or be read from outside."""
    items = [Item("embed", ("embed.weight",), ("tokens",), ("x0",))]
    for k in range(count):
        items.append(Item("product", (f"blocks.{k}.weight",), (f"x{k}",), (f"y{k}",)))
        items.append(Item("tanh" if k == odd else "relu", (), (f"y{k}", "mask"), (f"z{k}",)))
        items.append(Item("sum", (), (f"x{k}", f"z{k}"), (f"x{k + 1}",)))
    return items, [f"x{count}", *([f"y{leak}"] if leak is not None else [])]


def test_blocks_are_found_by_names_and_by_what_they_compute() -> None:
    (found,) = find_repeats(*residual(4))
    assert (found.start, found.length, found.count, found.prefix, found.first) == (1, 3, 4, "blocks", 0)
    assert found.carried == {"x0": ("x1", "x4")}


@pytest.mark.parametrize(
    ("options", "first", "count"), [({"odd": 0}, 1, 3), ({"odd": 3}, 0, 3), ({"leak": 0}, 1, 3), ({"leak": 1}, 2, 2)]
)
def test_only_those_that_are_the_same(options: dict[str, int], first: int, count: int) -> None:
    (found,) = find_repeats(*residual(4, **options))
    assert (found.first, found.count) == (first, count)


def called(function: str, *arguments: object) -> Value:
    step = ProgramStep(function, list(arguments))
    step.results = [Value(step=step)]
    return step.results[0]


def test_a_loop_computes_what_its_lines_did() -> None:
    """Two values are carried, each of which reads both; what is read after the loop has its name."""
    a, b, steps = Value(path="first"), Value(path="second"), []
    x, y = a, b
    for k in range(3):
        product = called("*", x, Value(path=f'params["layers.{k}.w"]'))
        total = called("+", product, y)
        other = called("-", y, x)
        steps += [value.step for value in (product, total, other) if value.step is not None]
        x, y = total, other
    last = called("-", x, y)
    assert last.step is not None
    steps.append(last.step)

    def compute(given: list[ProgramStep]) -> float:
        names = ["first", "second"]
        written = FunctionWriter(given, [last], {}, Printer, lambda value: Expression(value.path), taken=names)
        body = [*written.lines(), f"return {written.name(last).text}"]
        space: dict[str, object] = {}
        exec("\n".join(["def run(params, first, second):", *(f"    {line}" for line in body)]), space)
        params = {f"layers.{k}.w": k + 2.0 for k in range(3)}
        return space["run"](params, 3.0, 5.0)  # type: ignore[operator,no-any-return]

    folded = fold_repeats(steps, [last])
    assert len(folded) < len(steps)
    assert compute(folded) == compute(steps)


def test_blocks_are_found_by_structure() -> None:
    parts = cut_into_parts(load(layers_without_names(4, odd=2)))
    assert [part.pattern for part in parts] == [None, 0, 0, 1, 0, None]
    assert [len(part.nodes) for part in parts] == [1, 6, 6, 6, 6, 1]
    for before, part in itertools.pairwise(parts):
        assert part.inputs == before.outputs
    shapes = [[list(value.shape or ()) for value in part.parameters] for part in parts]
    assert shapes[1] == shapes[2] == shapes[4] == [[8], [8], [8, 16], [16, 8]]


def test_what_repeats_nothing_has_no_blocks() -> None:
    assert not find_blocks(load(layers_without_names(1)))
    assert not find_blocks(load(digits_mlp()))


def test_blocks_are_listed(tmp_path: Path) -> None:
    onnx.save(layers_without_names(3), path := tmp_path / "layers.onnx")
    shown = run("show", str(path), "--blocks").stdout.splitlines()
    assert len(shown) == 3 and all("kind 0  6 nodes  4 parameters, 272 numbers" in line for line in shown)
    found = json.loads(run("show", str(path), "--blocks", "--json").stdout)
    assert [block["inputs"] for block in found[1:]] == [block["outputs"] for block in found[:-1]]
