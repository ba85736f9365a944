"""Group-relative policy optimisation on token-faithful traces; docs/grpo.md explains it."""
