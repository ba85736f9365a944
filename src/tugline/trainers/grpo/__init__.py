"""Group-relative policy optimisation on token-faithful traces; docs/training.md explains it."""
