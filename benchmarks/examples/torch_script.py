"""Run a script up to its first optimizer step, then train the model in PyTorch and in other engines.

    python benchmarks/examples/torch_script.py examples/mnist/main.py --dry-run     # `run.py` starts this

Data sets become random arrays. The forward passes and functions between batch and loss are recorded. If one module has
all parameters of the optimizer, `from_torch` gets it, and the function of its outputs that is the loss; else a module
that makes all calls. A script that updates parameters by hand, by a multiple of the gradient, has `SGD`. A script with
several optimizers (GAN) has an outcome for each. Prints a JSON object.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import random
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

os.environ |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from script import Reached, Skipped, finish, outcome_of, replace_plots, tried  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import onward  # noqa: E402
from onward.agreement.steps import without_dropout  # noqa: E402
from onward.engines.torch.types import to_array  # noqa: E402
from onward.frameworks.torch.arguments import Flat  # noqa: E402
from onward.frameworks.torch.optimizer import clip_gradients  # noqa: E402
from onward.frameworks.torch.probe import FixedDraws, NothingDropped  # noqa: E402
from onward.frameworks.torch.traced.optimizer_state import copy_optimizer  # noqa: E402
from onward.run_state.training_models import from_training_model, to_training_model  # noqa: E402
from zoo import NUDGES, STEPS, Run, nudged, targets_of  # noqa: E402

SAMPLES = 64
"""Of each data set."""
ROWS = 4
"""Of a batch, at most."""
ROUTES = ("onnxruntime", "torch")

# ---- recording -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """Result of a call."""

    number: int


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Tensor that no recorded call returned: data."""

    number: int


class Call(NamedTuple):
    """Call of a module or function, with slots and leaves in place of tensors."""

    function: Callable[..., Any]
    arguments: Any
    """Positional and named."""
    slots: dict[int, Slot]
    """Position among the leaves of the result -> slot."""

    def __deepcopy__(self, memo: Any) -> Call:
        return self  # functions of C cannot be copied


class Tape(TorchFunctionMode):  # type: ignore[misc]
    """Calls on whose results gradients are computed. Those inside of a module are one call of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.leaves: list[torch.Tensor] = []
        self.roots: list[Slot] = []
        """Tensors whose `backward` was called."""
        self._slots: dict[int, Slot] = {}
        self._versions: dict[tuple[int, int], Leaf] = {}
        self._kept: list[Any] = []
        """Tensors whose id is in use."""
        self._inside = 0
        self.is_on = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.is_on = False
        self.__exit__(None, None, None)
        yield
        self.__enter__()
        self.is_on = True

    def take_as_root(self, loss: torch.Tensor) -> None:
        self.roots = [self._slots[id(loss)]]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_on or self._inside or function in _BOOKKEEPING:
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.backward:
            self.roots.append(self._slots[id(args[0])])
            return function(*args, **(kwargs or {}))
        arguments = self._replaced((args, kwargs or {}))
        result = function(*args, **(kwargs or {}))
        self._record(function, arguments, result)
        return result

    def _replaced(self, arguments: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._reference, arguments)

    def _reference(self, x: torch.Tensor) -> Any:
        if id(x) in self._slots:
            return self._slots[id(x)]
        if x.requires_grad:
            return x
        key = (id(x), x._version)
        if key not in self._versions:
            self._versions[key] = Leaf(len(self.leaves))
            self.leaves.append(x.detach().clone() if x.layout is torch.strided else x)
            self._kept.append(x)
        return self._versions[key]

    def _record(self, function: Any, arguments: Any, result: Any) -> None:
        slots = {}
        for position, x in enumerate(pytree.tree_leaves(result) if torch.is_grad_enabled() else ()):
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                slots[position] = self._slots[id(x)] = Slot(len(self._kept))
                self._kept.append(x)
        if slots:
            self.calls.append(Call(function, arguments, slots))

    def watch_modules(self) -> None:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.is_on or self._inside:
                return original(module, *args, **kwargs)
            arguments = self._replaced((args, kwargs))
            self._inside += 1
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._inside -= 1
            self._record(module, arguments, result)
            return result

        nn.Module.__call__ = call

    def calls_for(self, roots: set[Slot]) -> list[Call]:
        """Return the calls that the roots depend on."""
        needed, calls = set(roots), []
        for call in reversed(self.calls):
            if needed.intersection(call.slots.values()):
                needed |= set(_of_kind(Slot, call.arguments))
                calls.append(call)
        return calls[::-1]


_BOOKKEEPING = (torch.Tensor.requires_grad.__get__, torch.Tensor.grad.__get__, torch.Tensor.grad.__set__)


def _of_kind(kind: type, arguments: Any) -> list[Any]:
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, Slot | Leaf))
    return [x for x in leaves if isinstance(x, kind)]


class Replay(nn.Module):  # type: ignore[misc]
    """Module that makes recorded calls and returns the sum of the roots."""

    def __init__(self, calls: list[Call], roots: list[Slot], given: list[Any]):
        super().__init__()
        self.modules_called = nn.ModuleList(
            dict.fromkeys(call.function for call in calls if isinstance(call.function, nn.Module))
        )
        owned = set(map(id, self.parameters()))
        free = [x for call in calls for x in _of_kind(torch.Tensor, call.arguments) if id(x) not in owned]
        self.free = nn.ParameterList(dict.fromkeys(x for x in free if isinstance(x, nn.Parameter)))
        numbers = {id(module): number for number, module in enumerate(self.modules_called)}
        parameters = {id(x): name for name, x in self.named_parameters(remove_duplicate=False)}
        self._calls = [
            call._replace(
                function=numbers.get(id(call.function), call.function),
                arguments=pytree.tree_map_only(
                    nn.Parameter, lambda x: _Name(parameters[id(x)]), call.arguments,
                    is_leaf=lambda x: isinstance(x, Slot | Leaf),
                ),
            )
            for call in calls
        ]  # fmt: skip
        self._roots, self._given = roots, given

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        values: dict[Any, Any] = dict(zip(self._given, tensors, strict=True))

        def value(x: Any) -> Any:
            if isinstance(x, _Name):
                return self.get_parameter(x.name)
            return values.get(x, x) if isinstance(x, Slot | Leaf) else x

        for call in self._calls:
            args, kwargs = pytree.tree_map(value, call.arguments, is_leaf=lambda x: isinstance(x, Slot | Leaf | _Name))
            function = self.modules_called[call.function] if isinstance(call.function, int) else call.function
            leaves = pytree.tree_leaves(function(*args, **kwargs))
            values |= {slot: leaves[position] for position, slot in call.slots.items()}
        return sum(values[root] for root in self._roots)


class _Name(NamedTuple):
    name: str


class LossOf(nn.Module):  # type: ignore[misc]
    """Loss as a function of what a module returns and of targets."""

    def __init__(self, replay: Replay, positions: list[int]):
        super().__init__()
        self.replay, self._positions = replay, positions

    def forward(self, result: Any, *targets: torch.Tensor) -> torch.Tensor:
        leaves = pytree.tree_leaves(result)
        return self.replay(*(leaves[position] for position in self._positions), *targets)


class Objects(NamedTuple):
    """What `from_torch` gets."""

    module: nn.Module
    inputs: Any
    loss: Any
    targets: tuple[torch.Tensor, ...]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    clip: Any


def objects(tape: Tape, optimizer: torch.optim.Optimizer, scheduler: Any, clip: Any) -> Objects | None:
    """Return the objects of the training of an optimizer; None if no recorded loss depends on its parameters."""
    optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}

    def parameters(call: Call) -> set[int]:
        own = call.function.parameters() if isinstance(call.function, nn.Module) else ()
        return {id(x) for x in (*own, *_of_kind(torch.Tensor, call.arguments))} & optimized

    roots = [root for root in tape.roots if any(map(parameters, tape.calls_for({root})))]
    if not roots:
        return None
    calls = tape.calls_for(set(roots))
    owners = [call for call in calls if parameters(call)]
    owner = owners[0]
    others = [call.function for call in calls if call is not owner and isinstance(call.function, nn.Module)]
    is_one = len(owners) == 1 and isinstance(owner.function, nn.Module) and not _of_kind(Slot, owner.arguments)
    is_one = is_one and not any(list(module.buffers()) for module in others)  # which training changes
    if not is_one:
        leaves = list(dict.fromkeys(leaf for call in calls for leaf in _of_kind(Leaf, call.arguments)))
        module, inputs = Replay(calls, roots, leaves), [tape.leaves[leaf.number] for leaf in leaves]
        return Objects(module, inputs, "output", (), optimizer, scheduler, clip)
    args, kwargs = pytree.tree_map(
        lambda x: tape.leaves[x.number] if isinstance(x, Leaf) else x,
        owner.arguments, is_leaf=lambda x: isinstance(x, Leaf),
    )  # fmt: skip
    rest = [call for call in calls if call is not owner]
    leaves = list(dict.fromkeys(leaf for call in rest for leaf in _of_kind(Leaf, call.arguments)))
    used = {slot: position for position, slot in owner.slots.items()}
    given = list(dict.fromkeys(slot for call in rest for slot in _of_kind(Slot, call.arguments) if slot in used))
    targets = tuple(tape.leaves[leaf.number] for leaf in leaves)
    loss: Any = LossOf(Replay(rest, roots, [*given, *leaves]), [used[slot] for slot in given])
    if len(rest) == 1 and rest[0].arguments == ((*given, *leaves), {}) and [*used.values()] == [0]:
        loss = rest[0].function  # of the only output and the targets, as the script calls it
    module, inputs = owner.function, kwargs if kwargs and not args else args
    return Objects(module, inputs, loss, targets, optimizer, scheduler, clip)


# ---- what a script does not have here --------------------------------------------------------------------------------


def _image_set(shape: tuple[int, ...], classes: int) -> type:
    class Images(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self, *args: Any, transform: Any = None, **_: Any):
            rng = np.random.default_rng(0)
            callables = [x for x in args if callable(x)]
            self.transform = transform or (callables[0] if callables else None)
            size = shape or (300, 300, 3)
            self.data = torch.from_numpy(rng.integers(0, 256, (SAMPLES, *size), dtype=np.uint8))
            self.targets = torch.from_numpy(rng.permutation(np.arange(SAMPLES) % classes))

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            from PIL import Image

            image = Image.fromarray(self.data[index].numpy())
            return self.transform(image) if self.transform else image, int(self.targets[index])

    return Images


def replace_data(folder: Path) -> None:
    """Replace data sets, downloads, and processes."""
    try:
        import torchvision
    except ImportError:
        pass
    else:
        sets = torchvision.datasets
        sets.MNIST, sets.CIFAR10 = _image_set((28, 28), 10), _image_set((32, 32, 3), 10)
        sets.ImageFolder = _image_set((), 10)
        torchvision.models._api.WeightsEnum.verify = classmethod(lambda *_: None)  # random weights
        fake = sets.FakeData.__init__
        sets.FakeData.__init__ = lambda self, size=0, *args, **options: fake(self, SAMPLES, *args, **options)
    torch.hub.load_state_dict_from_url = unreachable
    loader = torch.utils.data.DataLoader.__init__

    def small(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False}
        for key in ("persistent_workers", "prefetch_factor", "multiprocessing_context"):
            options.pop(key, None)
        loader(self, dataset, min(batch_size or 1, ROWS), *args, **options)

    torch.utils.data.DataLoader.__init__ = small
    torch.distributed.init_process_group = lambda *_, **__: unreachable("several processes")
    torch.multiprocessing.Process = _InThisProcess
    torch.load = functools.partial(torch.load, weights_only=False)
    sys.modules["requests"], sys.modules["tarfile"] = mock.MagicMock(), mock.MagicMock()  # the files are there
    _write_files(folder)


class _InThisProcess:
    def __init__(self, target: Any, args: Any = ()):
        self.start = lambda: target(*args)
        self.join = lambda: None


def unreachable(*arguments: Any, **options: Any) -> NoReturn:
    raise Skipped(f"needs {str((*arguments, *options.values())[0])[:80]}")


_NODES = 1640
"""Of a graph: two scripts take those after 1600 for training."""


def _write_files(folder: Path) -> None:
    """Write files of data where scripts look for them, relative to the working directory."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        images = folder / "dataset" / "BSDS300" / "images" / part
        images.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(images / f"{number}.jpg")
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(folder / "style.jpg")
    for part in ("train", "valid", "test"):
        lines = [" ".join(f"word{i}" for i in rng.integers(0, 50, 20)) for _ in range(60)]
        (folder / f"{part}.txt").write_text("\n".join(lines), encoding="utf-8")
    torch.save(np.sin(rng.random((8, 1)) + np.arange(12) / 4), folder / "traindata.pt", pickle_protocol=4)
    (folder / "cora").mkdir()
    words = [" ".join([str(i), *map(str, rng.integers(0, 2, 12)), f"class{i % 4}"]) for i in range(_NODES)]
    (folder / "cora" / "cora.content").write_text("\n".join(words), encoding="utf-8")
    edges = [f"{a} {b}" for a, b in rng.choice(_NODES, (2 * _NODES, 2))]
    (folder / "cora" / "cora.cites").write_text("\n".join(edges), encoding="utf-8")


# ---- training --------------------------------------------------------------------------------------------------------


class Watch:
    """Tape, schedulers and clipping of a script, which ends it when all optimizers have stepped."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.outcomes: list[dict[str, Any]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._seen: list[torch.optim.Optimizer] = []
        self._schedulers: dict[int, Any] = {}
        self._clip: Any = None
        self._by_hand: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}

    def install(self) -> None:
        self.tape.watch_modules()
        register_optimizer_step_pre_hook(self._before_step)
        _after(torch.optim.Optimizer, "__init__", self._add_optimizer)
        kinds = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        for kind in kinds:
            _after(kind, "__init__", self._add_scheduler)
        clipping = nn.utils.clip_grad_norm_

        def clip(parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
            self._clip = float(max_norm)
            return clipping(parameters, max_norm, *args, **options)

        nn.utils.clip_grad_norm_ = clip
        backward = torch.Tensor.backward

        def watched(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            if self.tape.is_on and not self._optimizers and self._by_hand:
                self._try_by_hand(tensor)
            backward(tensor, *args, **options)
            if self.tape.is_on and not self._optimizers:
                modules = [call.function for call in self.tape.calls if isinstance(call.function, nn.Module)]
                parameters = [x for module in modules for x in module.parameters() if x.grad is not None]
                self._by_hand = {x: (x.detach().clone(), x.grad) for x in parameters}

        torch.Tensor.backward = watched

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.tape.is_on:
            self._optimizers.append(optimizer)

    def _add_scheduler(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._schedulers[id(scheduler.optimizer)] = scheduler

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.tape.is_on:
            return
        if optimizer in self._seen:
            raise Reached(self.outcomes)
        self._seen.append(optimizer)
        for closure in filter(callable, (*args[1:], *kwargs.values())):
            closure()
        self._try(optimizer)
        if len(self._seen) == len(self._optimizers):
            raise Reached(self.outcomes)

    def _try_by_hand(self, loss: torch.Tensor) -> None:
        """Take an update by hand as one of SGD, from the state after it."""
        with self.tape.paused(), torch.no_grad():
            moves = [((old - x).flatten(), gradient.flatten()) for x, (old, gradient) in self._by_hand.items()]
            rate = sum(float(move @ gradient) for move, gradient in moves) / sum(float(g @ g) for _, g in moves)
            if not all(torch.allclose(move, rate * g, rtol=1e-2, atol=1e-5) for move, g in moves):
                raise Skipped("an optimizer: it updates parameters by hand")
            optimizer = torch.optim.SGD(self._by_hand, lr=float(f"{rate:.3g}"))
        self.tape.take_as_root(loss)
        self._try(optimizer)
        raise Reached(self.outcomes)

    def _try(self, optimizer: torch.optim.Optimizer) -> None:
        with self.tape.paused():
            found = objects(self.tape, optimizer, self._schedulers.get(id(optimizer)), self._clip)
            if found is not None:
                options: dict[str, Any] = {}
                self.outcomes.append(tried(lambda: run(found, options), ROUTES, options))


def _after(kind: type, name: str, then: Callable[..., None]) -> None:
    original = getattr(kind, name)

    @functools.wraps(original)
    def replacement(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        then(self)

    setattr(kind, name, replacement)


def run(found: Objects, options: Mapping[str, Any]) -> Run:
    """Return three steps of PyTorch without dropout, and the training model."""
    training = onward.from_torch(
        found.module, found.inputs, loss=found.loss, example_targets=found.targets or None, optimizer=found.optimizer,
        scheduler=found.scheduler, clip=found.clip, **options,
    )  # fmt: skip
    bare = from_training_model(training)
    state = {key: array for key, array in bare.state.items() if not key.startswith("rng")}
    bare = dataclasses.replace(bare, model=without_dropout(bare.model), state=state)
    training = to_training_model(bare)
    flat = Flat(copy.deepcopy(found.module), found.inputs)
    batch = {name: to_array(tensor) for name, tensor in flat.inputs.items()}
    batch |= dict(zip(targets_of(training), map(to_array, found.targets), strict=True))
    with NothingDropped(), FixedDraws():
        losses, weights = steps(found, 0)
        moved = [steps(found, seed) for seed in range(1, 1 + NUDGES)]
    names = set(training.graph.initializers)
    return Run(training, batch, losses, {name: x for name, x in weights.items() if name in names}, moved)


def steps(found: Objects, seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return losses and weights of steps of copies; with a seed, from weights with other last digits."""
    memo: dict[int, Any] = {}
    module, optimizer = copy.deepcopy(found.module, memo), copy_optimizer(found.optimizer, memo)
    scheduler, loss_of = copy.deepcopy(found.scheduler, memo), copy.deepcopy(found.loss, memo)
    named = dict(module.named_parameters())
    if seed:
        arrays = nudged({name: x.detach().numpy() for name, x in named.items()}, seed)
        with torch.no_grad():
            for name, x in named.items():
                x.copy_(torch.from_numpy(arrays[name]))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = module(**found.inputs) if isinstance(found.inputs, Mapping) else module(*found.inputs)
        loss = result if loss_of == "output" else loss_of(result, *found.targets)
        loss.backward()
        if found.clip is not None:
            clip_gradients(list(module.parameters()), {"norm": found.clip})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    optimized = {id(x) for group in optimizer.param_groups for x in group["params"]}
    return losses, {name: x.detach().numpy().copy() for name, x in named.items() if id(x) in optimized}


def main() -> dict[str, Any]:
    script, folder = Path(sys.argv[1]).resolve(), Path(tempfile.mkdtemp())
    replace_plots()
    replace_data(folder)
    os.chdir(folder)
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(0)
    tape = Tape()
    Watch(tape).install()

    def reached(outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        if not outcomes:
            return {"outcome": "skipped", "reason": "no recorded loss depends on the parameters of its optimizer"}
        return next((outcome for outcome in outcomes if outcome["outcome"] != "exact"), outcomes[0]) | {
            **({"optimizers": len(outcomes)} if len(outcomes) > 1 else {})
        }

    with tape:
        return outcome_of(script, sys.argv[2:], "optimizer step", reached)


if __name__ == "__main__":
    finish(main())
