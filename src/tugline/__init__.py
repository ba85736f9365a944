"""Reinforcement learning on real agent harnesses.

This is the public API for programs that submit tasks and train on the results. A name is loaded
when it is first used, so that `import tugline` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; `__getattr__` imports them at run time
    from tugline.client.api import Client
    from tugline.client.streams import GroupResults, Result
    from tugline.client.sync import SyncClient
    from tugline.datasets.files import load_tasks
    from tugline.errors import Conflict, Invalid, Missing, ServerError, TuglineError, UsageError
    from tugline.launch.run import run, run_async
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
_MODULES = (
    "types", "errors", "client.api", "client.streams", "client.sync", "datasets.files",
    "launch.run",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("tugline")
    if name in __all__:
        for path in _MODULES:
            module = import_module(f"tugline.{path}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'tugline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
