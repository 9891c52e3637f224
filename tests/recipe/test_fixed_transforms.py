"""Fixed transforms are recognised by their numbers, made by libraries that nobody here wrote, and nothing else is."""

import numpy as np
import pytest
from onnx import numpy_helper, parser
from scipy import fft, signal

import onward

RNG = np.random.default_rng(0)


def stft_basis(size=256, window="hann"):
    """Cosines and sines, as exporters store them for a Conv."""
    basis = np.fft.fft(np.eye(size))[: size // 2 + 1] * signal.get_window(window, size)
    return np.concatenate([basis.real, basis.imag])[:, None].astype("f")


def filter_bank(bins=129, bands=24):
    """Triangles on the mel scale, by interpolation."""
    mel = np.linspace(0, 2595 * np.log10(1 + 8000 / 700), bands + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    grid = np.linspace(0, 8000, bins)
    return np.stack([np.interp(grid, edges[i : i + 3], [0, 1, 0]) for i in range(bands)], axis=1).astype("f")


def positions(length=40, width=16):
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width).astype("f")


def grid(size=12):
    return np.stack(np.meshgrid(np.arange(size), np.arange(size))).reshape(1, 2, -1).astype("f") + np.float32(0.5)


def roles(operator, shape, array):
    """Train a model with the tensor in an operator, and return what was decided about it."""
    proto = parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[{shape}] x) => (float[n] y) {{
      h = {operator}(x, fixed)  e = Exp(h)  s = Mul(e, free)  y = ReduceMean <keepdims = 0> (s)
    }}""")
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array, np.float32), "fixed"))
    proto.graph.initializer.append(numpy_helper.from_array(np.float32([0.5, 0.7]).reshape(2, 1, 1, 1), "free"))
    selection = onward.prepare(proto, loss="mse").step().fact("train.selection")
    return {name: reason for reasons in selection.values() for reason, names in reasons.items() for name in names}


@pytest.mark.parametrize(
    ("operator", "shape", "array", "kind"),
    [
        ("Conv", "n,1,t", stft_basis(), "STFT"),
        ("Conv", "n,1,t", stft_basis(window="hamming")[:129], "STFT"),
        ("Conv", "n,1,t", stft_basis(window="boxcar"), "STFT"),
        ("MatMul", "n,64", fft.dct(np.eye(64))[:, :20], "STFT"),
        ("MatMul", "n,129", filter_bank(), "mel"),
        ("Mul", "n,400", signal.get_window("hann", 400), "window"),
        ("Add", "n,40,16", positions(), "positions"),
        ("Add", "n,2,144", grid(), "anchors"),
    ],
)
def test_recognized(operator, shape, array, kind):
    decided = roles(operator, shape, array)
    assert decided["fixed"].startswith("a fixed transform: ")
    assert kind in decided["fixed"]
    assert "fixed transform" not in decided["free"]


@pytest.mark.parametrize(
    ("operator", "shape", "array"),
    [
        ("Conv", "n,1,t", RNG.standard_normal((64, 1, 64))),
        ("Conv", "n,1,t", stft_basis()[RNG.permutation(258)]),
        ("Conv", "n,1,t", stft_basis() + 0.1 * RNG.standard_normal((258, 1, 256))),
        ("MatMul", "n,64", np.linalg.qr(RNG.standard_normal((64, 64)))[0]),
        ("MatMul", "n,64", np.eye(64)),
        ("MatMul", "n,129", np.maximum(RNG.standard_normal((129, 24)), 0)),
        ("Mul", "n,400", RNG.uniform(0, 1, 400)),
        ("Mul", "n,400", np.ones(400)),
        ("Add", "n,40,16", 0.02 * RNG.standard_normal((40, 16))),
        ("Add", "n,2,144", np.zeros((1, 2, 144))),
    ],
)
def test_not_recognized(operator, shape, array):
    assert "fixed transform" not in roles(operator, shape, array)["fixed"]


def test_the_run_says_so_and_patterns_name_them():
    shape = "n,1,t"
    assert "fixed transform" in roles("Conv", shape, stft_basis())["fixed"]
    proto = parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]>
    g (float[n,256] x) => (float[n,258] y) { h = MatMul(x, basis)  y = Mul(h, gain) }""")
    proto.graph.initializer.append(numpy_helper.from_array(stft_basis()[:, 0].T.copy(), "basis"))
    proto.graph.initializer.append(numpy_helper.from_array(np.linspace(0.5, 1.7, 258, dtype="f"), "gain"))
    training = onward.prepare(proto, loss="mse")
    assert training.step().differentiated() == ["gain"]
    assert any("left out as fixed: `basis` (a basis of sinusoids" in note for note in onward.describe(training).remarks)
    assert onward.prepare(proto, loss="mse", trainable="basis").step().differentiated() == ["basis"]
