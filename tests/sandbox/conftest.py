from support.containers import container, podman
from support.sandbox import driver, image, sandbox

__all__ = ["container", "driver", "image", "podman", "sandbox"]
