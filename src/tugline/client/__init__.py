"""Clients of a rollout server: for programs and people (`api`, `sync`), for nodes (`nodes`)."""
