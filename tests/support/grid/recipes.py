"""Optimizers, losses and schedules of recipes, each in a tiny training model that has made some steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

import onward
from grid.side import AFTER, BEFORE, HIDDEN, INPUTS, OUTPUTS, Arrays, Data
from onward.engines import start
from onward.recipe.optimizers import OPTIMIZERS
from onward.recipe.schedules import SCHEDULES
from onward.recipe.spec import Spec, parse

# ---- rows ------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "sgd": ("weight_decay=0.1", "maximize=true"),
    "momentum": ("weight_decay=0.1", "dampening=0.5"),
    "nesterov": ("weight_decay=0.1",),
    "sgdw": ("momentum=0.9",),
    "adagrad": ("initial_accumulator_value=1e-6", "lr_decay=0.1", "weight_decay=0.1"),
    "adam": ("eps=1e-3", "weight_decay=0.1", "decoupled_weight_decay=true,weight_decay=0.1"),
    "adamw": ("eps=1e-3,amsgrad=true", "maximize=true"),
    "amsgrad": ("eps=1e-3", "weight_decay=0.1"),
    "adamax": ("eps=1e-3", "weight_decay=0.1"),
    "nadam": ("weight_decay=0.1", "decoupled_weight_decay=true,weight_decay=0.1"),
    "radam": ("beta2=0.9,eps=1e-3", "weight_decay=0.1", "decoupled_weight_decay=true,weight_decay=0.1"),
    "rmsprop": ("momentum=0.9", "centered=true", "momentum=0.9,weight_decay=0.1"),
    "adadelta": ("weight_decay=0.1",),
    "adafactor": ("min_dim_size_to_factor=4", "weight_decay=0.1"),
    "lion": ("weight_decay=0.1",),
    "lamb": ("eps=1e-3", "weight_decay=0.1"),
    "muon": ("nesterov=false", "adjust_lr_fn=match_rms_adamw"),
}
"""What is tried beside the defaults, in all variants that know it."""

FUNCTION = parser.parse_function(
    """
    <domain: "mine", opset_import: ["" : 21]>
    Steady (x, g, mean, lr) => (x_new, mean_new) {
        kept = Constant <value_float = 0.9> ()
        small = Constant <value_float = 0.01> ()
        before = Mul (mean, kept)
        mean_new = Add (before, g)
        size = ReduceL2 <keepdims = 0> (mean_new)
        length = Add (size, small)
        way = Div (mean_new, length)
        rate = CastLike (lr, x)
        change = Mul (rate, way)
        x_new = Sub (x, change)
    }
    """
)
"""An optimizer that no framework has: steps of the same length, whatever the gradients are."""

RATES = {"adadelta": 1.0, "lion": 2e-3, "adagrad": 0.1}
RATE = 0.02
"""Large enough for an error of the update to be seen in the losses."""
FALLING = "exponential:gamma=0.9"
"""Where optimizers are tried: some differ only in whether their momentum has the rate in it."""


LOSSES: dict[str, Data] = {
    "cross_entropy": Data(None, ("labels",)),
    "cross_entropy:label_smoothing=0.1": Data(None, ("labels",)),
    "cross_entropy:ignore_index=0": Data(None, ("labels",)),
    "cross_entropy:weight=[1,2,3,4]": Data(None, ("labels",)),
    "cross_entropy:reduction=sum": Data(None, ("labels",)),
    "cross_entropy:target=probabilities": Data(None, ("shares",)),
    "cross_entropy:target=probabilities,label_smoothing=0.1": Data(None, ("one_hot",)),
    "nll": Data("LogSoftmax", ("labels",)),
    "ctc": Data("LogSoftmax", ("sequences",)),
    "binary_cross_entropy": Data("Sigmoid", ("binary",)),
    "binary_cross_entropy:clip=1e-7": Data("Sigmoid", ("binary",)),
    "bce_with_logits": Data(None, ("binary",)),
    "bce_with_logits:pos_weight=[1,2,3,4]": Data(None, ("binary",)),
    "hinge": Data(None, ("signs",)),
    "squared_hinge": Data(None, ("signs",)),
    "mse": Data(),
    "mse:reduction=sum": Data(),
    "l1": Data(),
    "huber": Data(),
    "huber:delta=0.3": Data(),
    "smooth_l1": Data(),
    "smooth_l1:beta=0.3": Data(),
    "triplet": Data(None, ("real", "real")),
    "cosine": Data(),
    "kl_div": Data("LogSoftmax", ("shares",)),
    "kl_div:log_target=true": Data("LogSoftmax", ("logs",)),
    "poisson_nll": Data(None, ("positive",)),
    "poisson_nll:log_input=false,eps=1e-7": Data("Softplus", ("positive",)),
    "gaussian_nll": Data(None, ("real", "positive")),
}

SCHEDULE_ROWS = [
    "constant",
    "constant:warmup=4",
    "table:factors=[1,0.5,0.25,0.1]",
    "step:size=2,gamma=0.5",
    "step:size=2,gamma=0.5,every=2",
    "multistep:milestones=[4,6],gamma=0.5",
    "exponential:gamma=0.8",
    "exponential:gamma=0.5,every=3",
    "linear:steps=8",
    "linear:steps=8,start_factor=0.2,end_factor=1",
    "polynomial:steps=8,power=2",
    "polynomial:steps=8,power=2,end=0.01",
    "cosine:steps=8,min=0.01",
    "cosine:steps=8,min=0.01,warmup=4",
    "cosine:steps=6,min=0.01,after=torch",
    "cosine_restarts:period=3,mult=2",
    "one_cycle:steps=10",
    "one_cycle:steps=10,anneal=linear,three_phase=true",
    "inverse_sqrt:timescale=4",
    "inverse_sqrt:warmup=4",
    "warmup:steps=5",
    "linear:steps=4,start_factor=0.5,end_factor=1,until=4 | exponential:gamma=0.8",
]


def rows(kind: str) -> list[str]:
    """What the grid has a row for."""
    if kind == "optimizers":
        return [*(row for name in OPTIMIZERS for row in _optimizers(name)), "function"]
    return list(LOSSES) if kind == "losses" else SCHEDULE_ROWS


def _optimizers(name: str) -> Iterable[str]:
    kind = OPTIMIZERS[name]
    for options, variant in itertools.product(("", *OPTIONS.get(name, ())), kind.variants):
        row = f"{name}:{options},variant={variant}" if options else f"{name}:variant={variant}"
        if _is_valid(row):
            yield row


def _is_valid(row: str) -> bool:
    """Some variants have no use for some numbers."""
    spec = parse(row)
    try:
        OPTIMIZERS[spec.name].configure(**spec.options)
    except onward.errors.RecipeError:
        return False
    return True


def known(kind: str) -> set[str]:
    """All names that a recipe knows."""
    if kind == "losses":
        return {loss.name for loss in onward.recipe.losses.LOSSES.values()}
    return {*OPTIMIZERS, "function"} if kind == "optimizers" else {*SCHEDULES}


# ---- runs ------------------------------------------------------------------------------------------------------------


class Started(NamedTuple):
    """A training model after some steps, and what comes then."""

    training: onward.Model
    batches: list[Arrays]
    losses: list[float]


@functools.cache
def started(kind: str, row: str) -> Started:
    data = LOSSES[row] if kind == "losses" else Data()
    training = prepared(kind, row, data.last)
    with start(training, threads=1) as engine:
        batches = [dict(zip(engine.inputs, data.batch(seed), strict=True)) for seed in range(BEFORE + AFTER)]
        for batch in batches[:BEFORE]:
            engine.step(batch)
        begun = engine.updated()
        losses = [float(engine.step(batch)[engine.loss]) for batch in batches[BEFORE:]]
    return Started(begun, batches[BEFORE:], losses)


def prepared(kind: str, row: str, last: str | None) -> onward.Model:
    model = onward.load(network(last, sequences=row == "ctc"))
    if kind == "losses":
        return onward.prepare(model, loss=row, optimizer="sgd:lr=0.05")
    if kind == "schedules":
        parts = [part.strip() for part in row.split("|")]
        return onward.prepare(model, loss="mse", optimizer="sgd:lr=0.1", schedule=parts)
    spec = parse(row)
    rate = RATES.get(spec.name, RATE)
    named = Spec(spec.name, {"lr": rate, **spec.options})
    optimizer = {"function": FUNCTION, "lr": rate} if row == "function" else named
    only = {"trainable": ["*.weight"]} if spec.name == "muon" else {}  # which is for matrices
    return onward.prepare(model, loss="mse", optimizer=optimizer, schedule=FALLING, **only)


def network(last: str | None, *, sequences: bool = False) -> onnx.ModelProto:
    """x -> fc1 -> Tanh -> fc2 -> y."""
    rng, time = np.random.default_rng(0), ["T"] if sequences else []
    sizes = {"fc1": (INPUTS, HIDDEN), "fc2": (HIDDEN, OUTPUTS)}
    weights = {f"{name}.weight": rng.normal(size=shape) / 2 for name, shape in sizes.items()}
    weights |= {f"{name}.bias": rng.normal(size=shape[1]) / 2 for name, shape in sizes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "fc1.weight"], ["product1"]),
        helper.make_node("Add", ["product1", "fc1.bias"], ["sum1"]),
        helper.make_node("Tanh", ["sum1"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "fc2.weight"], ["product2"]),
        helper.make_node("Add", ["product2", "fc2.bias"], ["sum2"]),
        helper.make_node(last or "Identity", ["sum2"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", kind, [*time, "N", INPUTS])]
    outputs = [helper.make_tensor_value_info("y", kind, [*time, "N", OUTPUTS])]
    initializers = [numpy_helper.from_array(array.astype("f"), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "network", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
