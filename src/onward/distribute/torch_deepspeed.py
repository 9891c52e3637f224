"""DeepSpeed: what it must know of a module that executes a graph."""

from __future__ import annotations

from torch import nn


def gather_blocks(module: nn.Module) -> None:
    """Tell ZeRO 3 which parameters are needed at a time: those of a block while it computes, others all the while.

    To be called before `deepspeed.initialize`, on the module of `onward.to_torch(..., blocks=True)`.
    """
    from deepspeed import zero
    from deepspeed.utils import set_z3_leaf_modules

    blocks = module.repeated_blocks()
    set_z3_leaf_modules(module, [type(block) for block in blocks[:1]], raise_if_not_found=False)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in inside:
            zero.register_external_parameter(module, parameter)
