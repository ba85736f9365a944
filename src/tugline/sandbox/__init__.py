"""Runtimes and the sandboxes that they open."""
