"""Write graded groups as the training batches that prime-rl's trainer reads from files.

python examples/prime_rl/tugline_prime_rl.py OUTPUT_DIR --groups 32 --ranks 8 --seq-len 32768

The trainer runs with ``rollout_transport.type = "filesystem"`` and the same output folder and
waits for ``rollouts/step_N/rank_R.bin`` of its step. This script needs nothing of prime-rl.
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
"""Beside the batches of a step, once all of them are there: the groups that are in it."""


class MicroBatch(msgspec.Struct, array_like=True):
    """Sequences side by side, in prime-rl's order of fields, which is all that the files have.

    A list has a value for each token, and those of lengths one for each sequence. What may be
    None is for reference models, routing, images and other losses.
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
    """Return these sequences, one after the other."""

    def join(parts: Iterator[np.ndarray]) -> list:
        return np.concatenate(list(parts)).tolist()

    lengths = [len(one.input_ids) for one in samples]
    return MicroBatch(
        input_ids=join(one.input_ids for one in samples),
        loss_mask=join(one.loss_mask for one in samples),
        advantages=join(one.advantages for one in samples),
        inference_logprobs=join(one.logprobs for one in samples),
        position_ids=join(np.arange(length) for length in lengths),
        sequence_lengths=lengths,
        temperatures=join(shift_temperatures(one) for one in samples),
        env_names=[one.harness for one in samples for _ in one.input_ids],
        seq_lens=list(lengths),
    )


def shift_temperatures(sample: Sample) -> np.ndarray:
    """Return at each place the temperature of the token after it.

    prime-rl divides the logits of a place by its temperature, and they are of the next token. Where
    no temperature is known nothing is trained, and 1 keeps the logits finite.
    """
    shifted = np.append(sample.temperatures[1:], np.float32(1))
    return np.where(shifted > 0, shifted, np.float32(1))


def pack(samples: Sequence[Sample], seq_len: int, ranks: int) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank: as many for each, none above `seq_len` tokens."""
    bins: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda one: -len(one.input_ids)):
        room = seq_len - len(sample.input_ids)
        fits = (one for one in bins if sum(len(s.input_ids) for s in one) <= room)
        found = next(fits, None)
        if found is None:
            bins.append([sample])
        else:
            found.append(sample)
    batches = [make_micro_batch(one) for one in bins]
    batches.sort(key=lambda one: -len(one.input_ids))
    if spare := -len(batches) % ranks:
        last = batches[-1]
        untrained = msgspec.structs.replace(last, loss_mask=[False] * len(last.input_ids))
        batches += [untrained] * spare
    return [batches[rank::ranks] for rank in range(ranks)]


class StepWriter:
    """Writes one step after the other, and begins with the first that is not complete."""

    def __init__(self, output: Path, seq_len: int, ranks: int) -> None:
        self._folder, self._seq_len, self._ranks = output / "rollouts", seq_len, ranks
        self.step = next(n for n in itertools.count(1) if not (self._path(n) / WRITTEN).exists())
        last = self._path(self.step - 1) / WRITTEN
        self.known: frozenset[str] = frozenset(
            msgspec.json.decode(last.read_bytes()) if last.exists() else ()
        )
        """Groups of the step before, which may not have been acknowledged."""

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def write(self, groups: Sequence[GradedGroup]) -> int:
        """Write a step of these groups, and return how many traces were too long for it.

        The same groups make the same bytes, so a step that was cut short is written again.
        """
        samples = [sample for group in groups for sample in group.samples]
        fitting = [one for one in samples if len(one.input_ids) <= self._seq_len]
        folder = self._path(self.step)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, batches in enumerate(pack(fitting, self._seq_len, self._ranks)):
            replace_file(folder / f"rank_{rank}.bin", msgspec.msgpack.encode(batches))
        replace_file(folder / WRITTEN, msgspec.json.encode([group.id for group in groups]))
        self.step += 1
        return len(samples) - len(fitting)


def replace_file(path: Path, data: bytes) -> None:
    """Give a file its name once it is whole."""
    part = path.with_name(f"{path.name}.tmp")
    part.write_bytes(data)
    part.rename(path)


def take(groups: Iterator[GradedGroup], count: int, writer: StepWriter) -> list[GradedGroup]:
    """Return the next groups that a step can learn from, in their order."""

    def teaches(group: GradedGroup) -> bool:
        return group.id not in writer.known and any(one.advantages.any() for one in group.samples)

    return list(itertools.islice(filter(teaches, groups), count))


def main() -> None:
    """Write steps until the stream ends, each acknowledged once it is on disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="output_dir of the trainer")
    parser.add_argument("--groups", type=int, required=True, help="of a step")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the trainer")
    parser.add_argument("--seq-len", type=int, required=True, help="of a micro-batch")
    parser.add_argument("--consumer", default="prime-rl")
    parser.add_argument("--no-follow", action="store_true", help="end with the newest group")
    given = parser.parse_args()
    writer = StepWriter(given.output, given.seq_len, given.ranks)
    with GroupStream(given.consumer, follow=not given.no_follow) as stream:
        groups = iter(stream)
        while len(taken := take(groups, given.groups, writer)) == given.groups:
            left_out = writer.write(taken)
            stream.acknowledge(taken[-1])
            print(f"step {writer.step - 1}: {given.groups} groups, {left_out} traces too long")


if __name__ == "__main__":
    main()
