"""ZeRO: partitions that are put together, and universal checkpoints."""
