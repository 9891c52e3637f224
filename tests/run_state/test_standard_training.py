"""Whole training models of the standard's own operators, for some steps on each engine, against others."""

import functools

import numpy as np
import pytest
from marks import needs
from standard_training import CASES, batches, expected, training_model

import onward
from onward.engines import ENGINES, start

pytestmark = needs("torch")
oracle = functools.cache(lambda name: expected(CASES[name]))


@pytest.mark.slow("Gradient, twice-jax", "Gradient-jax")
@pytest.mark.parametrize("engine", [pytest.param(name, marks=needs(name)) for name in ENGINES])
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_the_standard_trains(name, engine):
    model = training_model(CASES[name])
    losses, state = oracle(name)
    with start(model, engine=engine, compile=False) as run:
        found = [run.step(batch)["loss"].item() for batch in batches()]
        after = run.state()
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for key, array in after.items():
        np.testing.assert_allclose(array, state[key], rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_such_a_model_is_valid(name):
    assert not [str(finding) for finding in onward.check(training_model(CASES[name])) if finding.severity == "error"]
