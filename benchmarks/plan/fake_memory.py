"""Compare planned with measured memory of an update at full width, without a GPU or weights.

The trainer's own code makes an update of models in their real sizes on fake tensors, which have
shapes but no values, as rank 0 of a fake process group. torch's `MemTracker` measures. So these
figures are simulated: the allocator's fragmentation and CUDA's own memory are not in them.

- Fake tensors are on the CPU here. Attention is `varlen_attn`, as on a GPU in bfloat16, by its
  registered shapes; `--attention sdpa` measures that of transformers, without tree packing, which
  makes a mask of all pairs of tokens on fake tensors, but not in a real run.
- With `--offload`, inputs of layers go to the device `meta`, which stands for host memory.
- Gated delta nets use the simulated kernel of delta_rule.py; `--rule torch` measures the fallback
  of transformers, which takes minutes for each layer.

    python benchmarks/plan/fake_memory.py     # the table of docs/benchmarks.md
    python benchmarks/plan/fake_memory.py --model qwen3-8b --ranks 4 --tokens 65536 --offload
"""

# ruff: noqa: INP001, T201 - a program, not a package
from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import delta_rule
import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.qwen3_5 import modeling_qwen3_5

from tugline.trainers.config import Lora
from tugline.trainers.grpo import attention, forward
from tugline.trainers.grpo.batch import Row
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.distributed import shard
from tugline.trainers.grpo.hub import get_base_model
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.lora import add_adapter
from tugline.trainers.plan.memory import Memory, Pass, choose_precision, estimate_memory
from tugline.trainers.plan.shape import measure_shape
from tugline.types import Sample

GIB = 2**30
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
_HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 256,
}


def _qwen3(hidden: int, inner: int, heads: int, layers: int, *, tied: bool) -> Any:
    return transformers.Qwen3Config(
        **_QWEN3,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
    )


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-0.6b": lambda: _qwen3(1024, 3072, 16, 28, tied=True),
    "qwen3-4b": lambda: _qwen3(2560, 9728, 32, 36, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12_288, 32, 36, tied=False),
    "qwen3-32b": lambda: _qwen3(5120, 25_600, 64, 64, tied=False),
    "qwen3.5-4b": lambda: transformers.Qwen3_5TextConfig(
        **_HYBRID,
        vocab_size=248_320,
        hidden_size=2560,
        intermediate_size=9216,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_hidden_layers=32,
        tie_word_embeddings=True,
    ),
}


class Case(NamedTuple):
    """An update to measure: one trace per rank and pass."""

    model: str
    ranks: int = 4
    tokens: int = 65_536
    layers: int | None = None
    """Number of layers; None: those of the model."""
    offload: bool = False
    lora: bool = False
    compute: Literal["bfloat16"] | None = "bfloat16"
    passes: int = 1
    attention: str = "varlen"
    rule: str = "kernel"


class Measured(NamedTuple):
    """Bytes at the peak."""

    gpu: int
    host: int


TABLE = (
    Case("qwen3-0.6b", ranks=1, tokens=16_384),
    Case("qwen3-4b", ranks=4),
    Case("qwen3-4b", ranks=8, offload=True),
    Case("qwen3-4b", ranks=1, tokens=16_384, lora=True),
    Case("qwen3-8b", ranks=4, offload=True),
    Case("qwen3-8b", ranks=8, tokens=32_768, passes=2),
    Case("qwen3-32b", ranks=8, tokens=32_768, lora=True),
    Case("qwen3-32b", ranks=8, tokens=32_768, lora=True, offload=True),
    Case("qwen3.5-4b", ranks=4),
    Case("qwen3.5-4b", ranks=4, offload=True),
)


# --------------------------------------------------------------------------- seams
class Values(TorchFunctionMode):
    """Answer reads of a fake tensor's values with ones.

    This is the only place where the trainer's code sees values: sums of its report, the norm of the
    gradient, and the comparisons of log probabilities with which it checks a model.
    """

    ANSWERS: dict[str, Any] = {  # noqa: RUF012 - constants
        "item": 1,
        "__float__": 1.0,
        "__int__": 1,
        "__bool__": True,
        "allclose": True,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.ANSWERS:
            return self.ANSWERS[name]
        if name == "numpy":
            return np.ones(tuple(args[0].shape), np.float32)
        return func(*args, **(kwargs or {}))


class Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """`MemTracker` without figures by module.

    Its hooks for those do not allow that a module is called twice, as the output layer is, or that
    a weight has no gradient.
    """

    def _ignore(self, *_: Any) -> None:
        pass

    _pre_fw_hook: Any = _ignore
    _post_fw_hook: Any = _ignore
    _pre_bw_hook: Any = _ignore
    _post_bw_hook: Any = _ignore


class SaveOnHost(saved_tensors_hooks):
    """Stands for `save_on_cpu`: saved tensors move to the device ``meta``."""

    def __init__(self, **_: object) -> None:
        super().__init__(
            partial(torch.empty_like, device="meta"), partial(torch.empty_like, device="cpu")
        )


@contextlib.contextmanager
def replace_kernels(case: Case) -> Iterator[None]:
    """Use what a GPU would use, in sizes."""
    with contextlib.ExitStack() as stack:
        replace = stack.enter_context
        replace(patch.object(forward, "save_on_cpu", SaveOnHost))
        if case.attention == "varlen":
            ragged = attention._attend_ragged  # noqa: SLF001 - chosen for a GPU only
            replace(patch.object(attention, "_attend_by_run", ragged))
        if case.rule == "kernel":
            name = "torch_chunk_gated_delta_rule"
            replace(patch.object(modeling_qwen3_5, name, delta_rule.simulate))
        yield


# --------------------------------------------------------------------------- a rank
def make_model(case: Case) -> Any:
    """Make the model of a rank on the meta device, as `load_model` does."""
    config = make_config(case)
    compute = torch.bfloat16 if case.lora and case.compute else torch.float32
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=compute)  # type: ignore[no-untyped-call]
    if case.lora:
        model = add_adapter(model, Lora(), 0)
    if case.ranks > 1:
        shard(model, None if case.compute is None else torch.bfloat16)
    return model


def make_config(case: Case) -> Any:
    """Make the configuration of a model, with fewer layers if the case has fewer."""
    config = MODELS[case.model]()
    if case.layers:
        config.num_hidden_layers = case.layers
        config.layer_types = config.layer_types[: case.layers]
    return config


def make_settings(case: Case) -> GrpoConfig:
    """Return the settings of the update."""
    return GrpoConfig(
        autocast=case.compute,
        gradient_checkpointing=True,
        offload_activations=case.offload,
        micro_tokens=case.tokens,
        tree_packing="auto" if case.attention == "varlen" else False,
    )


def make_rows(case: Case) -> list[Row]:
    """Return a trace of each rank and pass; all tokens but the first are trained."""
    zeros = np.zeros(case.tokens, np.float32)
    return [
        Row(
            Sample(
                input_ids=np.full(case.tokens, number, np.int32),
                loss_mask=np.arange(case.tokens) > 0,
                logprobs=zeros,
                versions=zeros.astype(np.int32),
                advantages=zeros + 1,
                temperatures=zeros + 1,
                group="group",
                session=str(number),
            ),
            weight=1.0,
        )
        for number in range(case.ranks * case.passes)
    ]


def measure(case: Case) -> Measured:
    """Measure the second update; the first makes the optimizer's state."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.ranks)
    try:
        model = make_model(case)
        with replace_kernels(case), FakeTensorMode(allow_non_fake_inputs=True), Values():
            model._apply(lambda tensor: torch.empty_like(tensor, device="cpu"))  # noqa: SLF001
            if case.ranks == 1:
                get_base_model(model).tie_weights()  # `_apply` has made two of a tied weight
            trainer = Grpo(model, make_settings(case))
            trainer.apply(make_rows(case))
            gc.collect()
            tracker = Tracker()
            tracker.track_external(model, trainer.optimizer)
            with tracker:
                trainer.apply(make_rows(case))
            peaks = tracker.get_tracker_snapshot("peak")
    finally:
        dist.destroy_process_group()
    totals = {device.type: snapshot["Total"] for device, snapshot in peaks.items()}
    return Measured(totals["cpu"], totals.get("meta", 0))


def plan(case: Case) -> Memory:
    """Return what the formulas say."""
    shape = measure_shape(make_config(case), case.model, Lora() if case.lora else None)
    forward = Pass(
        tokens=case.tokens,
        chunk=make_settings(case).logits_chunk,
        checkpointing=True,
        offload=case.offload,
        alone=case.passes == 1,
        foreach=False,
    )
    precision = choose_precision(compute=case.compute, sharded=case.ranks > 1, lora=case.lora)
    return estimate_memory(shape, precision, case.ranks, forward)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS)
    for name in ("ranks", "tokens", "layers", "passes"):
        parser.add_argument(f"--{name}", type=int, default=Case._field_defaults[name])
    for name in ("offload", "lora"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--attention", choices=("varlen", "sdpa"), default="varlen")
    parser.add_argument("--rule", choices=("kernel", "torch"), default="kernel")
    options = vars(parser.parse_args())
    if options["compute"] == "float32":
        options["compute"] = None
    cases = TABLE if options["model"] is None else (Case(**options),)
    print(
        f"{'model':12}{'ranks':>6}{'tokens':>8}  {'':14}{'planned':>8}{'measured':>9}{'ratio':>7}"
    )
    for case in cases:
        began = time.perf_counter()
        planned = plan(case)
        found = measure(case)
        kind = "+".join(name for name in ("lora", "offload") if getattr(case, name))
        if case.passes > 1:
            kind += f" {case.passes} passes"
        print(
            f"{case.model:12}{case.ranks:6}{case.tokens:8}  {kind:14}"
            f"{planned.total / GIB:8.1f}{found.gpu / GIB:9.1f}{planned.total / found.gpu:7.3f}"
            f"   host {planned.host / GIB:.2f} {found.host / GIB:.2f}"
            f"   peak: {planned.moment}; {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
