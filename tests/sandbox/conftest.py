from containers import container, podman
from sandboxes import driver, image

__all__ = ["container", "driver", "image", "podman"]
