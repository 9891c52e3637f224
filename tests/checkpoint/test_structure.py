"""`match="structure"`: weights between two graphs whose names do not fit, compared with stock ONNX Runtime."""

import functools
import itertools

import numpy as np
import onnxruntime
import pytest
import structure_pairs as pairs
from marks import needs

import onward
from onward.errors import Error, MismatchError, UnsupportedError
from onward.importing import plan_import

pytestmark = needs("torch", "keras", "jax", "flax", "timm", "transformers")


@functools.cache
def made(name):
    return getattr(pairs, name)()


def save(tmp_path, *models):
    paths = [str(tmp_path / name) for name in ("other.onnx", "model.onnx")]
    for model, path in zip(models, paths, strict=True):
        model.save(path)
    return paths


def outputs(path, inputs):
    session = onnxruntime.InferenceSession(path)
    declared = session.get_inputs()
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}
    feeds = {}
    for value, array in zip(declared, inputs, strict=True):
        last = value.shape[-1] if len(value.shape) == 4 else None
        feeds[value.name] = (np.moveaxis(array, 1, 3) if last == 3 else array).astype(types[value.type])
    results = session.run(None, feeds)
    return [np.moveaxis(x, 3, 1) if x.ndim == 4 and x.shape[-1] == 2 else x for x in results]


def examples(path):
    """Return random inputs with channels first."""
    rng = np.random.default_rng(1)
    for value in onnxruntime.InferenceSession(path).get_inputs():
        shape = [size if isinstance(size, int) else 2 for size in value.shape]
        if len(shape) == 4:
            yield (
                rng.standard_normal(shape).astype(np.float32).transpose(0, *((1, 2, 3) if shape[1] == 3 else (3, 1, 2)))
            )
        else:
            yield np.ones(shape) if "mask" in value.name else rng.integers(0, 2, shape)


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
@pytest.mark.parametrize(
    "name",
    [
        "lstm_tagger",
        "vit",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("cnn", "unet", "resnet", "mobilenet", "efficientnet", "mixer", "bert", "gpt2", "t5")
        ),
    ],
)
def test_outputs_are_equal(name, back, tmp_path):
    source, like = save(tmp_path, *made(name)[:: -1 if back else 1])
    moved = str(tmp_path / "moved.onnx")
    onward.from_checkpoint(source, like, match="structure").save(moved)
    inputs = list(examples(source))
    for expected, actual in zip(outputs(source, inputs), outputs(moved, inputs), strict=False):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert {value.name for value in onward.load(moved).outputs} == {value.name for value in onward.load(like).outputs}


def linear(epsilon=1e-5, activation="ReLU", depth=2):
    """Return a small module of PyTorch as a graph, and one of other names that may differ."""
    from torch import nn

    def module(epsilon, activation, depth):
        blocks = [[nn.Linear(8, 8), nn.LayerNorm(8, epsilon), getattr(nn, activation)()] for _ in range(depth)]
        return nn.Sequential(*itertools.chain(*blocks), nn.Linear(8, 3))

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = module(epsilon, activation, depth)

        def forward(self, features):
            return self.layers(features)

    examples = pairs.zeros(4, 8)
    return pairs.of_torch(module(1e-5, "ReLU", 2), examples), pairs.of_torch(Renamed(), examples)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"epsilon": 1e-6}, "compute different functions"),
        ({"activation": "GELU"}, "compute different functions"),
        ({"depth": 3}, r"weights of \[8, 8\]: 2 in `other.onnx`, 3 in `model.onnx`"),
    ],
    ids=["epsilon", "activation", "layers"],
)
def test_wrong_pairs_are_refused(change, problem, tmp_path):
    source, like = save(tmp_path, *linear(**change))
    with pytest.raises((MismatchError, UnsupportedError), match=problem):
        onward.from_checkpoint(source, like, match="structure")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, change",
    [
        ("vit", {"epsilon": 1e-5}),
        ("vit", {"depth": 3}),
        ("unet", {"activation": "elu"}),
        ("gpt2", {"activation": "gelu"}),
    ],
)
def test_wrong_architectures_are_refused(name, change, tmp_path):
    source, like = save(tmp_path, *getattr(pairs, name)(**change))
    with pytest.raises(Error):
        onward.from_checkpoint(source, like, match="structure")


def steps(training, batches):
    with onward.engines.start(training, threads=1) as engine:
        losses = [float(engine.step(dict(zip(engine.inputs, batch, strict=True)))[engine.loss]) for batch in batches]
        for name, array in engine.state().items():
            training.set(name, array)
    return losses


def test_the_optimizer_moves(tmp_path):
    source, like = save(tmp_path, *linear())
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4, 8)).astype(np.float32), rng.integers(0, 3, 4)) for _ in range(6)]
    training = onward.prepare(source, loss="cross_entropy", optimizer="sgd:lr=0.1,momentum=0.9")
    steps(training, batches[:3])
    training.save(tmp_path / "run.onnx")
    moved = onward.from_checkpoint(tmp_path / "run.onnx", like, match="structure")
    np.testing.assert_allclose(steps(moved, batches[3:]), steps(training, batches[3:]), rtol=1e-5)


def test_a_module_is_the_graph_of_a_state_dict(tmp_path):
    import torch
    from torch import nn

    module = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    like = tmp_path / "model.onnx"
    other = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    torch.onnx.export(other, pairs.zeros(2, 8), like, input_names=["features"], dynamo=True, verbose=False)
    renamed = onward.load(like)
    names = {name: f"w{i}" for i, name in enumerate(renamed.graph.initializers) if "." in name}
    onward.transform.rename(renamed, names).save(like)
    moved = onward.from_checkpoint(
        tmp_path / "weights.pt", like, match="structure", module=module, example_inputs=pairs.zeros(2, 8)
    )
    moved.save(tmp_path / "moved.onnx")
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    np.testing.assert_allclose(
        outputs(str(tmp_path / "moved.onnx"), [x])[0], module(torch.tensor(x)).detach(), rtol=1e-4, atol=1e-6
    )


def test_shapes_alone(tmp_path):
    import torch
    from torch import nn

    like = tmp_path / "model.onnx"
    torch.onnx.export(nn.Linear(8, 3), pairs.zeros(2, 8), like, dynamo=True, verbose=False)
    bag = {"matrix": torch.randn(3, 8), "offset": torch.randn(3)}
    torch.save(bag, tmp_path / "bag.pt")
    plan = plan_import(tmp_path / "bag.pt", like, match="structure")
    assert plan.notes == ("2 tensors are matched by shapes that occur once; outputs could not be compared",)
    moved = onward.from_checkpoint(tmp_path / "bag.pt", like, match="structure")
    assert moved.initializer("weight").const_value.numpy()[0, 1] == bag["matrix"][0, 1]
    torch.save({"a": torch.randn(3, 8), "b": torch.randn(3), "c": torch.randn(3)}, tmp_path / "bag.pt")
    with pytest.raises(UnsupportedError, match="do not tell `b`, `c` from others for `bias`"):
        onward.from_checkpoint(tmp_path / "bag.pt", like, match="structure")


@pytest.mark.slow
def test_a_configuration_is_the_graph_of_a_checkpoint(tmp_path):
    """The graph of a folder of transformers has the inputs of the example, and becomes that of a Keras model."""
    import torch
    from transformers import BertForSequenceClassification

    module = BertForSequenceClassification(pairs.bert_config())
    module.save_pretrained(tmp_path / "saved")
    made("bert")[1].save(tmp_path / "model.onnx")
    names = ("input_ids", "attention_mask", "token_type_ids")
    batch = {name: torch.ones(2, 6, dtype=torch.long) for name in names}
    moved = onward.from_checkpoint(tmp_path / "saved", tmp_path / "model.onnx", match="structure", example_inputs=batch)
    moved.save(tmp_path / "moved.onnx")
    expected = module.eval()(**batch).logits.detach().numpy()
    actual = outputs(str(tmp_path / "moved.onnx"), [x.numpy() for x in batch.values()])[0]
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    with pytest.raises(MismatchError, match="the inputs of `saved` are `input_ids`, `attention_mask`, and those"):
        onward.from_checkpoint(tmp_path / "saved", tmp_path / "model.onnx", match="structure")
