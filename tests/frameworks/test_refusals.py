"""What cannot be carried over is refused in one message that names all of it, and says what to do."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from marks import needs

import onward
from onward.errors import DataError, RecipeError, UnsupportedError


def refused(call, kind, *parts, hint):
    """The error of a call, which has all these parts in its message, and one in its hint."""
    with pytest.raises(kind) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    assert re.search(hint, caught.value.hint), caught.value.hint


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def torch():
    return pytest.importorskip("torch")


def from_torch(module, example=None, *, loss=None, optimizer=None, **options):
    t = torch()
    given = optimizer or t.optim.SGD(module.parameters(), lr=0.1)
    x = t.randn(4, 5) if example is None else example
    return lambda: onward.from_torch(module, x, loss=loss or t.nn.MSELoss(), optimizer=given, **options)


def of_forward(compute, layer=None):
    """A module with one layer, and a forward pass of its own."""
    nn = torch().nn

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer or nn.Linear(5, 3)

        def forward(self, x):
            return compute(self.layer, x)

    return Module()


@needs("torch", "onnxscript")
@pytest.mark.usefixtures("one_torch_thread")
class TestTorch:
    def test_decisions_by_values(self):
        """The example decides, which the probe compares, and a warning says where."""
        module = of_forward(lambda layer, x: layer(x) if x.sum() > 0 else layer(-x) * 2)
        for example in (torch().rand(4, 5), -torch().rand(4, 5)):
            with pytest.warns(UserWarning, match=r"branches on values of tensors \(.*test_refusals.py, line \d+\)"):
                from_torch(module, example)()

    @pytest.mark.parametrize("folder", ["onward", "torch", "onward/torch"])
    def test_decisions_in_a_folder_of_any_name(self, folder, tmp_path):
        """A place is the user's by where our package is installed, and not by what a folder is called."""
        path = tmp_path / folder / "net.py"
        path.parent.mkdir(parents=True)
        path.write_text("def compute(layer, x):\n    return layer(x) if x.sum() > 0 else layer(-x)\n")
        names = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        module = of_forward(names["compute"])
        with pytest.warns(UserWarning, match=re.escape(f"({path}, line 2)")):
            from_torch(module)()

    def test_derivatives_of_their_own(self):
        """Gradients that are clipped in `backward`, and that it computes outside of PyTorch."""
        t = torch()

        class Clipped(t.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, slope):
                return slope.clamp(-1, 1)

        class Outside(Clipped):
            @staticmethod
            def backward(ctx, slope):
                return t.from_numpy(slope.numpy())

        refused(
            from_torch(of_forward(lambda layer, x: Clipped.apply(layer(x)))), UnsupportedError, "not linear",
            hint="training loop",
        )  # fmt: skip
        refused(
            from_torch(of_forward(lambda layer, x: Outside.apply(layer(x)))), UnsupportedError, "`Outside`",
            "test_refusals.py, line", hint="detach",
        )  # fmt: skip

    def test_operators_that_onnx_lacks(self):
        module = of_forward(lambda layer, x: layer(torch().linalg.pinv(x).mT))
        refused(from_torch(module), UnsupportedError, "ONNX has no operators for `aten.linalg", hint="as an input")

    def test_numbers_that_python_draws(self):
        module = of_forward(lambda layer, x: layer(x) if random.random() < 2 else x)
        refused(from_torch(module), UnsupportedError, "draws random numbers from `random`", hint="dropout")

    def test_other_random_numbers(self):
        module = of_forward(lambda layer, x: layer(x[:, torch().multinomial(torch().ones(5), 5)]))
        refused(from_torch(module), UnsupportedError, "draws random numbers by `multinomial`", hint="argsort")

    def test_layers(self):
        nn = torch().nn
        with pytest.warns(DeprecationWarning):
            quantized = torch().ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(5, 3)))
        module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, max_norm=1.0), quantized)
        module.add_module("norm", nn.BatchNorm1d(3, momentum=None))
        module.register_buffer("small", torch().zeros(2, dtype=torch().float8_e4m3fn))
        refused(
            from_torch(module), UnsupportedError,
            "`0` has sparse=True", "`1` has max_norm=1.0", "`2.0` is quantized", "`norm.running_mean`", "`small` is",
            hint="without.*original|original.*without",
        )  # fmt: skip

    def test_several_parts_at_once(self):
        """Of the module, the scheduler and the optimizer."""
        t = torch()
        module = t.nn.Sequential(t.nn.Embedding(5, 3, sparse=True))
        optimizer = t.optim.SparseAdam(module.parameters())
        scheduler = t.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        call = from_torch(module, loss=lambda y, target: y.sum(), optimizer=optimizer, scheduler=scheduler)
        parts = "sparse=True", "ReduceLROnPlateau", "no sparse gradients"
        refused(call, UnsupportedError, *parts, hint=r"create the embedding without.*use Adam")

    def test_optimizers(self):
        module = torch().nn.Linear(5, 3)
        optimizer = torch().optim.LBFGS(module.parameters())
        refused(from_torch(module, optimizer=optimizer), UnsupportedError, "LBFGS", "several times", hint="optimizer")

    def test_examples(self):
        module = torch().nn.Linear(5, 3)
        refused(
            from_torch(module, torch().randn(4, 6)), DataError, "cannot be multiplied", hint=r"`input` float32\[4, 6\]"
        )
        refused(
            from_torch(module, {"images": torch().ones(4, 5)}), DataError, "missing a required", hint="mapping of input"
        )
        refused(from_torch(module, ()), DataError, "missing a required", hint="mapping of input")
        elsewhere = torch().ones(4, 5, device="meta")
        refused(from_torch(module, elsewhere), DataError, "on cpu", "`input` is on meta", hint="one device")

    def test_examples_of_targets(self):
        nn = torch().nn
        module, y = nn.Linear(5, 3), torch().rand(4, 3)
        two = {"loss": [nn.MSELoss(), nn.L1Loss()], "example_targets": [y]}
        refused(from_torch(module, **two), DataError, "2 losses, but targets for 1", hint="for each")
        one = {"loss": {"output": nn.MSELoss()}, "example_targets": y}
        refused(from_torch(module, **one), DataError, "do not fit the loss", hint="of output")

    def test_what_is_kept(self):
        """It is computed once, and not by each forward pass."""
        layer = torch().nn.Linear(5, 3)
        layer.doubled = 2 * layer.weight.T
        module = of_forward(lambda layer, x: x @ layer.doubled, layer)
        refused(from_torch(module), UnsupportedError, "`layer.doubled`, which is computed", hint="parametrizations")

    def test_an_optimizer_is_not_guessed(self):
        module = torch().nn.Linear(5, 3)
        call = from_torch(module, optimizer="adam")
        refused(call, UnsupportedError, "`optimizer` is a str, not a PyTorch optimizer", hint="torch.optim")

    def test_modules_inside_of_others(self):
        """They are no reason to refuse."""
        module = torch().nn.Linear(5, 3)
        for around in (torch().compile(module), torch().nn.DataParallel(module)):
            training = from_torch(around, optimizer=torch().optim.SGD(module.parameters(), lr=0.1))()
            assert list(training.graph.initializers) == ["weight", "bias"]


# ---- JAX -------------------------------------------------------------------------------------------------------------


BATCH = {"x": np.ones((4, 5), np.float32), "y": np.zeros(4, np.int64)}


@needs("jax", "optax")
class TestJax:
    @staticmethod
    def loss(params, batch):
        import optax

        scores = batch["x"] @ params["weight"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

    def call(self, function=None, batch=BATCH, optimizer=None, **options):
        import optax

        params = {"weight": np.ones((5, 3), np.float32), "other": np.ones((3, 3), np.float32)}
        given = optimizer or optax.sgd(0.1)
        return lambda: onward.from_jax(function or self.loss, params, batch, optimizer=given, **options)

    def test_decisions_by_values(self):
        call = self.call(lambda params, batch: self.loss(params, batch) if batch["x"].sum() > 0 else 0.0)
        refused(call, UnsupportedError, "values of arrays", hint="jnp.where")

    def test_numbers_that_python_draws(self):
        call = self.call(lambda params, batch: self.loss(params, batch) * np.random.rand())
        refused(call, UnsupportedError, "from `numpy.random`", hint="dropout")

    def test_several_parts_at_once(self):
        import jax
        import optax

        def function(params, batch):
            return self.loss(params, batch) + jax.numpy.linalg.svd(params["other"])[1].sum()

        call = self.call(function, optimizer=optax.lbfgs())
        refused(call, UnsupportedError, "svd", "scale_by_lbfgs", "scale_by_zoom_linesearch", hint="operations of JAX")

    def test_examples(self):
        x, y = BATCH.values()
        refused(self.call(batch={"x": x[:, :4], "y": y}), DataError, "contracting dimensions", hint=r"\(4, 4\)")
        refused(self.call(batch={"x": x}), DataError, "KeyError: 'y'", hint="names")
        refused(self.call(batch=None), DataError, "fails with the example", hint="names")

    def test_optimizers(self):
        import optax

        refused(self.call(optimizer="adam"), UnsupportedError, "'adam' is not an optimizer", hint="optax.adam")
        state = optax.sgd(0.1).init({"weight": np.ones(3)})
        call = self.call(optimizer=optax.adam(0.1), opt_state=state)
        refused(call, DataError, "not a state of this optimizer", hint="optimizer.init")

    def test_nothing_learns(self):
        call = self.call(lambda params, batch: batch["x"].sum())
        refused(call, UnsupportedError, "no parameter", hint="check the loss")


# ---- TensorFlow ------------------------------------------------------------------------------------------------------


@needs("tensorflow")
class TestTensorFlow:
    X = np.ones((4, 5), np.float32)

    def call(self, change, example=X, **options):
        from onward.engines.tensorflow.quiet import tensorflow as tf

        weight = tf.Variable(tf.ones([5, 3]), name="weight")
        recipe = {"loss": "cross_entropy", "optimizer": "sgd", **options}
        return lambda: onward.from_tensorflow(lambda x: change(tf, x @ weight), example, **recipe)

    def test_operations(self):
        def change(tf, y):
            return tf.math.lgamma(y) + tf.linalg.svd(y)[0][:, None]

        refused(self.call(change), UnsupportedError, "Lgamma", "Svd", hint="other operations")

    def test_numbers_that_python_draws(self):
        call = self.call(lambda tf, y: y * random.random())
        refused(call, UnsupportedError, "from `random`", hint="dropout")

    def test_examples(self):
        wrong = {
            "missing a required argument": None,
            "Dimensions must be equal": self.X[:, :4],
            "argument: 'x'": {"image": self.X},
        }
        for message, example in wrong.items():
            refused(self.call(lambda tf, y: y, example), DataError, message, hint="shapes")

    def test_recipes(self):
        call = self.call(lambda tf, y: y, optimizer=object())
        refused(call, RecipeError, "is not a string or a mapping", hint="adamw")
        with pytest.raises(UnsupportedError, match="3 is not a function"):
            onward.from_tensorflow(3, self.X, loss="cross_entropy", optimizer="sgd")


# ---- Keras -----------------------------------------------------------------------------------------------------------


@needs("keras", "tensorflow")
class TestKeras:
    def test_several_parts_at_once(self):
        import keras

        layer = keras.layers.Dense(3, kernel_constraint="non_neg", bias_constraint="non_neg")
        model = keras.Sequential([keras.Input((5,)), layer])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
        parts = "kernel` has a constraint", "bias` has a constraint", "LossScaleOptimizer"
        refused(lambda: onward.from_keras(model), UnsupportedError, *parts, hint="replace what is named")

    def test_steps_without_gradients(self):
        import keras

        class Model(keras.Model):
            def train_step(self, data):
                return {}

        x = keras.Input((5,))
        model = Model(x, keras.layers.Dense(3)(x))
        model.compile("adam", "mse")
        batch = np.ones((4, 5), np.float32), np.ones((4, 3), np.float32)
        call = lambda: onward.from_keras(model, batch[0], example_targets=batch[1])
        refused(call, UnsupportedError, "applies no gradients", hint="GradientTape")
        refused(lambda: onward.from_keras(model), UnsupportedError, "no example is given", hint="example_targets")

    def test_models(self):
        import keras

        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        refused(lambda: onward.from_keras(model), UnsupportedError, "not a compiled", hint="compile")
