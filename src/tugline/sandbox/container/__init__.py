"""Containers of Docker and Podman, by one driver."""
