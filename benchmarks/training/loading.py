"""Memory of a rank while it loads its shard of a model.

    python benchmarks/training/loading.py [--ranks 4] [--gib 1]

Makes a model of random bfloat16 weights, loads it on several ranks (gloo, on this machine) as
`tugline train` does with `fsdp: true`, and compares the largest growth of each rank's anonymous
memory (RssAnon) with the size of its shard in float32. Pages of the mapped files are not anonymous:
ranks of a machine share them, and the kernel drops them when memory is short.
"""

# ruff: noqa: INP001, T201 - a script that prints
import argparse
import json
import tempfile
import threading
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

MIB = 2**20


def make_model(folder: Path, size: int) -> None:
    """Write a Qwen3 model of about `size` bytes, in files of at most 200 MB."""
    config = transformers.Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=max(1, (size - 2 * 32_000 * 1024) // (2 * 15_728_640)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")


def read_anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The largest anonymous memory of this process while it is open."""

    def __enter__(self) -> Self:
        self.before = self.bytes = read_anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, read_anonymous())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.bytes = max(self.bytes, read_anonymous())


def load(rank: int, world: int, folder: Path) -> None:
    """Load the model as one rank; write its figures."""
    from tugline.trainers.models import Placement, load_model  # noqa: PLC0415 - before RSS is read

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world
    )
    dist.barrier()
    with Peak() as peak:
        model = load_model(folder, Placement(torch.device("cpu"), sharded=True)).model
    shard = sum(each.to_local().nbytes for each in model.parameters())
    growth = peak.bytes - peak.before
    report = {"shard_mib": shard / MIB, "growth_mib": growth / MIB, "ratio": growth / shard}
    (folder / f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Memory of a rank while it loads its shard.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the files")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mp.spawn(_make, args=(folder, int(options.gib * 2**30)), nprocs=1)
        mp.spawn(load, args=(options.ranks, folder), nprocs=options.ranks)
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / MIB
        ranks = [
            json.loads((folder / f"rank{rank}.json").read_text("utf-8"))
            for rank in range(options.ranks)
        ]
    if options.json:
        print(json.dumps({"files_mib": files, "ranks": ranks}))
        return
    print(f"files of {files:,.0f} MiB, {options.ranks} ranks")
    for rank, figures in enumerate(ranks):
        print(
            f"rank {rank}: shard {figures['shard_mib']:,.0f} MiB in float32, RssAnon"
            f" +{figures['growth_mib']:,.0f} MiB, ratio {figures['ratio']:.2f}"
        )


def _make(_rank: int, folder: Path, size: int) -> None:
    make_model(folder, size)


if __name__ == "__main__":
    main()
