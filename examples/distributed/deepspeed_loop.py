"""Train with DeepSpeed ZeRO, in your own loop.

    torchrun --nproc-per-node 2 examples/distributed/deepspeed_loop.py gpt checkpoint/ 3

DeepSpeed takes the optimizer and the scheduler unchanged. It shards parameters, so only DeepSpeed
can clip: set `gradient_clipping` in its configuration, and no `clip` in the recipe. `gather_blocks`
tells stage 3 which parameters are needed at a time. To resume elsewhere, call
`onward.from_checkpoint("checkpoint", model, schedule=...)`.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from digits import ACCUMULATE, BATCH, CLIP, prepare_digits

import onward
from onward.distribute.torch_deepspeed import gather_blocks


def main(kind: str, checkpoint: str, stage: str) -> None:
    deepspeed.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": int(stage)},
    }
    model, *arrays = prepare_digits(kind, clip=None)
    module, optimizer, scheduler, loss = onward.to_torch(model, blocks=True, sync_batch_norm=True)
    gather_blocks(module)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    for inputs, targets in zip(*(torch.from_numpy(array).split(BATCH) for array in arrays), strict=True):
        value = loss(engine(inputs[rank::world]), targets[rank::world])
        engine.backward(value)
        engine.step()
        mean = value.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean.item():.8f}")
    engine.save_checkpoint(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
