"""Rollouts: running one session from its task to its trajectory."""
