"""Running a training step on stock ONNX Runtime, with our gradients or with those that somebody else computed.

With `own_gradients=False` what the `Gradient` operator computes becomes an input. That leaves everything else of a step
as it is in the file: the forward pass in training mode, the loss, accumulation, clipping, the schedule, the optimizer
and all state.
"""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from onward.differentiate.gradients import lower_gradients
from onward.lowering.standard_operators import expand
from onward.model import TRAINING_DOMAIN, Model
from onward.model.state import carried_state
from onward.transform.context import Context


class Stepper:
    def __init__(self, model: Model, step: int = 0, own_gradients: bool = False):
        self.bindings = dict(model.step(step).update)
        self.state = {s.name: np.array(s.value.const_value.numpy()) for s in carried_state(model, step)}
        combined = model.combined(step)
        if own_gradients:
            combined = lower_gradients(Context(Model(combined))).ir
        self.gradients = {}
        gradients = [n for n in combined.graph if (n.domain, n.op_type) == (TRAINING_DOMAIN, "Gradient")]
        for node in gradients:
            for x, output in zip(node.attributes["xs"].as_strings(), node.outputs, strict=True):
                given = ir.Value(name=f"given:{x}", type=output.type, shape=output.shape)
                output.replace_all_uses_with(given)
                combined.graph.inputs.append(given)
                self.gradients[x] = given.name
            combined.graph.remove(node)
        for name in self.state:
            value = combined.graph.initializers.pop(name)
            value.const_value = None
            combined.graph.inputs.append(value)
        expand(Context(Model(combined)))
        for graph in (combined.graph, *(f.graph for f in combined.functions.values())):
            graph.opset_imports.pop(TRAINING_DOMAIN, None)
        self.names = [value.name for value in combined.graph.outputs]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(ir.to_proto(combined).SerializeToString(), options)

    def forward(self, batch):
        """The outputs at the present state, with zero gradients; nothing changes."""
        return self._run(batch, {x: np.zeros_like(self.state[x]) for x in self.gradients})

    def __call__(self, batch, gradients=None):
        """One run: outputs come back, state is replaced."""
        outputs = self._run(batch, gradients or {})
        self.state.update({key: np.asarray(outputs[value]) for key, value in self.bindings.items()})
        return outputs

    def _run(self, batch, gradients):
        feeds = {**batch, **self.state, **{self.gradients[x]: g for x, g in gradients.items()}}
        known = {value.name for value in self.session.get_inputs()}
        feeds = {name: np.asarray(value) for name, value in feeds.items() if name in known}
        return dict(zip(self.names, self.session.run(self.names, feeds), strict=True))


def weights(model):
    return {name: np.array(v.const_value.numpy()) for name, v in model.graph.initializers.items()}


def batches(shape, count, classes=10, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.standard_normal(shape).astype(np.float32), rng.integers(0, classes, shape[0])


def torch_mlp(model):
    import torch

    w = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights(model).items()}

    def forward(x):
        hidden = torch.relu(x @ w["fc1.weight"].T + w["fc1.bias"])
        return hidden @ w["fc2.weight"].T + w["fc2.bias"]

    return w, forward
