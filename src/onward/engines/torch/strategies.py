"""The ways in which several processes train together on PyTorch, by their names."""

from __future__ import annotations

from typing import Any

from onward.engines.distributed import join_group
from onward.engines.distributed.layout import MODEL
from onward.engines.distributed.torch_parallel import TorchParallel
from onward.errors import ArgumentError
from onward.lowering.rounds import Steps
from onward.model import Model


def start_together(model: Model, step: Steps = None, *, strategy: str | None = None, **options: Any) -> TorchParallel:
    """An engine of this process, which is one of several, or alone."""
    mesh, shard, micro_batches = (options.pop(name, None) for name in ("mesh", "shard", "micro_batches"))
    strategy = strategy or "tensor"
    if (mesh or shard) and strategy != "tensor":
        raise ArgumentError(
            f"with `{strategy}`, there is no mesh to divide tensors",
            hint='take `strategy="tensor"` (`--strategy tensor`), or leave `mesh` and `shard` out',
        )
    if strategy == "deepspeed":
        from onward.engines.distributed.torch_deepspeed import TorchDeepSpeed

        return TorchDeepSpeed(model, step, strategy=strategy, **options)
    if join_group(options.get("device", "cpu")).size == 1:
        return TorchParallel(model, step, strategy="ddp", **options)
    if strategy == "tensor":
        from onward.engines.distributed.torch_tensor_parallel import TensorParallel

        return TensorParallel(model, step, strategy=strategy, mesh=mesh or MODEL, shard=shard, **options)
    if strategy == "pipeline":
        from onward.engines.distributed.torch_pipeline import Pipeline

        return Pipeline(model, step, strategy=strategy, micro_batches=micro_batches, **options)
    return TorchParallel(model, step, strategy=strategy, **options)
