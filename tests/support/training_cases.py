"""Networks of torch_training.py with the recipe that each is trained by, here and in PyTorch, and their export."""

from collections.abc import Callable
from typing import Any, NamedTuple

import onward

STEPS = 20
LOSSES = {"cross_entropy": "cross_entropy", "mse_loss": "mse", None: "value:loss"}


class Case(NamedTuple):
    model: str
    """A function of torch_training.py."""
    recipe: dict[str, Any]
    optimizer: Callable
    """What the recipe means in PyTorch, from torch.optim and the network."""
    schedule: Callable | None = None
    """The same, from torch.optim.lr_scheduler and the optimizer."""
    torchscript: bool = False
    scripted: bool = False
    idle: str = "nothing"
    """A part of the names of parameters on which the loss does not depend: their gradients are rounding errors."""


def _warm_cosine(schedules, optimizer):
    warm = schedules.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, STEPS - 4)], [4])


def _biases_apart(make, *, without, **settings):
    """Two groups of parameters; of the biases, what `without` says."""

    def optimizer(net):
        biases = [x for name, x in net.named_parameters() if name.endswith(".bias")]
        others = [x for name, x in net.named_parameters() if not name.endswith(".bias")]
        return make([{"params": biases, **without}, {"params": others}], **settings)

    return optimizer


CASES = {
    "mlp": Case(
        "mlp",
        {"optimizer": "sgd:lr=0.1,momentum=0.9,weight_decay=0.01"},
        lambda optim, net: optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "lenet5": Case(
        "lenet5",
        {"optimizer": "adam:lr=1e-3"},
        lambda optim, net: optim.Adam(net.parameters(), lr=1e-3),
        torchscript=True,
    ),
    "resnet": Case(
        "resnet",
        {"optimizer": "nesterov:lr=0.02", "variance": "sample", "clip": 1.0},
        lambda optim, net: optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True),
        torchscript=True,
    ),
    "resnet, dynamo": Case(
        "resnet",
        {"optimizer": "sgd:lr=0.2", "variance": "sample", "accumulate": 2},
        lambda optim, net: optim.SGD(net.parameters(), lr=0.2),
    ),
    "vit": Case(
        "vit",
        {"optimizer": "adamw:lr=3e-3", "schedule": "cosine:steps=20,warmup=4,warmup_start=0.1", "clip": 1.0},
        lambda optim, net: optim.AdamW(net.parameters(), lr=3e-3),
        _warm_cosine,
        idle="k_proj.bias",
    ),
    "bert": Case(
        "bert",
        {"optimizer": "adamw:lr=2e-3,weight_decay=0.1", "groups": ["*.bias:weight_decay=0"], "accumulate": 2},
        lambda optim, net: _biases_apart(optim.AdamW, without={"weight_decay": 0}, lr=2e-3, weight_decay=0.1)(net),
        torchscript=True,
        idle="key.bias",
    ),
    "gpt2": Case(
        "gpt2",
        {"optimizer": "adamw:lr=2e-3", "clip": 1.0, "accumulate": 2},
        lambda optim, net: optim.AdamW(net.parameters(), lr=2e-3),
        idle="attn.c_attn.bias",  # a third of which is the keys'
    ),
    "lstm": Case(
        "lstm",
        {"optimizer": "rmsprop:lr=0.02"},
        lambda optim, net: optim.RMSprop(net.parameters(), lr=0.02),
        torchscript=True,
    ),
    "autoencoder": Case(
        "autoencoder",
        {"optimizer": "nadam:lr=0.01"},
        lambda optim, net: optim.NAdam(net.parameters(), lr=0.01),
    ),
    "if and loop": Case(
        "branches",
        {"optimizer": "adamax:lr=0.05"},
        lambda optim, net: optim.Adamax(net.parameters(), lr=0.05),
        torchscript=True,
        scripted=True,
    ),
    "while": Case(
        "settling",
        {"optimizer": "adagrad:lr=0.1"},
        lambda optim, net: optim.Adagrad(net.parameters(), lr=0.1),
    ),
    "tied": Case(
        "tied",
        {"optimizer": "momentum:lr=0.2", "schedule": "exponential:gamma=0.9"},
        lambda optim, net: optim.SGD(net.parameters(), lr=0.2, momentum=0.9),
        lambda schedules, optimizer: schedules.ExponentialLR(optimizer, 0.9),
    ),
}


def made(case, *, fresh=False):
    """What to train; unless it is to be fresh, without weights that are equal, which exporters merge."""
    import torch
    import torch_training

    torch.manual_seed(0)
    subject = getattr(torch_training, case.model)()
    with torch.no_grad():
        for parameter in () if fresh else subject.net.parameters():
            parameter += torch.randn_like(parameter) / 20
    return subject


def exported(case, subject, *, fixed=None):
    """The file of a network, whose batch may vary unless a fixed size is given."""
    import torch
    from torch_export import by_dynamo, by_torchscript, quiet

    torch.compiler.reset()  # what was exported before must not count as a recompilation
    with quiet():
        net = subject.net.eval()
        inputs = subject.inputs(fixed or 2)
        axes = {} if fixed else subject.axes or dict.fromkeys(inputs, "n")
        export = by_torchscript if case.torchscript else by_dynamo
        module = torch.jit.script(net) if case.scripted else net
        return export(module, inputs, axes, "loss" if subject.loss is None else "y")


def prepared(case, subject, proto, **more):
    return onward.prepare(proto, loss=LOSSES[subject.loss], **case.recipe, **more)


def loop(case, subject):
    from torch_training import Trainer

    settings = {name: case.recipe[name] for name in ("clip", "accumulate") if name in case.recipe}
    return Trainer(subject, case.optimizer, case.schedule, **settings)


def arrays(batch):
    return {name: x.numpy() for name, x in batch.items()}
