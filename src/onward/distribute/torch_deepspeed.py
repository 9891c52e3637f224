"""DeepSpeed ZeRO 3 for modules of `onward.to_torch`."""

from __future__ import annotations

from torch import nn


def gather_blocks(module: nn.Module) -> None:
    """Let ZeRO 3 gather parameters block by block, and keep those outside blocks gathered.

    Call it before `deepspeed.initialize`, with a module of `onward.to_torch(..., blocks=True)`.
    """
    from deepspeed import zero
    from deepspeed.utils import set_z3_leaf_modules

    blocks = module.repeated_blocks()
    set_z3_leaf_modules(module, [type(block) for block in blocks[:1]], raise_if_not_found=False)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in inside:
            zero.register_external_parameter(module, parameter)
