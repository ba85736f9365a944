"""The control plane over HTTP: one table of routes, and what reads, guards and describes it."""
