"""Every loss of PyTorch with every argument is carried over exactly, or refused: as `loss=`, and inside of modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import needs
from representatives import chosen

import onward
from onward.engines import start
from onward.errors import Error, MismatchError

torch = pytest.importorskip("torch")
import torch_loss_table as table  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_loss_table import DATA, Losing, Predicting, Row  # noqa: E402
from torch_nets import step  # noqa: E402

from onward.frameworks.torch import capture_module, from_torch, to_module  # noqa: E402

pytestmark = [needs("torch", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]

STEPS, RATE = 3, 0.05
GROUPS = table.groups()

Trained = tuple[list[float], dict[str, np.ndarray]]
"""The losses of some steps, and the parameters after them."""

# ---- what is refused -------------------------------------------------------------------------------------------------

INSIDE: dict[Any, str] = {
    **dict.fromkeys((nn.GaussianNLLLoss, F.gaussian_nll_loss), "branches on values of tensors"),
    **dict.fromkeys((nn.MultiLabelMarginLoss, F.multilabel_margin_loss), "is exported with wrong values"),
    **dict.fromkeys((nn.CTCLoss, F.ctc_loss), "cannot trace `ctc_loss`"),
}
"""Losses -> what is said of them inside of modules."""


def refusal_inside(row: Row) -> str | None:
    """What is said of a row inside of a module."""
    weight = row.settings.get("weight")
    if row.loss in INSIDE:
        return INSIDE[row.loss]
    if row.loss is F.l1_loss and weight is not None:
        return "drops the `weight` of `l1_loss`"
    if weight is not None and weight.shape[0] == table.N:
        return "with a size of 6 along axis 0 only"
    is_margin = row.loss in (nn.MultiMarginLoss, F.multi_margin_loss)
    if is_margin and "one sample" in row.data and row.settings.get("reduction") == "none":
        return "the loss is off by"  # traced, it has an axis; called, it has none
    return None


# ---- both sides ------------------------------------------------------------------------------------------------------


def on_torch(module: nn.Module, loss: Callable[..., Any]) -> Trained:
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    losses = [step(loss(), optimizer) for _ in range(STEPS)]
    return losses, {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def on_onward(model: onward.Model, arrays: list[np.ndarray]) -> Trained:
    names = [value.name for value in (*model.inputs, *model.step().algorithm.inputs)]
    with start(model, threads=1) as engine:
        batch = dict(zip(names, arrays, strict=True))
        losses = [float(engine.step(batch)[engine.loss]) for _ in range(STEPS)]
        return losses, engine.state()


def agree(found: Trained, expected: Trained) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max(), err_msg=name)


def arrays_of(data: str) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in (table.inputs(), *DATA[data].targets)]


# ---- inside of modules -----------------------------------------------------------------------------------------------


def by_from_torch(module: nn.Module, example: Any, folder: Path) -> onward.Model:
    return from_torch(module, example, loss="loss", optimizer=torch.optim.SGD(module.parameters(), RATE))


def by_from_checkpoint(module: nn.Module, example: Any, folder: Path) -> onward.Model:
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "x.pt")
    return onward.from_checkpoint(folder / "x.pt", module=module, example_inputs=example)


ROUTES = {"from_torch": by_from_torch, "from_checkpoint": by_from_checkpoint}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("group", chosen(GROUPS, ["CrossEntropyLoss of classes, one ignored"]))
def test_inside(group: str, route: str, tmp_path: Path) -> None:
    carried = [row for row in GROUPS[group] if refusal_inside(row) is None]
    arrays = arrays_of(GROUPS[group][0].data)
    example = tuple(map(torch.from_numpy, arrays))
    if carried:
        model = ROUTES[route](Losing(carried), example, tmp_path)
        module = Losing(carried)
        expected = on_torch(module, lambda: module(*example)["loss"])
        with start(model, threads=1) as engine, torch.no_grad():
            names = [value.name for value in model.inputs]
            values = engine.evaluate(dict(zip(names, arrays, strict=True)))
            for i, row in enumerate(carried):
                theirs = Losing(carried)(*example)[f"loss_{i}"].item()
                np.testing.assert_allclose(values[f"loss_{i}"], theirs, rtol=1e-5, err_msg=str(row))
        agree(on_onward(model, arrays), expected)
    for row in GROUPS[group]:
        if said := refusal_inside(row):
            with pytest.raises(Error, match=re.escape(said)) as caught:
                ROUTES[route](Losing([row]), example, tmp_path)
            assert caught.value.hint


# ---- as `loss=` ------------------------------------------------------------------------------------------------------


@functools.cache
def predicting(data: str) -> nn.Module:
    """A module whose graph is known, so that it is not exported for each loss."""
    return to_module(capture_module(Predicting(data), table.inputs())).train()


def outcome_outside(row: Row) -> str:
    """`equal`, or what the refusal says."""
    module, loss = predicting(row.data), row.make()
    x, *targets = map(torch.from_numpy, arrays_of(row.data))
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    try:
        model = from_torch(module, x, loss=loss, example_targets=tuple(targets), optimizer=optimizer)
    except Error as refusal:
        assert not isinstance(refusal, MismatchError), refusal
        assert refusal.hint or "does not fit" in str(refusal), refusal
        return str(refusal)
    native = Predicting(row.data)
    agree(on_onward(model, arrays_of(row.data)), on_torch(native, lambda: loss(native(x), *targets)))
    return "equal"


@pytest.mark.parametrize("group", chosen(GROUPS, ["CrossEntropyLoss of probabilities of classes"]))
def test_outside(group: str) -> None:
    for row in GROUPS[group]:
        said = outcome_outside(row)
        if row.settings.get("reduction") == "none" and "does not fit" not in said:
            assert "not one number" in said, (row, said)
        else:
            assert (said == "equal") == (refusal_outside(row) is None), (row, said)
            assert re.search(refusal_outside(row) or "equal", said), (row, said)


def refusal_outside(row: Row) -> str | None:
    """What is said of a row, unless it is equal."""
    if row.loss in (nn.MultiLabelMarginLoss, F.multilabel_margin_loss):
        return "exported with wrong values"
    if row.loss is F.l1_loss and "weight" in row.settings:
        return "drops the `weight`"
    if row.data.endswith(("for each sample", "in a row")):
        return "does not fit the model"
    return "this loss needs" if "one sample" in row.data else None
