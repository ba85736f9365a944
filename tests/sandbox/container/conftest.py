from containers import container, podman

__all__ = ["container", "podman"]
