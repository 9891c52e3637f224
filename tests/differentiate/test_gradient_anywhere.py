"""`Gradient` and the optimizers of the standard outside training: wherever a node may be."""

import os

import numpy as np
import onnx
import pytest
from marks import needs

import onward
from onward.engines import ENGINES, function, is_installed

SIMPLE = os.path.join(os.path.dirname(onnx.__file__), "backend", "test", "data", "simple")
INSTALLED = [engine for engine in ENGINES if is_installed(engine)]
TRAINING = "ai.onnx.preview.training"
HEAD = f'<ir_version: 10, opset_import: ["": 21, "{TRAINING}": 1, "f": 1]> '
FUNCTION = f'<domain: "f", opset_import: ["": 21, "{TRAINING}": 1, "f": 1]> '


def gradient(xs, y, given=None, zs=()):
    quoted = lambda names: ", ".join(f'"{name}"' for name in names)
    more = f", zs = [{quoted(zs)}]" if zs else ""
    return f'{TRAINING}.Gradient <xs = [{quoted(xs)}], y = "{y}"{more}> ({", ".join(given or (*xs, *zs))})'


def parsed(text, *functions):
    model = onnx.parser.parse_model(HEAD + text + "".join(FUNCTION + one for one in functions))
    for node in model.graph.node:  # the text has no word for an output that is left out
        node.output[:] = ["" if name == "none" else name for name in node.output]
    return model


@pytest.mark.parametrize("name", ["test_gradient_of_add", "test_gradient_of_add_and_mul"])
def test_the_gradient_tests_of_onnx(name):
    model = onnx.load(os.path.join(SIMPLE, name, "model.onnx"))
    stored = lambda kind, i: onnx.numpy_helper.to_array(
        onnx.load_tensor(os.path.join(SIMPLE, name, "test_data_set_0", f"{kind}_{i}.pb"))
    )
    feeds = {value.name: stored("input", i) for i, value in enumerate(model.graph.input)}
    for engine in INSTALLED:
        results = function(model, engine=engine)(feeds)
        for i, value in enumerate(model.graph.output):
            np.testing.assert_array_equal(results[value.name], stored("output", i), err_msg=engine)
            assert results[value.name].dtype == np.float32
    lowered = onward.lower(model).to_proto()
    onnx.checker.check_model(lowered, full_check=True)
    assert [domain.domain for domain in lowered.opset_import] == [""]


# ---- against PyTorch's own derivatives -------------------------------------------------------------------------------

X, Z, N, YES = np.array([1.5, 2.0]), np.array([3.0, -1.0]), np.array(3), np.array(True)
CUBE = f"dcube (a) => (da) {{ s = Mul(a, a) y = Mul(s, a) da = {gradient('a', 'y')} }}"
DESCEND = f"""r = Loop(n, yes, x) <body = b (int64 i, bool go, double[2] s) => (bool again, double[2] t) {{
    again = Identity(go) a = Mul(s, s) y = Mul(a, s) d = {gradient("s", "y")} e = Mul(d, z) t = Sub(s, e) }}>"""
IN_IF = """r = If(yes) <then_branch = t () => (double[2] d) {{ {} }}, else_branch = e () => (double[2] n1) {{
    n1 = Neg(x) }}>"""


def slope(y, *xs):
    """PyTorch's gradients of a sum; each can be differentiated again."""
    import torch

    found = torch.autograd.grad(y.sum(), xs, create_graph=True, materialize_grads=True)
    return found[0] if len(found) == 1 else found


def cut(x):
    return x.detach().requires_grad_()


def descended(x, z):
    for _ in range(int(N)):
        x = x - z * slope(x**3, x)
    return x


def moved(x, rate=0.1):
    """What Adam does of the standard, written out: T counts from 0, where there is no correction."""
    v = h = 0 * x
    alpha, beta, epsilon = (float(np.float32(number)) for number in (0.9, 0.999, 1e-6))
    for t in range(int(N)):
        g = slope(x**2, x)
        v, h = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g**2
        corrected = rate * np.sqrt(1 - beta**t) / (1 - alpha**t) if t else rate
        x = x - corrected * v / (h.sqrt() + epsilon)
    return x


CASES = {
    "an intermediate among xs": (
        f"c = Mul(x, z) y = Mul(c, x) q, r = {gradient('xc', 'y')}",
        lambda x, z: slope(x * (c := cut(x * z)), c),
    ),
    "an intermediate among zs": (
        f"c = Mul(x, z) y = Mul(c, x) r = {gradient('x', 'y', zs='c')}",
        lambda x, z: slope(x * cut(x * z), x),
    ),
    "one of two outputs among zs": (
        f"a, b = Split <num_outputs = 2> (x) y = Mul(a, b) r = {gradient('x', 'y', zs='a')}",
        lambda x, z: slope(x[:1].detach() * x[1:], x),
    ),
    "other values for xs and zs": (
        f"c = Mul(x, x) k = Exp(x) y = Mul(c, k) r = {gradient('x', 'y', 'zx', 'k')}",
        lambda x, z: slope(z * z * x.detach(), z),
    ),
    "an output is left out": (f"y = Mul(x, z) none, r = {gradient('xz', 'y')}", lambda x, z: slope(x * z, z)),
    "y is x": (f"r = {gradient('x', 'x')}", lambda x, z: slope(x, x)),
    "y does not depend on x": (f"y = Mul(z, z) r = {gradient('x', 'y')}", lambda x, z: slope(z * z, x)),
    "third order": (
        f"a = Tanh(x) y = Mul(a, x) d = {gradient('x', 'y')} e = {gradient('x', 'd')} r = {gradient('x', 'e')}",
        lambda x, z: slope(slope(slope(x.tanh() * x, x), x), x),
    ),
    "second order at another point": (
        f"a = Mul(x, x) y = Mul(a, x) s = Exp(x) d = {gradient('x', 'y', 's')} r = {gradient('x', 'd', 'z')}",
        lambda x, z: slope(3 * z.exp() ** 2, z),
    ),
    "through an If at another point": (
        IN_IF.format("d = Mul(x, x)").replace("r =", "y =") + f" r = {gradient('x', 'y', 'z')}",
        lambda x, z: slope(z * z, z),
    ),
    "in a function whose arguments are related": (
        "w = Mul(x, x) r = f.product(x, w)",
        lambda x, z: slope(x * (x * x).detach(), x),
        f"product (a, c) => (da) {{ y = Mul(a, c) da = {gradient('a', 'y')} }}",
    ),
    "in a function that is called twice": ("w = f.dcube(x) r = f.dcube(w)", lambda x, z: 3 * (3 * x**2) ** 2, CUBE),
    "of a function that has one": (f"w = f.dcube(x) r = {gradient('x', 'w')}", lambda x, z: slope(3 * x**2, x), CUBE),
    "in a branch": (
        "w = Mul(x, x) " + IN_IF.format(f"y = Mul(x, w) d = {gradient('x', 'y')}"),
        lambda x, z: slope(x**3, x),
    ),
    "in a branch, at another point": (
        "w = Mul(x, x) " + IN_IF.format(f"y = Mul(x, w) d = {gradient('x', 'y', 'z')}"),
        lambda x, z: slope(z**3, z),
    ),
    "in a branch, of a gradient outside": (
        f"a = Mul(x, x) w = Mul(a, x) o = {gradient('x', 'w')} " + IN_IF.format(f"d = {gradient('x', 'o')}"),
        lambda x, z: slope(slope(x**3, x), x),
    ),
    "of a branch that has one": (
        IN_IF.format(f"a = Mul(x, x) y = Mul(a, x) d = {gradient('x', 'y')}").replace("r =", "w =")
        + f" r = {gradient('x', 'w')}",
        lambda x, z: slope(slope(x**3, x), x),
    ),
    "in the body of a loop": (DESCEND, descended),
    "of a loop that has one": (
        DESCEND.replace("r =", "last =") + f" r = {gradient('z', 'last')}",
        lambda x, z: slope(descended(x, z), z),
    ),
    "in the body of a scan": (
        f"""w, r = Scan <num_scan_inputs = 1, body = b (double[2] s, double[2] k) => (double[2] t, double[2] d) {{
        a = Mul(s, s) y = Mul(a, k) d = {gradient("s", "y")} t = Add(s, d) }}> (x, z2)""",
        lambda x, z: __import__("torch").stack([2 * x * z, 2 * (x + 2 * x * z) * z]),
    ),
    "in a function in a loop": (
        "r = Loop(n, yes, x) <body = b (int64 i, bool go, double[2] s) => (bool again, double[2] t) {"
        "again = Identity(go) e = f.dcube(s) l = Log(e) t = Add(l, s) }>",
        lambda x, z: [x := (3 * x**2).log() + x for _ in range(int(N))][-1],
        CUBE,
    ),
    "with Adam in a loop": (
        f"""zero = Sub(x, x) r, v, h = Loop(n, yes, x, zero, zero) <body = b (int64 i, bool go, double[2] s,
        double[2] v1, double[2] h1) => (bool again, double[2] t, double[2] v2, double[2] h2) {{
        again = Identity(go) y = Mul(s, s) d = {gradient("s", "y")} rate = Constant <value = double {{0.1}}> ()
        t, v2, h2 = {TRAINING}.Adam (rate, i, s, d, v1, h1) }}>""",
        lambda x, z: moved(x),
    ),
}


@needs("torch")
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_torch(case):
    import torch

    text, expected, *functions = CASES[case]
    signature = "g (double[2] x, double[2] z, int64 n, bool yes, double[2, 2] z2) => (double[k] r)"
    signature = signature.replace("k]", "2, 2]") if "Scan" in text else signature
    model = parsed(f"{signature} {{ {text} }}", *functions)
    feeds = {"x": X, "z": Z / 10, "n": N, "yes": YES, "z2": np.stack([Z / 10] * 2)}
    x, z = torch.tensor(X, requires_grad=True), torch.tensor(Z / 10, requires_grad=True)
    wanted = expected(x, z).detach().numpy()
    for engine in INSTALLED:
        found = function(model, engine=engine)(feeds)["r"]
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12, err_msg=engine)
    lowered = onward.lower(model).to_proto()
    onnx.checker.check_model(lowered, full_check=True)
    assert {domain.domain for domain in lowered.opset_import} == {""} and not lowered.functions


# ---- a model that computes forces, and its training ------------------------------------------------------------------

RNG = np.random.default_rng(0)
WEIGHTS = {"w1": RNG.normal(size=(2, 5)), "b1": RNG.normal(size=5), "w2": RNG.normal(size=(5, 1))}
PLACES, FORCES = RNG.normal(size=(2, 8, 2)).astype(np.float32)


def forces(dropout=""):
    """Energy, and force as its slope. Nothing but the name of `energy` says that the force depends on the weights."""
    model = parsed(
        "forces (float[n, 2] x) => (float[n, 1] energy, float[n, 2] force) { a = MatMul(x, w1) b = Add(a, b1) "
        f"c = Tanh(b) {dropout} energy = MatMul(c, w2) slope = {gradient('x', 'energy')} force = Neg(slope) }}"
    )
    stored = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in WEIGHTS.items()]
    model.graph.initializer.extend(stored)
    return model


def torch_forces(x, w1, b1, w2):
    energy = (x @ w1 + b1).tanh() @ w2
    return -slope(energy, x)


@needs("torch")
def test_forces_are_learned_as_torch_learns_them():
    import torch

    model = onward.prepare(forces(), loss={"force": "mse"}, optimizer="sgd:lr=0.1")
    assert {finding.code for finding in onward.check(model)} == {"OW411"}  # the sum of energies is meant
    weights = [torch.tensor(array.astype(np.float32), requires_grad=True) for array in WEIGHTS.values()]
    x, wanted, losses = torch.tensor(PLACES, requires_grad=True), torch.tensor(FORCES), []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(torch_forces(x, *weights), wanted)
        weights = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(weights, slope(loss, *weights), strict=True)]
        losses.append(loss.item())
    batch = {"x": PLACES, "target": FORCES}
    for engine in INSTALLED:
        with onward.engines.start(model, engine=engine, compile=False) as running:
            before = running.evaluate(batch)
            assert list(running.gradients(batch)) == list(WEIGHTS)
            found = [running.step(batch)["loss"] for _ in losses]
            state = running.state()
        np.testing.assert_allclose([before["loss"], *found], [losses[0], *losses], rtol=1e-5, err_msg=engine)
        for name, tensor in zip(WEIGHTS, weights, strict=True):
            np.testing.assert_allclose(state[name], tensor.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=engine)


def test_what_training_computes_anew_is_differentiated_anew():
    """With Dropout before the energy, training has an energy and a force of its own."""
    model = forces("rate = Constant <value = float {0.5}> () d = Dropout(c, rate)")
    next(node for node in model.graph.node if "energy" in node.output).input[0] = "d"
    training = onward.prepare(model, loss={"force": "mse"}, optimizer="sgd:lr=0.1", seed=3)
    inner, _ = training.step().gradients()
    assert inner.attributes["y"].value == "train/energy"
    batch = {"x": PLACES, "target": FORCES}
    found = []
    for engine in ("onnxruntime", "numpy"):
        with onward.engines.start(training, engine=engine) as running:
            found.append([running.evaluate(batch)["loss"], *(running.step(batch)["loss"] for _ in range(3))])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert found[0][0] != pytest.approx(found[0][1], rel=1e-2)


@needs("torch")
def test_a_gradient_of_what_is_a_gradient():
    import torch

    made = onward.gradient(forces(), "force", ["w1"])
    found = function(made, engine="onnxruntime")({"x": PLACES})["w1/grad"]
    x, *weights = (torch.tensor(a.astype(np.float32), requires_grad=True) for a in (PLACES, *WEIGHTS.values()))
    np.testing.assert_allclose(found, slope(torch_forces(x, *weights), weights[0]).detach(), rtol=1e-4, atol=1e-5)
    assert onward.check_gradients(forces(), "force", ["w1", "x"]).ok


def test_names_follow_what_is_renamed_and_cut():
    wanted = function(forces(), engine="numpy")({"x": PLACES})["force"]
    renamed = onward.transform.rename(forces(), {"x": "y", "energy": "e", "w1": "x"})
    np.testing.assert_array_equal(function(renamed, engine="numpy")({"y": PLACES})["force"], wanted)
    prefixed = onward.transform.add_prefix(forces(), "m/")
    np.testing.assert_array_equal(function(prefixed, engine="numpy")({"m/x": PLACES})["m/force"], wanted)
    part = onward.transform.extract(forces(), ["x"], ["force"])
    np.testing.assert_array_equal(function(part, engine="numpy")({"x": PLACES})["force"], wanted)
    doubled = parsed("double (float[n, 2] x) => (float[n, 2] z) { z = Add(x, x) }")
    merged = onward.transform.merge(onward.load(doubled), forces(), connect={"z": "x"}, prefix="m/")
    np.testing.assert_array_equal(function(merged, engine="numpy")({"x": PLACES / 2})["m/force"], wanted)


@needs("torch")
def test_what_frameworks_make_of_it():
    """PyTorch and JAX go on with it by their own derivatives; Keras, which has none to ask for, says so at once."""
    import torch

    model = onward.prepare(forces(), loss={"force": "mse"}, optimizer="sgd:lr=0.1")
    batch = {"x": PLACES, "target": FORCES}
    with onward.engines.start(model, engine="onnxruntime") as running:
        wanted = [running.step(batch)["loss"] for _ in range(3)]
    carried, found = onward.to_torch(model), []
    for _ in wanted:
        loss = carried.loss(carried.module(torch.tensor(PLACES))["force"], torch.tensor(FORCES))
        carried.optimizer.zero_grad()
        loss.backward()
        carried.optimizer.step()
        found.append(loss.item())
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if is_installed("jax"):
        made = onward.to_jax(model)
        state, found = made.state, []
        for _ in wanted:
            state, metrics = made.step(state, batch)
            found.append(metrics["loss"])
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if is_installed("keras"):
        with pytest.raises(onward.Error, match="the graph has a `Gradient` operator") as caught:
            onward.to_keras(model)
        assert "engines.start" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"a = Mul(x, x) d = {gradient('x', 'nope')}", "names `nope`, which does not exist"),
        (f"a = Mul(x, x) d = {gradient('x', 'a', 'x', zs='a')}", "1 inputs for 2 variables"),
        (f"d = {gradient('x', 'a')} a = Mul(x, d)", "depends on its own gradient"),
        ("d = f.leak(x)", "names `x`, which does not exist"),
    ],
)
def test_what_is_refused(text, message):
    leak = f"leak (b) => (db) {{ a = Mul(b, b) db = {gradient('x', 'a', 'b')} }}"
    model = parsed(f"g (float[2] x) => (float[2] d) {{ {text} }}", leak)
    for attempt in (onward.lower, *(lambda m, e=engine: function(m, engine=e) for engine in INSTALLED)):
        with pytest.raises(onward.Error, match=message) as caught:
            attempt(model)
        assert caught.value.hint
