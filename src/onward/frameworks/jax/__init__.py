"""JAX functions, parameters and optax states as training models, and back."""

from onward.frameworks.jax.capture import from_jax
from onward.frameworks.jax.forward import JaxTraining, to_jax

__all__ = ["JaxTraining", "from_jax", "to_jax"]
