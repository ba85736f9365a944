"""The driver of the backend: it is active, and its device is the CPU."""

from types import ModuleType

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """What Triton and vLLM ask of a driver before they interpret a kernel."""

    def __init__(self) -> None:
        """Load nothing."""

    @staticmethod
    def is_active() -> bool:
        """Whether the device is there."""
        return True

    def get_current_target(self) -> GPUTarget:
        """Return a target for which no kernel is compiled."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's device."""
        return torch.device("cpu")

    def get_device_interface(self) -> ModuleType:
        """Return torch's module of the device."""
        return torch.cpu

    def get_current_device(self) -> int:
        """Return the number of the device."""
        return 0

    def get_current_stream(self, _device: object = None) -> int:
        """Return the number of the stream."""
        return 0


CpuDriver.__abstractmethods__ = frozenset()
