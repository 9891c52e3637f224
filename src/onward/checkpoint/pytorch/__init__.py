"""Pickles as data, archives of `torch.save`, state dicts, and checkpoints in them."""
