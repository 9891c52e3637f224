"""Trees of JAX: as Orbax and Flax store them, and what states of optax in them mean."""
