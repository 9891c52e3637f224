"""A small convolutional network, and the same in PyTorch with its own modules of fake quantisation."""

import numpy as np
from onnx import numpy_helper, parser

RNG = np.random.default_rng(0)
FLOAT = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
g (float[n,1,6,6] x) => (float[n,3] y) {
  c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, cw, cb)
  r = Relu(c)
  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
  f = Flatten(p)
  y = Gemm <transB = 1> (f, w, b)
}""")
SHAPES = {"cw": (4, 1, 3, 3), "cb": (4,), "w": (3, 36), "b": (3,)}
WEIGHTS = {name: (RNG.standard_normal(shape) * 0.3).astype("f") for name, shape in SHAPES.items()}
FLOAT.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
BATCHES = [
    {
        "x": RNG.standard_normal((8, 1, 6, 6)).astype("f") * (1 + 0.2 * i),
        "y_target": RNG.standard_normal((8, 3)).astype("f"),
    }
    for i in range(6)
]


class TorchNetwork:
    """The same network; `round_x`, `round_r`, `round_cw` and `round_w` are called on what is rounded."""

    def __init__(self, **rounding):
        import torch

        self.parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in WEIGHTS.items()}
        self.rounding = rounding

    def loss(self, batch):
        import torch
        from torch.nn import functional

        p, rounding = self.parameters, self.rounding
        x = rounding["x"](torch.from_numpy(batch["x"]))
        r = functional.conv2d(x, rounding["cw"](p["cw"]), p["cb"], padding=1).relu()
        f = functional.max_pool2d(rounding["r"](r), 2).flatten(1)
        y = functional.linear(f, rounding["w"](p["w"]), p["b"])
        return functional.mse_loss(y, torch.from_numpy(batch["y_target"]))

    def train(self, optimizer, after=lambda: None):
        losses = []
        for batch in BATCHES:
            optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            optimizer.step()
            after()
            losses.append(float(loss.detach()))
        return losses
