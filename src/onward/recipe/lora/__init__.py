"""Low-rank adapters (Hu et al. 2021): y = x W + (alpha / rank) (x A) B, with A and B trained.

    adapted = onward.lora.add("bert.onnx", rank=8, targets="*attention*")
    training = onward.prepare(adapted, loss="cross_entropy")
    ...
    merged = onward.lora.merge(trained)

A and B are the initializers `<weight>/lora_A`, [in, rank], and `<weight>/lora_B`, [rank, out], with
the number `<weight>/lora_scale` and tags of their weight. For a convolution A is [groups * rank, in
/ groups, *kernel], with the layer's strides and pads, and B is [out, rank, 1, ...].
"""

from onward.recipe.lora.adapters import add, as_inputs, merge
from onward.recipe.lora.files import load, save

__all__ = ["add", "as_inputs", "load", "merge", "save"]


def __dir__() -> list[str]:
    return __all__
