"""Training on any engine, and comparing it with that on ONNX Runtime."""

import numpy as np

from onward.engines import start

STEPS = 20
MODES = {
    "compiled": {},
    "eager": {"compile": False},
    "compiled, rules": {"rules": True},
    "eager, rules": {"compile": False, "rules": True},
}


def trained(model, batches, engine="onnxruntime", **options):
    """The losses of all steps, and the state after them."""
    with start(model, engine=engine, **options) as loaded:
        losses = [float(loaded.step(batch)[loaded.loss]) for batch in batches]
        return losses, loaded.state()


def assert_trains_alike(model, batches, idle=(), tolerance=1e-5, *, engine, **options):
    """Losses, and state by its largest element."""
    losses, state = trained(model, batches, threads=1)
    found, found_state = trained(model, batches, engine=engine, **options)
    np.testing.assert_allclose(found, losses, rtol=tolerance, atol=1e-6)
    assert found_state.keys() == state.keys()
    for name, expected in state.items():
        assert found_state[name].dtype == expected.dtype, name
        if not any(part in name for part in idle):
            scale = np.abs(expected.astype(np.float64)).max(initial=0)
            np.testing.assert_allclose(found_state[name], expected, rtol=0, atol=10 * tolerance * scale, err_msg=name)
