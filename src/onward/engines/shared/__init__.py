"""Operators that are the same in every framework, since they move tensors about without looking into them."""
