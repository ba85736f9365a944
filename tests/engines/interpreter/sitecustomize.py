"""vLLM's model runner V2 on a CPU: Triton's interpreter in place of its compiler.

This folder on ``PYTHONPATH`` registers `triton_cpu` as a backend of Triton, which has none for
CPUs, and changes two modules once they are imported.
"""

import importlib.abc
import importlib.util
import sys


class ChangeOnImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as it was imported."""

    def __init__(self, name, change):
        self.name = name
        self.change = change

    def find_spec(self, name, path, target=None):
        """Find the module as usual, and append the change to its execution."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def truncate_with_torch(module):
    """Take PyTorch's form of top-k and top-p: the interpreter cannot run the kernel."""
    in_torch = module.apply_top_k_top_p_pytorch

    def apply(logits, k, p, *_args, **_kwargs):
        return in_torch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p = apply


def take_any_mask(module):
    """Let the interpreter take masks that are not boolean."""
    builder = module.InterpreterBuilder
    for name, position in (("create_masked_store", 2), ("create_masked_load", 1)):
        setattr(builder, name, _with_bool(getattr(builder, name), position))


def _with_bool(method, position):
    def call(self, *args, **kwargs):
        mask = args[position]
        mask.data = mask.data.astype(bool)
        return method(self, *args, **kwargs)

    return call


sys.meta_path[:0] = [
    ChangeOnImport("vllm.v1.sample.ops.topk_topp_sampler", truncate_with_torch),
    ChangeOnImport("triton.runtime.interpreter", take_any_mask),
]
