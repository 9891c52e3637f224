"""Models that people train, out of PyTorch's exporters, through the engine: step by step as PyTorch trains them.

Both start from the same weights and see the same batches, of which every seventh is smaller, as the last one of an
epoch is. A loss may be off by 1e-4 of itself. So may a parameter, a gradient or an output, where the error is the
largest absolute difference over the largest absolute element. Parameters on which no loss depends are left out.
"""

import numpy as np
import onnxruntime as ort
import pytest
from gradcheck import assert_close
from marks import needs
from onnx import numpy_helper
from training_cases import CASES, STEPS, arrays, exported, loop, made, prepared

import onward
from onward.engines import start
from onward.model.state import STEP
from onward.transform.declare import rebatch

pytestmark = [needs("torch"), pytest.mark.usefixtures("one_torch_thread")]


def assert_same_losses(engine, trainer, batches):
    for batch in batches:
        found, expected = float(engine.step(arrays(batch))[engine.loss]), trainer.step(batch)
        assert found == pytest.approx(expected, rel=1e-4)


def assert_same_state(engine, trainer, idle):
    theirs = trainer.state()
    state = {name: x for name, x in engine.state().items() if name in theirs and idle not in name}
    assert_close(state, {name: theirs[name] for name in state}, 1e-4)


def on_plain_onnxruntime(model, batch):
    session = ort.InferenceSession(model.to_proto().SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: arrays(batch)[value.name] for value in session.get_inputs()})[0]


# ---- every model -----------------------------------------------------------------------------------------------------


def _by_the_other_exporter():
    for name in ("mlp", "lenet5", "vit", "bert", "autoencoder", "tied"):
        case = CASES[name]
        how = "dynamo" if case.torchscript else "torchscript"
        yield pytest.param(case._replace(torchscript=not case.torchscript), id=f"{name}, {how}", marks=pytest.mark.slow)


@pytest.mark.slow("autoencoder", "gpt2", "resnet, dynamo", "vit", "while")
@pytest.mark.parametrize("case", [*(pytest.param(c, id=name) for name, c in CASES.items()), *_by_the_other_exporter()])
def test_trains_as_in_pytorch(case):
    subject = made(case)
    proto, trainer, kept = exported(case, subject), loop(case, subject), subject.batch(16)
    with start(prepared(case, subject, proto), threads=1) as engine:
        before = engine.evaluate(arrays(kept))
        gradients = engine.gradients(arrays(kept))
        assert_close(gradients, trainer.gradients(kept, gradients), 1e-4)
        assert_same_losses(engine, trainer, [subject.batch(3 if i % 7 == 6 else 8) for i in range(STEPS)])
        assert_same_state(engine, trainer, case.idle)
        after = engine.evaluate(arrays(kept))
        assert after[engine.loss] < 0.9 * before[engine.loss]
        loss, outputs = trainer.evaluate(kept)
        assert float(after[engine.loss]) == pytest.approx(loss, rel=1e-4)
        output = proto.graph.output[0].name
        assert_close({output: after[output]}, {output: outputs}, 1e-4)
        assert_close(
            {output: on_plain_onnxruntime(onward.transform.strip(engine.updated()), kept)}, {output: outputs}, 1e-4
        )


# ---- what else must hold ---------------------------------------------------------------------------------------------


def test_what_is_frozen_stays_bit_for_bit():
    """Also the statistics of a normalization whose weights are frozen: it stays in inference mode."""
    from torch_models import spread_statistics

    case = CASES["resnet"]
    subject = made(case)
    spread_statistics(subject.net)
    frozen = [name for name in subject.net.state_dict() if name[0] in "014" and "tracked" not in name]
    for name, parameter in subject.net.named_parameters():
        parameter.requires_grad = name not in frozen
    proto, trainer = exported(case, subject), loop(case, subject)
    with start(prepared(case, subject, proto, freeze="[014].*"), threads=1) as engine:
        assert_same_losses(engine, trainer, [subject.batch(8) for _ in range(STEPS)])
        assert_same_state(engine, trainer, case.idle)
        trained = initializers(onward.transform.strip(engine.updated()).to_proto())
    original = initializers(proto)
    assert {name for name in original if np.array_equal(original[name], trained[name])} == set(frozen)


def initializers(proto):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_fresh_layers_that_the_exporter_merged(name):
    """What is equal in a new network is stored once in the file, but belongs to each layer by itself."""
    case = CASES[name]
    subject = made(case, fresh=True)
    proto, trainer = exported(case, subject), loop(case, subject)
    named = {name for name in trainer.state() if "tracked" not in name}
    assert len(named & initializers(proto).keys()) < len(named) - 10
    with start(prepared(case, subject, proto), threads=1) as engine:
        assert_same_losses(engine, trainer, [subject.batch(8) for _ in range(4)])
        assert_same_state(engine, trainer, case.idle)
        assert named <= engine.state().keys()


def test_a_fixed_batch_of_one():
    """Four batches of one, accumulated, are a batch of four."""
    case = CASES["mlp"]
    subject = made(case)
    proto, trainer = exported(case, subject, fixed=1), loop(case, subject)
    with start(prepared(case, subject, proto, accumulate=4), threads=1) as engine:
        for _ in range(STEPS):
            batch = subject.batch(4)
            single = [{name: x[i : i + 1].numpy() for name, x in batch.items()} for i in range(4)]
            losses = [float(engine.step(one)["loss"]) for one in single]
            assert np.mean(losses) == pytest.approx(trainer.step(batch), rel=1e-4)
        assert_same_state(engine, trainer, case.idle)
        with pytest.raises(onward.Error, match=r"`x` has the shape \[4, 12\], not \[1, 12\]"):
            engine.step(arrays(batch))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "gpt2", "lstm", "resnet, dynamo")]


@pytest.mark.slow("autoencoder")
@pytest.mark.parametrize("name", ["lenet5", "autoencoder", *SLOW])
def test_a_fixed_batch_of_one_made_to_take_any(name):
    case = CASES[name]
    subject = made(case)
    model, trainer = rebatch(exported(case, subject, fixed=1)), loop(case, subject)
    with start(prepared(case, subject, model), threads=1) as engine:
        assert_same_losses(engine, trainer, [subject.batch(3 if i % 7 == 6 else 8) for i in range(STEPS)])
        assert_same_state(engine, trainer, case.idle)


def test_a_fixed_batch_of_one_that_must_remain():
    case = CASES["bert"]
    proto = exported(case, made(case), fixed=1)
    with pytest.raises(onward.Error, match="works for batches of 1 only") as caught:
        rebatch(proto)
    assert "`batch_size=1, accumulate=32`" in caught.value.hint


@pytest.mark.slow("128")
@pytest.mark.parametrize("scale", [128, "dynamic"])
def test_float16_with_master_weights(scale):
    """Against PyTorch in float32, which skips the batches whose gradients overflow in float16."""
    case = CASES["mlp"]
    subject = made(case)
    subject.net.half()
    halves = subject._replace(batch=lambda n: {k: x.half() if k == "x" else x for k, x in subject.batch(n).items()})
    proto, kept, updates = exported(case, halves), halves.batch(16), 0
    subject.net.float()
    trainer = loop(case, subject)
    with start(prepared(case, subject, proto, loss_scale=scale), threads=1) as engine:
        before = engine.evaluate(arrays(kept))["loss"]
        for _ in range(STEPS):
            batch = halves.batch(8)
            loss = float(engine.step(arrays(batch))["loss"])
            if engine.state()[STEP] > updates:
                updates += 1
                assert loss == pytest.approx(trainer.step(batch | {"x": batch["x"].float()}), rel=2e-3)
        assert updates == STEPS if scale == 128 else STEPS - 5 <= updates < STEPS
        assert engine.evaluate(arrays(kept))["loss"] < 0.9 * before
        state = engine.state()
    masters = {name: state[f"{name}/master"] for name in trainer.state()}
    assert_close(masters, trainer.state(), 2e-3)
    for name, master in masters.items():
        np.testing.assert_array_equal(master.astype(np.float16), state[name], strict=True)
        assert not np.array_equal(master, state[name].astype(np.float32))
