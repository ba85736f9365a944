"""Speed at which a trainer writes its weights for engines.

    python benchmarks/training/publish.py [--ranks 1] [--experts 0] [--folder /dev/shm]

A model of random weights is trained in float32 and published in bfloat16 and in float32, in the
names of its source, as after each step of `tugline train`: gathered layer by layer, converted, and
written by all ranks. The time is from the first byte to the complete folder, the best of several.
Loading by an engine is not part of it. Ranks use gloo and one core each.
"""

# ruff: noqa: INP001, T201 - a script that prints
import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from tugline.trainers.lora import write_trained
from tugline.trainers.models import Placement, load_model

ROUNDS = 4


def make_source(_rank: int, folder: Path, experts: int) -> None:
    """Write the source: about 190 million weights, dense or with experts."""
    sizes = {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    model: transformers.PreTrainedModel
    if experts:
        sizes |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")


def publish(rank: int, world: int, source: Path, target: Path) -> None:
    """Publish as one rank; rank 0 writes the figures."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{source}/meeting", rank=rank, world_size=world
    )
    model = load_model(source, Placement(torch.device("cpu"), sharded=world > 1)).model
    figures = {}
    for dtype in ("bfloat16", "float32"):
        best = float("inf")
        for number in range(ROUNDS):
            folder = target / f"{dtype}{number}"
            if rank == 0:
                folder.mkdir()
            dist.barrier()
            began = time.perf_counter()
            write_trained(folder, model, source, dtype)
            best = min(best, time.perf_counter() - began)
            dist.barrier()
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(folder)
        figures[dtype] = {"bytes": size, "seconds": best, "gb_per_s": size / best / 1e9}
    if rank == 0:
        (source / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Speed of publishing weights, trainer's side.")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))  # noqa: S108 - in memory
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as source,
        tempfile.TemporaryDirectory(dir=options.folder) as target,
    ):
        mp.spawn(make_source, args=(Path(source), options.experts), nprocs=1)
        mp.spawn(publish, args=(options.ranks, Path(source), Path(target)), nprocs=options.ranks)
        figures = json.loads((Path(source) / "figures.json").read_text("utf-8"))
    if options.json:
        print(json.dumps(figures))
        return
    for dtype, each in figures.items():
        print(
            f"{options.ranks} ranks, {options.experts} experts, {dtype}:"
            f" {each['bytes'] / 1e6:,.0f} MB in {each['seconds']:.2f} s,"
            f" {each['gb_per_s']:.2f} GB/s"
        )


if __name__ == "__main__":
    main()
