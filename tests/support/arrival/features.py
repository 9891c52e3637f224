"""What a training model can have, each as a change of a small one; several can be had at once."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import onnx
from grid import recipes
from grid.side import HIDDEN, INPUTS, SAMPLES, Arrays, Data
from onnx import helper, numpy_helper, parser

import onward
from onward.model import Model
from onward.recipe.optimizers import OPTIMIZERS
from onward.recipe.spec import Spec, parse

STEPS = 5


@dataclasses.dataclass
class Draft:
    """A training model before it is made."""

    loss: str = "mse"
    """A row of the grid."""
    recipe: dict[str, Any] = dataclasses.field(default_factory=lambda: {"optimizer": "sgd:lr=0.05"})
    is_inner: bool = False
    """Whether the loss looks at a value behind which there is another, which is the output."""
    added: list[Any] = dataclasses.field(default_factory=list)
    """Further losses."""
    custom: Any = None
    """A loss that somebody drew."""
    has_pictures: bool = False
    changes: list[Callable[[onnx.ModelProto], None]] = dataclasses.field(default_factory=list)
    """Of the network, between its layers."""
    has_teacher: bool = False
    second: dict[str, Any] | None = None
    """The recipe of a second step."""
    inside: str | None = None
    """A row of `torch_loss_table`: the network is a module of PyTorch that computes this loss itself."""

    @property
    def data(self) -> Data:
        return recipes.LOSSES[self.loss]

    def model(self) -> Model:
        """The training model."""
        if self.inside is not None:
            return onward.prepare(_losing(self.inside).copy(), loss="value:loss", **self.recipe, **self._teaching())
        proto = recipes.network(self.data.last, sequences=self.loss == "ctc")
        for change in self.changes:
            change(proto)
        if self.has_pictures:
            _take_pictures(proto)
        if self.is_inner:
            _append(proto, helper.make_node("Softsign", ["y"], ["behind"]))
            proto.graph.output[0].name = "behind"
        first = self.custom if self.custom is not None else self._options(self.loss)
        made = onward.prepare(proto, loss=[{"y": first}, *self.added], **self.recipe, **self._teaching())
        return made if self.second is None else onward.prepare(made, append=True, **self.second)

    def _teaching(self) -> dict[str, Any]:
        if not self.has_teacher:
            return {}
        teacher = recipes.network(None)
        if self.has_pictures:
            _take_pictures(teacher)
        return {"teacher": teacher}

    @staticmethod
    def _options(row: str) -> Any:
        spec = parse(row)
        return {"name": spec.name, **spec.options}

    def batches(self, model: Model, index: int = 0) -> list[Arrays]:
        return [self._batch(model, index, seed) for seed in range(STEPS)]

    def _batch(self, model: Model, index: int, seed: int) -> Arrays:
        if self.inside is not None:
            x = np.random.default_rng(seed).normal(size=(6, 4)).astype("f")
            return {"x": x} | {
                value.name: array for value, array in zip(model.inputs[1:], _targets(self.inside), strict=True)
            }
        x, *targets = self.data.batch(seed)
        if self.has_pictures:
            x = x.reshape(SAMPLES, 1, 1, INPUTS)
            x = x if "preprocess" not in self.recipe else (x * 40 + 120).clip(0, 255).astype(np.uint8)
        rng, inputs = np.random.default_rng(seed), model.step(index).algorithm.inputs
        if index or self.custom is not None:
            targets = []
        drawn = [rng.normal(size=[d if isinstance(d, int) else SAMPLES for d in v.shape or ()]) for v in inputs]
        arrays = [*targets, *(array.astype("f") for array in drawn[len(targets) :])]
        return {"x": x, **{v.name or "": array for v, array in zip(inputs, arrays, strict=True)}}


@dataclasses.dataclass(frozen=True)
class Feature:
    name: str
    kind: str
    """No two features of a kind are had at once."""
    change: Callable[[Draft], None]
    words: str = ""
    """What a refusal says of it, as a pattern."""

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


def drafted(*features: Feature) -> Draft:
    draft = Draft()
    for feature in features:
        feature.change(draft)
    return draft


# ---- changes of the network ------------------------------------------------------------------------------------------


def _append(proto: onnx.ModelProto, *nodes: onnx.NodeProto, **weights: np.ndarray) -> None:
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())


def _insert(proto: onnx.ModelProto, *nodes: onnx.NodeProto, **weights: np.ndarray) -> None:
    """Put nodes between the hidden layer and the last one; the first reads `IN`, the last writes its own name."""
    reader = next(i for i, node in enumerate(proto.graph.node) if node.output[0] == "product2")
    before = proto.graph.node[reader].input[0]
    for node in nodes:
        node.input[:] = [before if name == "IN" else name for name in node.input]
    rest = list(proto.graph.node[reader:])
    del proto.graph.node[reader:]
    rest[0].input[0] = nodes[-1].output[0]
    proto.graph.node.extend([*nodes, *rest])
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())


def _take_pictures(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 1, 1, INPUTS]))
    proto.graph.node[0].input[0] = "flat"
    proto.graph.node.insert(0, helper.make_node("Flatten", ["x"], ["flat"], axis=1))


def drop(proto: onnx.ModelProto) -> None:
    _insert(proto, helper.make_node("Dropout", ["IN", "ratio"], ["dropped"]), ratio=np.array(0.25, "f"))


def _batch_normalization(proto: onnx.ModelProto) -> None:
    ones, zeros = np.ones(HIDDEN, "f"), np.zeros(HIDDEN, "f")
    named = {"bn.weight": ones * 2, "bn.bias": zeros, "bn.running_mean": zeros, "bn.running_var": ones}
    _insert(proto, helper.make_node("BatchNormalization", ["IN", *named], ["normal"], momentum=0.8), **named)


def _function(proto: onnx.ModelProto) -> None:
    """A function of the model's own."""
    body = [helper.make_node("Mul", ["a", "b"], ["product"]), helper.make_node("Sin", ["product"], ["c"])]
    sets = [helper.make_opsetid("", 21)]
    proto.functions.append(helper.make_function("mine", "Wave", ["a", "b"], ["c"], body, sets))
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    _insert(proto, helper.make_node("Wave", ["IN", "pitch"], ["wave"], domain="mine"), pitch=np.full(HIDDEN, 2, "f"))


def _quantised(proto: onnx.ModelProto) -> None:
    """Activations in 8 bits."""
    _insert(
        proto,
        helper.make_node("QuantizeLinear", ["IN", "q.scale", "q.zero"], ["whole"]),
        helper.make_node("DequantizeLinear", ["whole", "q.scale", "q.zero"], ["rounded"]),
        **{"q.scale": np.array(0.05, "f"), "q.zero": np.array(128, np.uint8)},
    )


def _branch(proto: onnx.ModelProto) -> None:
    """A choice that depends on the batch."""
    before = next(node.input[0] for node in proto.graph.node if node.output[0] == "product2")
    then = helper.make_graph([helper.make_node("Sin", [before], ["bent"])], "then", [], [_any("bent")])
    other = helper.make_graph([helper.make_node("Cos", [before], ["turned"])], "else", [], [_any("turned")])
    _insert(
        proto,
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["is_large"]),
        helper.make_node("If", ["is_large"], ["chosen"], then_branch=then, else_branch=other),
        zero=np.array(0, "f"),
    )


def _any(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


def _penalty(proto: onnx.ModelProto) -> None:
    """A number that the model computes and does not return."""
    nodes = [
        helper.make_node("ReduceSumSquare", ["fc1.weight"], ["squares"], keepdims=0),
        helper.make_node("Mul", ["squares", "share"], ["penalty"]),
    ]
    _append(proto, *nodes, share=np.array(0.01, "f"))


# ---- losses ----------------------------------------------------------------------------------------------------------


@functools.cache
def _losing(row: str) -> Model:
    """A module of PyTorch with a loss inside, as its exporter and Onward capture it."""
    from torch_loss_table import DATA, Losing, inputs, rows

    from onward.frameworks.torch import capture_module

    found = next(each for each in rows() if str(each) == row)
    return capture_module(Losing([found]), (inputs(), *DATA[found.data].targets))


def _targets(row: str) -> list[np.ndarray]:
    from torch_loss_table import DATA

    return [tensor.numpy() for tensor in DATA[row.partition(" of ")[2]].targets]


def _inside(row: str) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.inside = row

    return change


INSIDE = [
    "CrossEntropyLoss(label_smoothing=0.2, weight=...) of classes, one ignored",
    "CrossEntropyLoss(label_smoothing=0.2, weight=...) of probabilities of classes",
    "CrossEntropyLoss(reduction=none) of classes",
    "NLLLoss(weight=...) of log classes of pixels",
    "BCEWithLogitsLoss(pos_weight=...) of yes or no, logits",
    "KLDivLoss(log_target=True, reduction=batchmean) of log distributions",
    "MultiMarginLoss(p=2) of classes",
    "TripletMarginLoss(swap=True, margin=3.0) of triplets",
]
"""Losses inside of modules: of each kind of operators one."""


def _drawn_loss() -> onnx.ModelProto:
    graph = parser.parse_graph(
        """fourth (float[N, 4] prediction, float[N, 4] target) => (float loss) {
            difference = Sub (prediction, target)
            square = Mul (difference, difference)
            fourth = Mul (square, square)
            loss = ReduceMean <keepdims = 0> (fourth)
        }"""
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _on(row: str, is_inner: bool) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.loss, draft.is_inner = row, is_inner

    return change


def _with_output(proto: onnx.ModelProto) -> None:
    proto.graph.output.append(helper.make_tensor_value_info("hidden", onnx.TensorProto.FLOAT, ["N", HIDDEN]))


def _several(is_output: bool) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.added.append({"hidden": {"name": "mse", "scale": 0.3}})
        if is_output:
            draft.changes.append(_with_output)

    return change


def _penalised(draft: Draft) -> None:
    draft.added.append({"penalty": {"name": "value", "scale": 0.5}})
    draft.changes.append(_penalty)


def _custom(draft: Draft) -> None:
    draft.custom, draft.loss = _drawn_loss(), "mse"


# ---- recipes ---------------------------------------------------------------------------------------------------------


def _told(**recipe: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.recipe.update(copy.deepcopy(recipe))


def _optimizer(name: str) -> Callable[[Draft], None]:
    rate = recipes.RATES.get(name, recipes.RATE)

    def change(draft: Draft) -> None:
        draft.recipe["optimizer"] = Spec(name, {"lr": rate})
        if name == "muon":  # which is for matrices
            draft.recipe["trainable"] = ["*.weight"]

    return change


def _of_pictures(**recipe: Any) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.has_pictures = True
        draft.recipe.update(recipe)

    return change


def _masked(draft: Draft) -> None:
    """A second output with a target for each pixel."""

    def change(proto: onnx.ModelProto) -> None:
        _append(
            proto,
            helper.make_node("ReduceMean", ["y", "classes"], ["mean"], keepdims=1),
            helper.make_node("Unsqueeze", ["mean", "sides"], ["factor"]),
            helper.make_node("Mul", ["x", "factor"], ["mask"]),
            classes=np.array([1]),
            sides=np.array([2, 3]),
        )
        proto.graph.output.append(helper.make_tensor_value_info("mask", onnx.TensorProto.FLOAT, ["N", 1, 1, INPUTS]))

    _of_pictures(augment="flip crop:padding=1")(draft)
    draft.changes.append(change)
    draft.added.append({"mask": "mse"})


def _changed(change: Callable[[onnx.ModelProto], None], **recipe: Any) -> Callable[[Draft], None]:
    def changed(draft: Draft) -> None:
        draft.changes.append(change)
        draft.recipe.update(recipe)

    return changed


def _teacher(draft: Draft) -> None:
    draft.has_teacher = True


def _second(draft: Draft) -> None:
    draft.second = {"loss": {"y": "l1"}, "optimizer": "adam:lr=0.01", "trainable": ["fc2.*"]}


# ---- all of them -----------------------------------------------------------------------------------------------------

_LOSS = r"loss|custom graph"
_UPDATE = r"[Oo]ptimizer|update|function"


@functools.cache
def features() -> dict[str, Feature]:
    """By name."""
    ways = {"on an output": False, "on an inner value": True}
    found = [
        *(
            Feature(f"{row} {where}", "loss", _on(row, way), _LOSS)
            for row in recipes.LOSSES
            for where, way in ways.items()
        ),
        *(Feature(f"{row}, in a module", "loss", _inside(row), _LOSS) for row in INSIDE if find_spec("torch")),
        Feature("a loss that is drawn", "loss", _custom, _LOSS),
        Feature("several losses", "more losses", _several(True), _LOSS),
        Feature("several losses, one inside", "more losses", _several(False), _LOSS),
        Feature("a loss of the model's own beside", "more losses", _penalised, _LOSS),
        *(Feature(f"optimizer {name}", "optimizer", _optimizer(name), _UPDATE) for name in OPTIMIZERS),
        Feature(
            "an optimizer that is drawn",
            "optimizer",
            _told(optimizer={"function": recipes.FUNCTION, "lr": 0.02}),
            _UPDATE,
        ),
        Feature("groups", "groups", _told(groups=["*bias:lr=0.01", {"match": "fc2*", "optimizer": "adam:lr=0.01"}])),
        Feature("rates by depth", "groups", _told(lr_decay=0.5)),
        Feature("frozen weights", "frozen", _told(freeze=["fc1*"])),
        Feature("clipped by norm", "clip", _told(clip={"norm": 0.1})),
        Feature("clipped by norm as optax", "clip", _told(clip={"norm": 0.1, "variant": "optax"})),
        Feature("clipped tensor by tensor", "clip", _told(clip="tensor_norm:0.1")),
        Feature("clipped by value", "clip", _told(clip="value:0.05")),
        Feature("accumulation", "accumulate", _told(accumulate=2), "accumulat"),
        Feature("averages", "ema", _told(ema=0.5), "averages"),
        Feature("a scale of the loss", "scale", _told(loss_scale=64.0), "scale"),
        Feature("a scale that changes", "scale", _told(loss_scale="dynamic"), "scale"),
        *(
            Feature(f"schedule {row}", "schedule", _told(schedule=[part.strip() for part in row.split("|")]))
            for row in recipes.SCHEDULE_ROWS
        ),
        Feature("augmentation", "pictures", _of_pictures(augment="flip noise:std=0.3"), "augment"),
        Feature("masks under augmentation", "pictures", _masked, "augment|the loss reads"),
        Feature("preprocessing", "pictures", _of_pictures(preprocess="scale normalize:mean=0.5,std=0.2")),
        Feature(
            "both",
            "pictures",
            _of_pictures(preprocess="scale normalize:mean=0.5,std=0.2", augment="flip noise"),
            "augment",
        ),
        Feature("dropout", "dropout", _changed(drop)),
        Feature("batch normalization", "normalization", _changed(_batch_normalization)),
        Feature("the variance of a sample", "normalization", _changed(_batch_normalization, variance="sample")),
        Feature("a function", "function", _changed(_function)),
        Feature("a branch", "branch", _changed(_branch), "`If`"),
        Feature("quantisation", "quantisation", _changed(_quantised), "QuantizeLinear|rounds"),
        Feature("initialization", "initialization", _told(init={"fc?.weight": "kaiming_normal"}, seed=3)),
        Feature("a teacher", "teacher", _teacher, "teacher|the loss reads"),
        Feature("low-rank adapters", "adapters", _told(lora="rank=2,targets=fc1*")),
        Feature("two steps", "steps", _second, "2 steps"),
    ]
    return {feature.name: feature for feature in found}
