"""Train with Hugging Face Accelerate, in your own loop.

    accelerate launch --cpu --num_processes 2 examples/distributed/accelerate_loop.py cnn trained.onnx

`split_batches` makes a batch of the loader the batch of all processes. So the schedule advances by
one with each update, as the training model counts. The optimizer clips gradients.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from digits import ACCUMULATE, BATCH, prepare_digits
from torch.utils.data import DataLoader, TensorDataset

import onward


def main(kind: str, trained: str) -> None:
    model, *arrays = prepare_digits(kind)
    whole = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=whole, gradient_accumulation_steps=ACCUMULATE)
    module, inner, scheduler, loss = onward.to_torch(model, sync_batch_norm=True)
    loader = DataLoader(TensorDataset(*map(torch.from_numpy, arrays)), BATCH)
    module, optimizer, loader, scheduler = accelerator.prepare(module, inner, loader, scheduler)
    for inputs, targets in loader:
        with accelerator.accumulate(module):
            value = loss(module(inputs), targets)
            accelerator.backward(value)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(value.detach(), 'mean').item():.8f}")
    if accelerator.is_main_process:
        onward.from_torch(module, inputs, loss=loss, optimizer=inner, scheduler=scheduler).save(trained)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
