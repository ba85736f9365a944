"""Write graded groups as batch files for prime-rl's trainer.

python examples/prime_rl/tugline_prime_rl.py OUTPUT_DIR --groups 32 --ranks 8 --seq-len 32768

The trainer runs with ``rollout_transport.type = "filesystem"`` and the same output folder and
waits for ``rollouts/step_N/rank_R.bin`` of its step. This script does not import prime-rl.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from tugline.stream import GradedGroup, GroupStream
from tugline.types import Sample

WRITTEN = "groups.json"
"""File with the ids of a step's groups; written after all batches of the step."""


class MicroBatch(msgspec.Struct, array_like=True):
    """Concatenated sequences; the files have the fields in prime-rl's order, without names.

    Lists have a value per token, except for lists of lengths, which have one per sequence. Fields
    that are None are for reference models, routing, images and other losses.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: None = None
    routed_experts: None = None
    mm_kwargs: None = None
    mm_token_type_ids: None = None
    rl_weights: None = None
    ce_weights: None = None
    ref_kl_weights: None = None


def make_micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    """Concatenate sequences to a micro-batch."""

    def join(parts: Iterator[np.ndarray]) -> list:
        return np.concatenate(list(parts)).tolist()

    lengths = [len(sample.input_ids) for sample in samples]
    return MicroBatch(
        input_ids=join(sample.input_ids for sample in samples),
        loss_mask=join(sample.loss_mask for sample in samples),
        advantages=join(sample.advantages for sample in samples),
        inference_logprobs=join(sample.logprobs for sample in samples),
        position_ids=join(np.arange(length) for length in lengths),
        sequence_lengths=lengths,
        temperatures=join(shift_temperatures(sample) for sample in samples),
        env_names=[sample.harness for sample in samples for _ in sample.input_ids],
        seq_lens=list(lengths),
    )


def shift_temperatures(sample: Sample) -> np.ndarray:
    """Return at each position the temperature of the next token.

    prime-rl divides the logits of a position, which are those of the next token, by the temperature
    of the position. Tokens without a temperature are not trained; 1 keeps their logits finite.
    """
    shifted = np.append(sample.temperatures[1:], np.float32(1))
    return np.where(shifted > 0, shifted, np.float32(1))


def pack(samples: Sequence[Sample], seq_len: int, ranks: int) -> list[list[MicroBatch]]:
    """Pack samples into equally many micro-batches per rank, of at most `seq_len` tokens each."""
    bins: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.input_ids)):
        left = seq_len - len(sample.input_ids)
        fitting = (each for each in bins if sum(len(s.input_ids) for s in each) <= left)
        target = next(fitting, None)
        if target is None:
            bins.append([sample])
        else:
            target.append(sample)
    batches = [make_micro_batch(each) for each in bins]
    batches.sort(key=lambda batch: -len(batch.input_ids))
    if padding := -len(batches) % ranks:
        last = batches[-1]
        masked = msgspec.structs.replace(last, loss_mask=[False] * len(last.input_ids))
        batches += [masked] * padding
    return [batches[rank::ranks] for rank in range(ranks)]


class StepWriter:
    """Writes steps in order, beginning with the first incomplete one."""

    def __init__(self, output: Path, seq_len: int, ranks: int) -> None:
        self._folder, self._seq_len, self._ranks = output / "rollouts", seq_len, ranks
        self.step = next(n for n in itertools.count(1) if not (self._path(n) / WRITTEN).exists())
        last = self._path(self.step - 1) / WRITTEN
        self.known: frozenset[str] = frozenset(
            msgspec.json.decode(last.read_bytes()) if last.exists() else ()
        )
        """Groups of the previous step, which may not have been acknowledged."""

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def write(self, groups: Sequence[GradedGroup]) -> int:
        """Write a step of these groups; return the number of traces that were too long.

        Equal groups give equal bytes, so an interrupted step can be written again.
        """
        samples = [sample for group in groups for sample in group.samples]
        fitting = [sample for sample in samples if len(sample.input_ids) <= self._seq_len]
        folder = self._path(self.step)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, batches in enumerate(pack(fitting, self._seq_len, self._ranks)):
            replace_file(folder / f"rank_{rank}.bin", msgspec.msgpack.encode(batches))
        replace_file(folder / WRITTEN, msgspec.json.encode([group.id for group in groups]))
        self.step += 1
        return len(samples) - len(fitting)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    part = path.with_name(f"{path.name}.tmp")
    part.write_bytes(data)
    part.rename(path)


def take(groups: Iterator[GradedGroup], count: int, writer: StepWriter) -> list[GradedGroup]:
    """Return the next groups that have a signal, in order."""

    def has_signal(group: GradedGroup) -> bool:
        return group.id not in writer.known and any(
            sample.advantages.any() for sample in group.samples
        )

    return list(itertools.islice(filter(has_signal, groups), count))


def main() -> None:
    """Write steps until the stream ends; acknowledge each when it is on disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="output_dir of the trainer")
    parser.add_argument("--groups", type=int, required=True, help="groups per step")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer")
    parser.add_argument(
        "--seq-len", type=int, required=True, help="maximum tokens of a micro-batch"
    )
    parser.add_argument("--consumer", default="prime-rl")
    parser.add_argument("--no-follow", action="store_true", help="end with the newest group")
    options = parser.parse_args()
    writer = StepWriter(options.output, options.seq_len, options.ranks)
    with GroupStream(options.consumer, follow=not options.no_follow) as stream:
        groups = iter(stream)
        while len(taken := take(groups, options.groups, writer)) == options.groups:
            left_out = writer.write(taken)
            stream.acknowledge(taken[-1])
            print(f"step {writer.step - 1}: {options.groups} groups, {left_out} traces too long")


if __name__ == "__main__":
    main()
