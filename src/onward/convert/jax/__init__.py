"""JAX: functions, parameters and optax states as training models, and training models as pure functions."""
