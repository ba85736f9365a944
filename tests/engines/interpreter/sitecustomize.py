"""vLLM's model runner V2 on a CPU: Triton's interpreter in place of its compiler.

This folder on ``PYTHONPATH`` registers `triton_cpu` as a backend of Triton, which has none for
CPUs, and changes two modules once they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ChangeOnImport(importlib.abc.MetaPathFinder):
    """Calls `change` with a module as soon as it was imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name = name
        self.change = change

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as usual, and append the change to its execution."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec and spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.change(module)

        loader.exec_module = exec_module
        return spec


def truncate_with_torch(module: Any) -> None:
    """Take PyTorch's form of top-k and top-p: the interpreter cannot run the kernel."""
    in_torch = module.apply_top_k_top_p_pytorch

    def apply(logits: Any, k: Any, p: Any, *_args: Any, **_options: Any) -> Any:
        return in_torch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p = apply


def take_any_mask(module: Any) -> None:
    """Let the interpreter take masks that are not boolean."""
    builder = module.InterpreterBuilder
    for name, position in (("create_masked_store", 2), ("create_masked_load", 1)):
        setattr(builder, name, _with_boolean(getattr(builder, name), position))


def _with_boolean(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        mask = args[position]
        mask.data = mask.data.astype(bool)
        return method(self, *args, **options)

    return call


sys.meta_path[:0] = [
    ChangeOnImport("vllm.v1.sample.ops.topk_topp_sampler", truncate_with_torch),
    ChangeOnImport("triton.runtime.interpreter", take_any_mask),
]
