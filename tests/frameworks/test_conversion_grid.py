"""The grid of docs/frameworks/grid.md: nothing is missing in it, and what it says is so."""

import conversion_grid
import pytest
from grid import recipes
from grid.record import FRAMEWORKS, Cell, recorded
from grid.side import KINDS, name_of
from marks import needs

pytestmark = [needs(name) for name in ("torch", "onnxscript", "tensorflow", "keras", "jax", "optax")]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_of_a_recipe_is_there(kind):
    assert {name_of(row) for row in recipes.rows(kind)} == recipes.known(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_everything_of_a_framework_is_there(kind, framework):
    """Also what a new version brings."""
    side = conversion_grid.side(framework)
    assert side.public(kind) <= {name_of(row) for row in side.rows(kind)}


def test_all_cells_were_tried():
    assert list(recorded()) == conversion_grid.cells()


SAMPLE = [
    Cell("optimizers", "from", "torch", "LBFGS()"),
    Cell("optimizers", "from", "keras", "Adam(amsgrad=True, epsilon=1e-3)"),
    Cell("optimizers", "from", "jax", "adamw(eps=1e-3, weight_decay=0.1)"),
    Cell("optimizers", "to", "torch", "adam:eps=1e-3,variant=keras"),
    Cell("optimizers", "to", "keras", "adam:eps=1e-3,variant=torch"),
    Cell("optimizers", "to", "jax", "rmsprop:momentum=0.9,variant=optax"),
    Cell("losses", "from", "torch", "CrossEntropyLoss(label_smoothing=0.1)"),
    Cell("losses", "from", "keras", "LogCosh()"),
    Cell("losses", "from", "tensorflow", "softmax_cross_entropy_with_logits(t, y)"),
    Cell("losses", "to", "torch", "hinge"),
    Cell("losses", "to", "keras", "mse"),
    Cell("schedules", "from", "keras", "InverseTimeDecay(0.1, 4, 0.5)"),
    Cell("schedules", "to", "torch", "exponential:gamma=0.5,every=3"),
    Cell("schedules", "to", "keras", "exponential:gamma=0.5,every=3"),
    Cell("schedules", "to", "tensorflow", "one_cycle:steps=10"),
]


@pytest.mark.slow("optimizers | to | jax | rmsprop:momentum=0.9,variant=optax")
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_sample(cell):
    assert conversion_grid.tried(cell) == recorded()[cell]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in recorded() if cell not in SAMPLE], ids=str)
def test_every_cell(cell):
    assert conversion_grid.tried(cell) == recorded()[cell]
