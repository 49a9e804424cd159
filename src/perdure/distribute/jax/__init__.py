"""The JAX engine and its strategies; a user imports `perdure.jax`."""
