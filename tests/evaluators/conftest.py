from containers import podman
from sandboxes import driver

__all__ = ["driver", "podman"]
