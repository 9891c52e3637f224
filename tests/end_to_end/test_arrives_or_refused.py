"""Whatever is in a training model arrives or is refused: the same losses, or an error that names the feature.

There is no third outcome, for each feature on each target, and for any three of them. More of these, in the slow tests:
ONWARD_FUZZ=10 pytest tests/end_to_end/test_arrives_or_refused.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import models
import numpy as np
import onnx_ir as ir
import pytest
from arrival.features import Feature, drafted, features
from arrival.targets import TARGETS, jax_functions, on_engine, tensorflow_module, torch_objects
from arrival.trial import tried
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from marks import needs

import onward
from onward.errors import Error, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TIMES = int(os.environ.get("ONWARD_FUZZ", "1"))

USUAL = [
    "cross_entropy on an output", "cross_entropy on an inner value", "bce_with_logits on an inner value",
    "CrossEntropyLoss(label_smoothing=0.2, weight=...) of classes, one ignored, in a module",
    "a loss that is drawn", "several losses", "several losses, one inside", "a loss of the model's own beside",
    "optimizer adamw", "an optimizer that is drawn", "groups", "clipped by norm", "accumulation", "averages",
    "a scale of the loss", "schedule cosine:steps=8,min=0.01,warmup=4", "augmentation", "preprocessing", "dropout",
    "masks under augmentation", "batch normalization", "a function", "quantisation", "initialization", "a teacher",
    "two steps",
]  # fmt: skip
"""One of each kind."""
FEWER = ["cross_entropy on an inner value", "a scale of the loss", "augmentation", "a teacher", "two steps"]
"""What was lost on the way once."""
QUICK = {
    **dict.fromkeys(("lowered", "numpy engine", "torch objects"), USUAL),
    **dict.fromkeys(("torch engine", "torch program", "keras model", "tensorflow module"), FEWER),
    "jax functions": FEWER[1:],
    "checkpoint of torch": [
        "clipped by norm",
        "accumulation",
        "averages",
        "groups",
        "rates by depth",
        "frozen weights",
    ],
}


def _cells() -> Iterator[pytest.param]:
    for target, (framework, _) in TARGETS.items():
        for name in features():
            if name == "dropout" and target.startswith("checkpoint"):
                continue  # random numbers begin anew: checkpoints of other frameworks have no place for their state
            marks = [needs(framework), *([] if name in QUICK.get(target, ()) else [pytest.mark.slow])]
            yield pytest.param(name, target, marks=marks, id=f"{name} | {target}")


@pytest.mark.slow(
    "augmentation | jax functions",
    "augmentation | keras model",
    "augmentation | numpy engine",
    "augmentation | torch engine",
    "masks under augmentation | torch objects",
)
@pytest.mark.parametrize(("name", "target"), list(_cells()))
def test_each(name: str, target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of frameworks, about what a training model makes them do
        assert not tried([features()[name]], target).startswith("no recipe")


@pytest.mark.slow
@needs("keras")
def test_what_a_refusal_advises() -> None:
    """Where the number of steps in time is said, a program of Keras has them all."""
    draft = drafted(features()["ctc on an output"])
    model = draft.model()
    batches = draft.batches(model)
    settled = onward.transform.declare(model, {"x": (len(batches[0]["x"]), "N", batches[0]["x"].shape[2])})
    losses = TARGETS["keras program"][1](settled, batches)
    np.testing.assert_allclose(losses, on_engine("onnxruntime", threads=1)(model, batches), rtol=2e-4)


# ---- several at once -------------------------------------------------------------------------------------------------

CHEAP = ["lowered", "numpy engine", "torch engine", "torch objects"]
COMBINED = [feature for feature in features().values() if not feature.name.startswith("ctc")]  # of other shapes


def _three() -> st.SearchStrategy[list[Feature]]:
    by_kind: dict[str, list[Feature]] = {}
    for feature in COMBINED:
        by_kind.setdefault(feature.kind, []).append(feature)
    kinds = st.lists(st.sampled_from(sorted(by_kind)), min_size=3, max_size=3, unique=True)
    return kinds.flatmap(lambda chosen: st.tuples(*(st.sampled_from(by_kind[kind]) for kind in chosen))).map(list)


_SETTINGS = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def _combined(chosen: list[Feature], target: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assume(not tried(chosen, target).startswith("no recipe"))


@needs("torch")
def test_what_was_lost_only_together() -> None:
    """A program of PyTorch rounded without a derivative what it had dropped out before."""
    assert tried([features()["dropout"], features()["quantisation"]], "torch program") == "arrived"


@pytest.mark.slow
@needs("torch")
@settings(_SETTINGS, max_examples=100)
@given(_three(), st.sampled_from(CHEAP))
def test_three_at_once(chosen: list[Feature], target: str) -> None:
    _combined(chosen, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(kind)) for name, (kind, _) in TARGETS.items()])
def test_many_times_three(target: str) -> None:
    dear = 200 if target in CHEAP else 60

    @settings(_SETTINGS, max_examples=dear * TIMES)
    @given(_three())
    def campaign(chosen: list[Feature]) -> None:
        _combined(chosen, target)

    campaign()


# ---- what is no run at all -------------------------------------------------------------------------------------------

CHECKPOINTS = [pytest.param(name, marks=needs(kind)) for name, (kind, _) in TARGETS.items() if "checkpoint" in name]


@pytest.mark.parametrize("target", CHECKPOINTS)
def test_an_inference_model_is_refused(target: str) -> None:
    with pytest.raises(Error) as caught:
        TARGETS[target][1](onward.load(models.digits_mlp()), [])
    assert "onward prepare" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["numpy", "onnxruntime"])
def test_each_of_two_steps_is_there_on_engines(name: str) -> None:
    draft = drafted(features()["two steps"])
    model = draft.model()
    alone = onward.prepare(onward.transform.strip(model), **(draft.second or {}))
    batches = draft.batches(model, 1)
    found = on_engine(name, 1)(model, batches)
    same = [dict(zip(("x", alone.step().algorithm.inputs[0].name), batch.values(), strict=True)) for batch in batches]
    np.testing.assert_allclose(found, on_engine("onnxruntime", threads=1)(alone, same), rtol=1e-5)


@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in ("torch", "jax", "tensorflow")])
def test_one_of_two_steps_by_its_number(target: str) -> None:
    """It is carried where that is asked for, with what the other one changes."""
    draft = drafted(features()["two steps"])
    model = draft.model()
    batches = draft.batches(model, 1)
    targets = {"torch": torch_objects(live=True), "jax": jax_functions, "tensorflow": tensorflow_module}
    found = targets[target](model, batches, 1)
    np.testing.assert_allclose(found, on_engine("onnxruntime", 1, threads=1)(model, batches), rtol=1e-5)


@needs("keras")
def test_what_another_step_changes_has_no_place_in_keras() -> None:
    with pytest.raises(UnsupportedError, match="the others would be lost"):
        onward.to_keras(drafted(features()["two steps"]).model(), step=1)


# ---- what somebody added to a file -----------------------------------------------------------------------------------


def _counting(model: onward.Model) -> None:
    """State that no recipe knows: the sum of all losses."""
    algorithm = model.step().algorithm
    total = ir.Value(
        name="total", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]), const_value=ir.tensor(np.float32(0))
    )
    algorithm.register_initializer(total)
    loss = next(value for value in algorithm.outputs if value.name == "loss")
    node = ir.node("Add", [total, loss])
    node.outputs[0].name = "total/new"
    node.outputs[0].type, node.outputs[0].shape = total.type, total.shape
    algorithm.append(node)
    algorithm.outputs.append(node.outputs[0])
    model.step().update["total"] = "total/new"


def _doubling(model: onward.Model) -> None:
    """Gradients that are twice as large as those of the loss, for one parameter."""
    gradient = next(node for node in model.step().gradients())
    node = ir.node("Add", [gradient.outputs[0], gradient.outputs[0]])
    gradient.outputs[0].replace_all_uses_with(node.outputs[0])
    for i in range(2):
        node.replace_input_with(i, gradient.outputs[0])
    model.step().algorithm.insert_after(gradient, node)


def _redefined(model: onward.Model) -> None:
    """Another body of a function by which parameters are updated."""
    function = next(f for key, f in model.functions.items() if key[1].startswith("SGD") or key[1] == "AdamW")
    node = next(node for node in function.graph if node.op_type == "Sub")
    other = ir.node("Add", node.inputs)
    function.graph.insert_before(node, other)
    node.outputs[0].replace_all_uses_with(other.outputs[0], replace_graph_outputs=True)
    function.graph.remove(node)


@pytest.mark.parametrize("change", [_counting, _doubling, _redefined])
@pytest.mark.parametrize("target", [pytest.param(name, marks=needs(name)) for name in ("torch", "keras", "jax")])
def test_what_somebody_added_is_refused(change: Callable[[onward.Model], None], target: str) -> None:
    """By construction: what no converter has ever heard of cannot be left out."""
    model = onward.prepare(models.digits_mlp(), loss="cross_entropy", optimizer="adamw:lr=0.1")
    change(model)
    assert not [finding for finding in onward.check(model) if finding.severity == "error"]
    with pytest.raises(UnsupportedError, match=r"differently from its recipe|has no place for: total"):
        getattr(onward, f"to_{target}")(model)
