"""Reinforcement learning on real agent harnesses.

Here is what programs need to submit tasks and to learn from what comes back. A name is loaded when
it is first used, so `import tugline` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for readers of the code and of its types; `__getattr__` is for the rest
    from tugline.client.api import Client
    from tugline.client.streams import GroupResults, Result
    from tugline.client.sync import SyncClient
    from tugline.datasets.files import load_tasks
    from tugline.errors import Conflict, Invalid, Missing, ServerError, TuglineError, UsageError
    from tugline.launch.local import run, run_async
    from tugline.types import (
        Boundary,
        Callback,
        Failure,
        Group,
        Ledger,
        Limits,
        PluginSpec,
        Policy,
        Reward,
        Sampling,
        Stale,
        Status,
        Task,
        Trace,
        Trajectory,
    )

__all__ = [
    "Boundary", "Callback", "Client", "Conflict", "Failure", "Group", "GroupResults", "Invalid",
    "Ledger", "Limits", "Missing", "PluginSpec", "Policy", "Result", "Reward", "Sampling",
    "ServerError", "Stale", "Status", "SyncClient", "Task", "Trace", "Trajectory", "TuglineError",
    "UsageError", "load_tasks", "run", "run_async",
]  # fmt: skip
_HOMES = (
    "types", "errors", "client.api", "client.streams", "client.sync", "datasets.files",
    "launch.local",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("tugline")
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"tugline.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'tugline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
