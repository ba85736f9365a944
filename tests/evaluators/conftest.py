from support.containers import podman
from support.sandbox import driver

__all__ = ["driver", "podman"]
