"""Models of Hugging Face, trained by PyTorch for five steps, go on elsewhere, and as modules again."""

import numpy as np
import pytest
from marks import needs

from onward.engines import start

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch_transformers import MODELS, SIZES, begun, built, labelled, steps  # noqa: E402

import onward  # noqa: E402
from onward.errors import UnsupportedError  # noqa: E402

pytestmark = [needs("torch", "transformers", "onnxscript"), pytest.mark.usefixtures("one_torch_thread")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_torch(name):
    run = begun(name)
    back = onward.to_torch(run.training)
    found = back.module.state_dict()
    assert list(found) == list(run.state)
    assert all(torch.equal(found[key], tensor) for key, tensor in run.state.items())
    loss = (lambda y, _: back.loss(y)) if "labels" in run.batches[0][0] else back.loss
    losses = steps(back.module, back.optimizer, back.scheduler, loss, run.batches)
    np.testing.assert_allclose(losses, run.losses, rtol=1e-5)


def on_onnxruntime(training, batches):
    with start(training, threads=1) as engine:
        return [float(engine.step(batch)[engine.loss]) for batch in batches]


def in_jax(training, batches, **options):
    import jax

    step, state = onward.to_jax(training, **options)[:2]
    step, losses = jax.jit(step), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def in_tensorflow(training, batches):
    module = onward.to_tensorflow(training)
    return [float(module.train_step(**batch)["loss"]) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "target",
    [on_onnxruntime, pytest.param(in_jax, marks=needs("jax")), pytest.param(in_tensorflow, marks=needs("tensorflow"))],
)
def test_elsewhere(name, target):
    run = begun(name)
    np.testing.assert_allclose(target(run.training, run.arrays()), run.losses, rtol=1e-5)


@pytest.mark.slow
@needs("jax")
def test_a_small_one_in_jax():
    """What the slow tests do, at the price of one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}, vocab_size=23)
    module = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 4, 40)
    batches = [(labelled(4), None) for _ in range(10)]
    steps(module, optimizer, scheduler, lambda y, _: y.loss, batches[:5])
    given = {"loss": "loss", "optimizer": optimizer, "scheduler": scheduler, "probe": False}
    training = onward.from_torch(module, batches[0][0], **given)
    losses = steps(module, optimizer, scheduler, lambda y, _: y.loss, batches[5:])
    arrays = [{key: x.numpy() for key, x in inputs.items()} for inputs, _ in batches[5:]]
    np.testing.assert_allclose(in_jax(training, arrays, probe=False), losses, rtol=1e-5)


@pytest.mark.slow
def test_layers_that_are_left_out_at_random():
    kind, options, inputs = MODELS["whisper"]
    module = built(kind, options)
    module.model.encoder.layerdrop, module.config.apply_spec_augment = 0.5, True
    given = {"loss": "loss", "optimizer": torch.optim.AdamW(module.parameters())}
    with pytest.raises(UnsupportedError, match=r"`model.encoder` drops layers at random \(layerdrop=0.5\)"):
        onward.from_torch(module, inputs(4), **given)
    module.model.encoder.layerdrop = 0.0
    with pytest.raises(UnsupportedError, match=r"draws random numbers by `numpy.random`"):
        onward.from_torch(module, inputs(4), **given)
