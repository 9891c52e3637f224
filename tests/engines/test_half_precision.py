"""Parameters of 16 bits, as they are trained in PyTorch: rounded at every step, or with copies in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from marks import needs
from optimizer_tables import TORCH, torch_arguments

import onward
from onward.engines import start
from onward.errors import UnsupportedError
from onward.model.state import states
from onward.recipe.optimizers import optimizer
from onward.recipe.spec import Spec

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from onward.engines.torch.types import CODES, from_array, to_array  # noqa: E402
from onward.frameworks.torch import capture_module, from_torch, program, to_torch  # noqa: E402
from onward.frameworks.torch.exact import MasterWeights, float32_copies  # noqa: E402
from onward.frameworks.torch.optimizer import ClipHook, read_optimizer  # noqa: E402
from onward.importing.recipes import scaling_of  # noqa: E402
from onward.run_state.state import ParameterGroup, RunState  # noqa: E402
from onward.run_state.training_models import to_training_model  # noqa: E402

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = {torch.bfloat16: BFLOAT16, torch.float16: np.dtype(np.float16)}


# ---- updates by gradients that are given -----------------------------------------------------------------------------


def sums(weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Σ w·g in float32: with the absolute error from a far lower target as the loss, g is the gradient of w."""
    helper, nodes = onnx.helper, []
    for i, name in enumerate(weights):
        nodes.append(helper.make_node("Cast", [name], [f"wide{i}"], to=onnx.TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"wide{i}", f"g{i}"], [f"product{i}"]))
        nodes.append(helper.make_node("ReduceSum", [f"product{i}"], [f"sum{i}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"sum{i}" for i in range(len(weights))], ["total"]))
    kind = helper.np_dtype_to_tensor_dtype(next(iter(weights.values())).dtype)
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info(f"g{i}", 1, array.shape) for i, array in enumerate(weights.values())],
        [helper.make_tensor_value_info("total", 1, ())],
        [helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


L1 = {"name": "l1", "reduction": "sum"}
SHAPES = [(64, 16), (128,)]  # whole rows of the registers of a CPU: PyTorch rounds once more in what is left over
SIZES = (1.0, 1e-3, 30.0, 0.1, 1.0, 0.3)


def examples(dtype: np.dtype) -> tuple[dict[str, np.ndarray], list[list[np.ndarray]]]:
    rng = np.random.default_rng(0)
    start = {f"layer.{i}": rng.normal(size=shape).astype(dtype) for i, shape in enumerate(SHAPES)}
    return start, [[(size * rng.normal(size=shape)).astype(dtype) for shape in SHAPES] for size in SIZES]


def in_torch(
    dtype: np.dtype, make: Callable[[list[Any]], Any], clip: float | None = None
) -> tuple[dict[str, Any], Any]:
    """Parameters and their optimizer after all gradients."""
    start, gradients = examples(dtype)
    parameters = {name: nn.Parameter(from_array(array)) for name, array in start.items()}
    made = make(list(parameters.values()))
    for step in gradients:
        for parameter, g in zip(parameters.values(), step, strict=True):
            parameter.grad = from_array(g)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters.values(), clip)
        made.step()
    return parameters, made


def in_onnx(dtype: np.dtype, engine: str = "onnxruntime", options: Any = None, **recipe: Any) -> dict[str, np.ndarray]:
    weights, gradients = examples(dtype)
    model = onward.prepare(sums(weights), loss=L1, master_weights=False, **recipe)
    with start(model, engine=engine, **(options or {})) as running:
        for step in gradients:
            given = {f"g{i}": g.astype(np.float32) for i, g in enumerate(step)}
            running.step({**given, "target": np.float32(-1e9)})
        return running.state()


def differing(state: dict[str, np.ndarray], parameters: dict[str, Any], made: Any) -> dict[str, int]:
    """How many elements are not the same, bit by bit, in parameters and in all that the optimizer keeps of them."""
    found = {}
    for name, parameter in parameters.items():
        tensors = {"": parameter, **{f"/{slot}": x for slot, x in made.state[parameter].items() if x is not None}}
        for slot, tensor in tensors.items():
            if tensor.ndim:
                ours, theirs = state[name + slot], to_array(tensor)
                assert ours.dtype == theirs.dtype
                found[name + slot] = int((ours.view(np.uint16) != theirs.view(np.uint16)).sum())
    return {name: count for name, count in found.items() if count}


ROWS = [row for row in TORCH if row[1] not in ("Muon", "Adafactor")]


@pytest.mark.parametrize(("name", "theirs", "settings"), ROWS)
def test_an_update_rounds_where_pytorch_does(name: str, theirs: str, settings: dict[str, Any]) -> None:
    kind = getattr(torch.optim, theirs)
    arguments = {**torch_arguments(optimizer(name).configure(**settings), kind), "foreach": False}
    state = in_onnx(BFLOAT16, optimizer={"name": name, **settings})
    assert not differing(state, *in_torch(BFLOAT16, lambda parameters: kind(parameters, **arguments)))


@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"weight_decay": 0.1, "beta1": 0.3}])
@pytest.mark.parametrize(("name", "theirs"), [("adam", "Adam"), ("adamw", "AdamW")])
def test_fused_kernels_round_what_they_store(name: str, theirs: str, settings: dict[str, Any]) -> None:
    kind = getattr(torch.optim, theirs)
    arguments = {**torch_arguments(optimizer(name).configure(**settings), kind), "fused": True}
    state = in_onnx(BFLOAT16, optimizer={"name": name, **settings, "fused": True})
    assert not differing(state, *in_torch(BFLOAT16, lambda parameters: kind(parameters, **arguments)))


@pytest.mark.slow("float16")
@pytest.mark.parametrize("dtype", HALVES.values(), ids=str)
def test_norms_of_gradients_are_rounded_as_pytorch_does(dtype: np.dtype) -> None:
    state = in_onnx(dtype, optimizer="sgd:lr=0.25,momentum=0.5", clip=0.7)
    assert not differing(state, *in_torch(dtype, lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5), clip=0.7))


def test_float16_is_off_by_a_digit_where_a_root_is_a_tie() -> None:
    state = in_onnx(HALVES[torch.float16], optimizer="adamw:eps=1e-3")
    parameters, made = in_torch(HALVES[torch.float16], lambda p: torch.optim.AdamW(p, eps=1e-3, foreach=False))
    assert sum(differing(state, parameters, made).values()) <= 3
    for name, parameter in parameters.items():
        np.testing.assert_allclose(state[name], to_array(parameter), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("numpy", {}),
        ("torch", {"compile": False}),
        pytest.param("torch", {}, marks=pytest.mark.slow),
        pytest.param("jax", {}, marks=[needs("jax"), pytest.mark.slow]),
        pytest.param("tensorflow", {}, marks=[needs("tensorflow"), pytest.mark.slow]),
    ],
)
def test_every_engine_rounds_alike(engine: str, options: dict[str, Any]) -> None:
    """Also when it compiles, and could leave out what is rounded and computed with at once."""
    state = in_onnx(BFLOAT16, engine, options, optimizer="adamw:lr=1e-2")
    assert not differing(state, *in_torch(BFLOAT16, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)))


def test_fused_is_a_word_of_pytorch() -> None:
    with pytest.raises(onward.Error, match="`fused` needs `variant=torch`"):
        in_onnx(BFLOAT16, optimizer="adamw:variant=keras,fused=true")


# ---- whole steps -----------------------------------------------------------------------------------------------------

STEPS = 10


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches(dtype: Any, steps: int = STEPS) -> Iterator[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 16, generator=generator).to(dtype), torch.randint(0, 4, (8,), generator=generator)


def losses_of(
    module: Any, made: Any, given: Iterable[tuple[Any, Any]], scheduler: Any = None, autocast: Any = None
) -> list[float]:
    """The losses of steps by the optimizer `made`."""
    losses = []
    for x, y in given:
        made.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        made.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def pure(module: Any, **how: Any) -> list[float]:
    return losses_of(module, torch.optim.AdamW(module.parameters(), lr=1e-2, **how), batches(torch.bfloat16))


def with_masters(module: Any, scale: float | None = None) -> list[float]:
    """AdamW on copies in float32, and a loss that is scaled as long as no gradient overflows, as Apex has them."""
    dtype = next(module.parameters()).dtype
    copies = [nn.Parameter(parameter.detach().float()) for parameter in module.parameters()]
    made, losses = torch.optim.AdamW(copies, lr=1e-2), []
    for x, y in batches(dtype):
        module.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        (loss * (scale or 1.0)).backward()
        for parameter, master in zip(module.parameters(), copies, strict=True):
            master.grad = parameter.grad.float() / (scale or 1.0)
        losses.append(float(loss.detach()))
        if scale and not all(bool(master.grad.isfinite().all()) for master in copies):
            scale /= 2
            continue
        nn.utils.clip_grad_norm_(copies, 0.5)
        made.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), copies, strict=True):
                parameter.copy_(master)
    return losses


def trained(module: Any, engine: str, **recipe: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    dtype = next(module.parameters()).dtype
    first, _ = next(batches(dtype))
    model = onward.prepare(capture_module(module, first), loss="cross_entropy", **recipe)
    losses = []
    with start(model, engine=engine, **({"compile": False} if engine == "torch" else {})) as running:
        inputs, labels = running.inputs
        for x, y in batches(dtype):
            losses.append(float(running.step({inputs: to_array(x), labels: y.numpy()})[running.loss]))
        return losses, running.state()


WAYS: dict[str, tuple[Callable[[Any], list[float]], dict[str, Any]]] = {
    "pure": (lambda m: pure(m, foreach=False), {"optimizer": "adamw:lr=1e-2", "master_weights": False}),
    "fused": (lambda m: pure(m, fused=True), {"optimizer": "adamw:lr=1e-2,fused=true", "master_weights": False}),
    "masters": (with_masters, {"optimizer": "adamw:lr=1e-2", "clip": 0.5}),
}


@pytest.mark.slow("fused", "masters")
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_trains_as_in_pytorch(way: str) -> None:
    """On PyTorch bit by bit; elsewhere products are added up in another order, which shows in the last digit."""
    module = network().bfloat16()
    theirs = copy.deepcopy(module)
    train, recipe = WAYS[way]
    expected = train(theirs)
    losses, state = trained(module, "torch", **recipe)
    assert losses == expected
    for name, parameter in theirs.named_parameters():
        np.testing.assert_array_equal(state[name].view(np.uint16), to_array(parameter).view(np.uint16), err_msg=name)
    losses, state = trained(module, "onnxruntime", **recipe)
    np.testing.assert_allclose(losses, expected, rtol=2**-7)
    for name, parameter in theirs.named_parameters():  # where a gradient is all rounding, Adam takes whole steps of it
        assert np.abs(state[name].astype("f") - parameter.detach().float().numpy()).mean() < 2e-3, name


def test_float16_with_copies_and_a_loss_that_is_scaled() -> None:
    """Gradients are divided by the scale in float32: in float16 the small ones would be gone by then."""
    module = network().half()
    theirs = copy.deepcopy(module)
    expected = with_masters(theirs, scale=65536.0)
    recipe = {"optimizer": "adamw:lr=1e-2", "clip": 0.5, "loss_scale": "dynamic"}
    losses, state = trained(module, "torch", **recipe)
    assert losses == expected
    assert state["scaler/scale"] < 65536 and state["step"] < STEPS
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(state[name], to_array(parameter), rtol=2**-10, err_msg=name)
        np.testing.assert_array_equal(state[name], state[f"{name}/master"].astype(np.float16), err_msg=name)
    losses, _ = trained(module, "onnxruntime", **recipe)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)


def scales(overflows: list[bool], loss_scale: Any, state: Any = None) -> list[float]:
    """The scale after each step, of which some overflow."""
    weights, _ = examples(np.dtype(np.float16))
    model = onward.prepare(sums(weights), loss=L1, optimizer="sgd:lr=1e-6", loss_scale=loss_scale)
    for name, tensor in (state or {}).items():
        model.set(name, tensor.array())
    found = []
    with start(model, engine="numpy") as running:
        for overflow in overflows:
            given = {f"g{i}": np.full(shape, 100.0 if overflow else 1e-4, "f") for i, shape in enumerate(SHAPES)}
            running.step({**given, "target": np.float32(-1e9)})
            found.append(float(running.state()["scaler/scale"]))
    return found


DEEPSPEED = "dynamic:growth_interval=3,hysteresis=2,min_scale=8192,cooldown=1"
OVERFLOWS = [bool(int(digit)) for digit in "1100110001000100000011111"]


@pytest.mark.slow
def test_a_loss_is_scaled_as_by_deepspeed() -> None:
    scalers = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    scalers.dist = SimpleNamespace(get_rank=lambda: 1)
    theirs = scalers.DynamicLossScaler(2.0**16, 3, 2.0**13, 2, False, raise_error_at_min_scale=False)
    expected, kept = [], {}
    for i, overflow in enumerate(OVERFLOWS):
        kept[i] = scaling_of(vars(theirs))
        theirs.update_scale(overflow)
        expected.append(theirs.cur_scale)
    assert scales(OVERFLOWS, DEEPSPEED) == expected
    for i in (0, 1, 2, 6, 9, 17, 19):  # as it is read from a checkpoint in the middle
        assert scales(OVERFLOWS[i:], *kept[i]) == expected[i:]


def test_hysteresis_waits_and_the_scale_has_a_least() -> None:
    """What DeepSpeed's own scaler makes of these overflows."""
    found = scales(OVERFLOWS, DEEPSPEED)
    assert [int(scale) >> 13 for scale in found] == [8, 4, 4, 4, 2, *[1] * 12, *[2] * 4, *[1] * 4]
    with pytest.raises(onward.Error, match="has no option `histeresis`"):
        scales([], "dynamic:histeresis=2")


def test_a_checkpoint_in_float16_goes_on_with_its_copies_and_its_scale(tmp_path: Path) -> None:
    module, (x, _) = network().half(), next(batches(torch.float16))
    made = RUNS["masters"](module)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.step()
    scaler = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
    path = tmp_path / "run.pt"
    torch.save({"model": module.state_dict(), "optimizer": made.state_dict(), "scaler": scaler}, path)
    names = [name for name, _ in module.named_parameters()]
    training = onward.from_checkpoint(path, like=capture_module(module, x), loss="cross_entropy", names=names)
    assert training.array("scaler/scale") == 1024 and training.array("scaler/growth_tracker") == 3
    assert training.array("scaler/growth_interval") == 7
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(training.array(name), to_array(parameter), strict=True)
        np.testing.assert_array_equal(training.array(f"{name}/master"), made.state[parameter]["master"], strict=True)
    with start(training, threads=1) as running:
        inputs, labels = running.inputs
        running.step({inputs: to_array(x), labels: np.zeros(8, np.int64)})
        assert running.state()["step"] == 2


# ---- runs of PyTorch -------------------------------------------------------------------------------------------------


def masters(make: Callable[[dict[str, Any]], Any], clip: float | None = None) -> Callable[[Any], Any]:
    """An optimizer of copies; `make` makes the one inside."""

    def made(module: Any) -> Any:
        parameters = dict(module.named_parameters())
        copies = float32_copies(parameters)
        found = MasterWeights(make(copies), parameters, copies)
        if clip is not None:
            found.inner.register_step_pre_hook(ClipHook({"norm": clip, "variant": "torch"}))
        return found

    return made


def in_groups(copies: dict[str, Any]) -> list[dict[str, Any]]:
    weights = [x for name, x in copies.items() if name.endswith("weight")]
    biases = [x for name, x in copies.items() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases}]


RUNS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "masters": masters(lambda copies: torch.optim.AdamW(copies.values(), lr=1e-2)),
    "masters in groups": masters(lambda copies: torch.optim.SGD(in_groups(copies), lr=0.1, momentum=0.9), clip=0.5),
}


@pytest.mark.slow("masters in groups")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("adamw", "sgd", "masters"))) for kind in RUNS]
)
def test_a_run_goes_on_bit_by_bit_there_and_back(kind: str, tmp_path: Path) -> None:
    module, given = network().bfloat16(), list(batches(torch.bfloat16))
    made = RUNS[kind](module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    losses_of(module, made, given[:5], scheduler)
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": made, "scheduler": scheduler}
    training = from_torch(module, given[0][0], **settings)
    carried, program = to_torch(training, probe=False), to_torch(training, live=False, probe=False)
    expected = losses_of(module, made, given[5:], scheduler)
    with start(training, engine="torch", compile=False) as running:
        inputs, labels = running.inputs
        steps = (running.step({inputs: to_array(x), labels: y.numpy()}) for x, y in given[5:])
        assert [float(step[running.loss]) for step in steps] == expected
        state = running.state()
    for other in (carried, program):
        assert losses_of(other.module, other.optimizer, given[5:], other.scheduler) == expected
        for (key, theirs), ours in zip(module.named_parameters(), other.module.parameters(), strict=True):
            assert torch.equal(theirs, ours), key
            for slot, tensor in made.state[theirs].items():
                assert torch.equal(tensor, other.optimizer.state[ours][slot]), (key, slot)
    for name, parameter in module.named_parameters():
        np.testing.assert_array_equal(state[name], to_array(parameter), strict=True)
        for slot, tensor in made.state[parameter].items():
            if tensor.ndim:  # what is in float32 is computed in another order
                wanted, exact = to_array(tensor), tensor.dtype == torch.bfloat16
                np.testing.assert_allclose(
                    state[f"{name}/{slot}"].astype("f"), wanted.astype("f"), rtol=0 if exact else 1e-3, atol=1e-7
                )


def test_a_file_of_copies_fills_its_training_model_again(tmp_path: Path) -> None:
    module, given = network().bfloat16(), list(batches(torch.bfloat16, 3))
    made = RUNS["masters"](module)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": made, "scheduler": scheduler, "probe": False}
    like = from_torch(module, given[0][0], **settings)
    losses_of(module, made, given, scheduler)
    path = tmp_path / "run.pt"
    torch.save(
        {"module": module.state_dict(), "optimizer": made.state_dict(), "scheduler": scheduler.state_dict()}, path
    )
    restored, expected = program.restore(path, like), from_torch(module, given[0][0], **settings)
    for state in states(expected):
        np.testing.assert_array_equal(restored.array(state.name), state.array, state.name, strict=True)


def test_copies_of_a_run_are_masters_that_round_to_its_weights() -> None:
    """What readers of checkpoints hand in: weights of 16 bits, their copies, and slots."""
    module = network().bfloat16()
    generator = np.random.default_rng(0)
    own = {name: to_array(x).copy() for name, x in module.named_parameters()}
    copies = {
        name: (x.astype("f") * (1 + 1e-3 * generator.normal(size=x.shape))).astype("f") for name, x in own.items()
    }
    slots = {
        slot: {n: generator.random(x.shape).astype("f") for n, x in own.items()} for slot in ("exp_avg", "exp_avg_sq")
    }
    model = capture_module(module, next(batches(torch.bfloat16))[0])
    for name, master in copies.items():
        model.set(name, master.astype(BFLOAT16))
    state = {f"{name}/master": master for name, master in copies.items()}
    state |= {f"{name}/{slot}": array for slot, arrays in slots.items() for name, array in arrays.items()}
    group = ParameterGroup(Spec("adamw", {"lr": 1e-2, "variant": "torch"}), list(own))
    training = to_training_model(
        RunState(model, "cross_entropy", [group], state, step=7, recipe={"master_weights": True})
    )
    for name, master in copies.items():
        np.testing.assert_array_equal(training.array(f"{name}/master"), master, strict=True)
        np.testing.assert_array_equal(training.array(name), master.astype(BFLOAT16), strict=True)
    carried = to_torch(training)
    given = list(batches(torch.bfloat16, 3))
    with start(training, engine="torch", compile=False) as running:
        inputs, labels = running.inputs
        for x, y in given:
            running.step({inputs: to_array(x), labels: y.numpy()})
        after = running.state()
    parameters = dict(carried.module.named_parameters())
    losses_of(carried.module, carried.optimizer, given)
    for name, parameter in parameters.items():
        master = carried.optimizer.state[parameter]["master"].numpy()
        np.testing.assert_allclose(after[f"{name}/master"], master, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(after[name], after[f"{name}/master"].astype(BFLOAT16), strict=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adafactor(p), "Adafactor rounds differently"),
        (lambda p: torch.optim.SGD(p, fused=True, momentum=0.9), "fused kernel of SGD"),
        (lambda p: torch.optim.SGD(p, foreach=True), "differently with `foreach=True`"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "differently with `capturable=True`"),
        (lambda p: torch.optim.Rprop(p), "a trace does not round"),
    ],
)
def test_what_rounds_in_its_own_way_is_refused(make: Callable[[Any], Any], message: str) -> None:
    parameters = dict(network().bfloat16().named_parameters())
    with pytest.raises(UnsupportedError, match=message):
        read_optimizer(make(parameters.values()), {id(x): name for name, x in parameters.items()})


def test_updates_of_other_frameworks_in_16_bits_are_no_classes_of_pytorch() -> None:
    model = capture_module(network().bfloat16(), next(batches(torch.bfloat16))[0])
    training = onward.prepare(model, loss="cross_entropy", optimizer="adamw:variant=keras", master_weights=False)
    with pytest.raises(UnsupportedError, match=r"`adamw` rounds .* unlike any class of PyTorch"):
        to_torch(training)


@needs("keras")
def test_keras_keeps_copies_and_optax_refuses_them() -> None:
    model = capture_module(network().bfloat16(), next(batches(torch.bfloat16))[0])
    training = onward.prepare(model, loss="cross_entropy", optimizer="adamw:variant=keras")
    held = onward.to_keras(training).optimizer.state()
    assert held["0.weight/master"].dtype == np.float32
    with pytest.raises(UnsupportedError, match=r"0\.weight/master"):
        onward.to_jax(training)
    rounded = onward.prepare(model, loss="cross_entropy", optimizer="adamw", master_weights=False)
    with pytest.raises(UnsupportedError, match="as PyTorch rounds them"):
        onward.to_jax(rounded)


def test_copies_of_ones_own_need_a_name() -> None:
    module = network().bfloat16()
    copies = [nn.Parameter(x.detach().float()) for x in module.parameters()]
    with pytest.raises(UnsupportedError, match="that the module does not have") as caught:
        from_torch(
            module, next(batches(torch.bfloat16))[0], loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW(copies)
        )
    assert "MasterWeights" in (caught.value.hint or "")
    with pytest.raises(UnsupportedError, match="loop clips 16-bit gradients"):
        made = RUNS["masters"](module)
        from_torch(module, next(batches(torch.bfloat16))[0], loss=nn.CrossEntropyLoss(), optimizer=made, clip=1.0)


# ---- autocast --------------------------------------------------------------------------------------------------------


class Inside(nn.Module):  # type: ignore[misc]
    """A module that says itself what is computed in 16 bits."""

    def __init__(self, dtype: Any):
        super().__init__()
        self.inner, self.dtype = network(), dtype

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_what_is_read_under_autocast_trains_under_autocast(dtype: Any) -> None:
    """Parameters stay in float32, products are computed in 16 bits, and the loss is in float32 again."""
    module, given = network(), list(batches(torch.float32))
    made = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses_of(module, made, given[:5], autocast=dtype)
    with torch.autocast("cpu", dtype=dtype):
        training = from_torch(module, given[0][0], loss=nn.CrossEntropyLoss(), optimizer=made)
    plain = from_torch(module, given[0][0], loss=nn.CrossEntropyLoss(), optimizer=made, probe=False)
    onnx.checker.check_model(training.to_proto(), full_check=True)
    products = {node.outputs[0].dtype for node in training.graph if node.op_type == "Gemm"}
    assert products == {CODES[dtype]}
    assert {value.dtype for value in training.graph.initializers.values()} == {CODES[torch.float32]}
    expected = losses_of(module, made, given[5:], autocast=dtype)
    for engine in ("torch", "onnxruntime"):
        options = {"compile": False} if engine == "torch" else {}
        losses = {}
        for name, model in (("carried", training), ("plain", plain)):
            with start(model, engine=engine, **options) as running:
                inputs, labels = running.inputs
                steps = (running.step({inputs: x.numpy(), labels: y.numpy()}) for x, y in given[5:])
                losses[name] = [float(step[running.loss]) for step in steps]
        np.testing.assert_allclose(losses["carried"], expected, atol=1e-3)
        if engine == "torch" or dtype == torch.bfloat16:  # ONNX Runtime rounds less often in float16
            assert np.abs(np.subtract(losses["carried"], losses["plain"])).max() > 1e-5


def test_autocast_inside_of_a_module_is_part_of_it() -> None:
    module, (x, y) = Inside(torch.bfloat16), next(batches(torch.float32))
    made = torch.optim.SGD(module.parameters(), lr=0.1)
    training = from_torch(module, x, loss=nn.CrossEntropyLoss(), optimizer=made)
    onnx.checker.check_model(training.to_proto(), full_check=True)
    with start(training, engine="torch", compile=False) as running:
        inputs, labels = running.inputs
        loss = running.step({inputs: x.numpy(), labels: y.numpy()})[running.loss]
    assert loss.dtype == BFLOAT16
    assert float(loss) == float(nn.functional.cross_entropy(module(x), y).detach())
