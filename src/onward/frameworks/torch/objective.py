"""The loss of a run of PyTorch: summands on outputs, each with targets, or a value that the module computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onward.errors import DataError
from onward.frameworks.torch.exact.losses import OwnLoss, Scaled, SumOfLosses, Watching
from onward.frameworks.torch.losses import read_loss
from onward.model import Model
from onward.recipe.objective import terms as terms_of
from onward.recipe.spec import Spec


class Summand(NamedTuple):
    """A loss on an output, times a number, and the targets that were given for the example."""

    output: str | None
    """None where there is only one."""
    loss: Any
    scale: float
    targets: tuple[torch.Tensor, ...]

    def value(self, prediction: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.loss(prediction, *targets) * self.scale

    def spec(self) -> Any:
        """The summand in the words of a recipe."""
        is_soft = bool(self.targets) and self.targets[0].is_floating_point()
        is_own = isinstance(self.loss, OwnLoss)
        spec = Spec("value") if is_own else read_loss(self.loss, probabilities=is_soft)
        options = {**spec.options, **({} if self.scale == 1 else {"scale": self.scale})}
        return Spec(spec.name, options) if self.output is None else {self.output: {"name": spec.name, **options}}


def summands(loss: Any, targets: Any) -> list[Summand]:
    """The summands of a loss as `from_torch` takes it, with their targets; none, if the module computes its loss."""
    if isinstance(loss, str | OwnLoss):
        return []
    if not isinstance(loss, Mapping):
        return list(_of_output(None, loss, targets))
    given = targets if targets is not None else {}
    if not isinstance(given, Mapping) or given.keys() - loss.keys():
        raise DataError(
            "the example of targets does not fit the loss",
            hint=f"give a mapping, as the loss is: of {', '.join(map(str, loss))}",
        )
    return [one for output, term in loss.items() for one in _of_output(output, term, given.get(output))]


def _of_output(output: str | None, loss: Any, targets: Any) -> Iterator[Summand]:
    if isinstance(loss, SumOfLosses):
        loss = list(loss.losses)
    if isinstance(loss, list):
        given = targets if targets is not None else [None] * len(loss)
        if len(given) != len(loss):
            raise DataError(
                f"there are {len(loss)} losses, but {len(given)} examples of targets", hint="give targets for each loss"
            )
        for one, its_targets in zip(loss, given, strict=True):
            yield from _of_output(output, one, its_targets)
        return
    if isinstance(loss, Watching):
        yield from _of_output(loss.output, loss.loss, targets)
        return
    scale = 1.0
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], int | float):
        scale, loss = loss
    if isinstance(loss, Scaled):
        scale, loss = scale * loss.scale, loss.loss
    if isinstance(loss, OwnLoss):
        output = loss.output
    given = () if targets is None else (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    yield Summand(output, loss, float(scale), given)


def read_objective(loss: Any, terms: Sequence[Summand]) -> Any:
    """A loss in the words of a recipe."""
    if not terms:
        return f"value:{loss.output if isinstance(loss, OwnLoss) else loss}"
    specs = [term.spec() for term in terms]
    return specs[0] if len(specs) == 1 else specs


def inner_values(loss: Any, model: Model) -> list[str]:
    """The values that the loss of a `RunState` looks at, and that are no outputs of its model."""
    outputs = {value.name for value in model.outputs}
    return list(dict.fromkeys(t.output for t in terms_of(loss) if t.output is not None and t.output not in outputs))
