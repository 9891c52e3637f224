"""Megatron's own words."""
