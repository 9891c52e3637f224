"""Low-rank adapters (Hu et al. 2021): y = x W becomes y = x W + (alpha / rank) (x A) B, and only A
and B are trained.

    adapted = onward.lora.add("bert.onnx", rank=8, targets="*attention*")
    training = onward.prepare(adapted, loss="cross_entropy")
    ...
    merged = onward.lora.merge(trained)

A and B are initializers, `<weight>/lora_A` and `<weight>/lora_B`, beside the number
`<weight>/lora_scale`; tags say which weight they belong to. A is [in, rank] and B is [rank, out].
For a convolution A is [groups * rank, in / groups, *kernel], with the strides and pads of the
layer, and B is [out, rank, 1, ...].
"""

from onward.recipe.lora.adapters import add, merge
from onward.recipe.lora.files import load, save

__all__ = ["add", "load", "merge", "save"]


def __dir__() -> list[str]:
    return __all__
