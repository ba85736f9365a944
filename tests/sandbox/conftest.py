from containers import container, podman
from sandboxes import driver, image, sandbox

__all__ = ["container", "driver", "image", "podman", "sandbox"]
