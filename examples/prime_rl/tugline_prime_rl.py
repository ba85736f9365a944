"""Write graded groups as batch files for prime-rl's trainer.

python examples/prime_rl/tugline_prime_rl.py OUTPUT_DIR --groups 32 --ranks 8 --seq-len 32768

The trainer runs with ``rollout_transport.type = "filesystem"`` and the same output folder and
waits for ``rollouts/step_N/rank_R.bin`` of its step. This script does not import prime-rl.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from tugline.exports.forms import drop_experts, drop_sets, place_experts
from tugline.stream import GradedGroup, GroupStream
from tugline.types import Kept, Sample

WRITTEN = "groups.json"
"""File with the ids of a step's groups; written after all batches of the step."""
NO_SETS = (
    "--kept hold writes them for a trainer that reads `sampling_mask` (prime-rl after 0.8.0); "
    "--kept mask leaves such tokens untrained"
)


class Form(NamedTuple):
    """What a file holds of what decided a token besides the logits."""

    experts: bool = True
    """Whether experts are written, for a trainer with ``enable_router_replay``."""
    kept: Literal["refuse", "hold", "mask"] = "refuse"
    """What becomes of tokens that were sampled from a part of the vocabulary."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the model's layers without a router."""

    def fit(self, sample: Sample) -> Sample:
        """Return the sample as the file can hold it. Raises `UsageError`."""
        if not self.experts:
            sample = drop_experts(sample, refuse=None)
        if self.kept == "hold":
            return sample
        return drop_sets(sample, refuse=NO_SETS if self.kept == "refuse" else None)


DEFAULT = Form()


class RoutedExperts(msgspec.Struct, array_like=True):
    """Experts of all tokens; `shape` is tokens, all layers, top-k."""

    data: bytes
    shape: list[int]
    dtype: str


class SamplingMask(msgspec.Struct, array_like=True):
    """Kept sets, joined, and the size of each token's own, 0 for none; both int32."""

    ids: bytes
    counts: bytes


class MicroBatch(msgspec.Struct, array_like=True):
    """Concatenated sequences; the files have the fields in prime-rl's order, without names.

    Lists have a value per token, except for lists of lengths, which have one per sequence. Fields
    that are always None are for reference models, images and other losses.
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
    routed_experts: RoutedExperts | None = None
    mm_kwargs: None = None
    mm_token_type_ids: None = None
    rl_weights: None = None
    ce_weights: None = None
    ref_kl_weights: None = None


class MaskedMicroBatch(MicroBatch, array_like=True, kw_only=True):
    """A micro-batch with kept sets, which prime-rl reads since its pull request 3431."""

    sampling_mask: SamplingMask


def make_micro_batch(samples: Sequence[Sample], form: Form = DEFAULT) -> MicroBatch:
    """Concatenate sequences to a micro-batch; all have experts, or none."""

    def join(parts: Iterator[np.ndarray]) -> list:
        return np.concatenate(list(parts)).tolist()

    lengths = [len(sample.input_ids) for sample in samples]
    batch = MicroBatch(
        input_ids=join(sample.input_ids for sample in samples),
        loss_mask=join(sample.loss_mask for sample in samples),
        advantages=join(sample.advantages for sample in samples),
        inference_logprobs=join(sample.logprobs for sample in samples),
        position_ids=join(np.arange(length) for length in lengths),
        sequence_lengths=lengths,
        temperatures=join(shift_temperatures(sample) for sample in samples),
        env_names=[sample.harness for sample in samples for _ in sample.input_ids],
        seq_lens=list(lengths),
        routed_experts=join_experts(samples, form),
    )
    if all(sample.kept is None for sample in samples):
        return batch
    return MaskedMicroBatch(**msgspec.structs.asdict(batch), sampling_mask=join_sets(samples))


def join_experts(samples: Sequence[Sample], form: Form) -> RoutedExperts | None:
    """Return the experts of all tokens, 0 where none are known."""
    spread = [
        place_experts(sample.experts, len(sample.input_ids), form.dense_layers)
        for sample in samples
        if sample.experts is not None
    ]
    if not spread:
        return None
    joined = np.concatenate(spread)
    return RoutedExperts(joined.tobytes(), list(joined.shape), str(joined.dtype))


def join_sets(samples: Sequence[Sample]) -> SamplingMask:
    """Return the sets of trained tokens, at their own positions: prime-rl shifts them."""
    sets = [
        (sample.kept or Kept.none(len(sample.input_ids))).select(sample.loss_mask)
        for sample in samples
    ]
    ids = np.concatenate([each.ids for each in sets])
    sizes = np.concatenate([each.sizes for each in sets])
    return SamplingMask(ids.tobytes(), sizes.astype(np.int32).tobytes())


def shift_temperatures(sample: Sample) -> np.ndarray:
    """Return at each position the temperature of the next token.

    prime-rl divides the logits of a position, which are those of the next token, by the temperature
    of the position. Tokens without a temperature are not trained; 1 keeps their logits finite.
    """
    shifted = np.append(sample.temperatures[1:], np.float32(1))
    return np.where(shifted > 0, shifted, np.float32(1))


def pack(
    samples: Sequence[Sample], seq_len: int, ranks: int, form: Form = DEFAULT
) -> list[list[MicroBatch]]:
    """Pack samples into equally many micro-batches per rank, of at most `seq_len` tokens each."""
    bins: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.input_ids)):
        left = seq_len - len(sample.input_ids)
        routed = sample.experts is not None
        alike = (each for each in bins if (each[0].experts is not None) == routed)
        fitting = (each for each in alike if sum(len(s.input_ids) for s in each) <= left)
        target = next(fitting, None)
        if target is None:
            bins.append([sample])
        else:
            target.append(sample)
    batches = [make_micro_batch(each, form) for each in bins]
    batches.sort(key=lambda batch: -len(batch.input_ids))
    if padding := -len(batches) % ranks:
        last = batches[-1]
        masked = msgspec.structs.replace(last, loss_mask=[False] * len(last.input_ids))
        batches += [masked] * padding
    return [batches[rank::ranks] for rank in range(ranks)]


class StepWriter:
    """Writes steps in order, beginning with the first incomplete one."""

    def __init__(self, output: Path, seq_len: int, ranks: int, form: Form = DEFAULT) -> None:
        self._folder, self._seq_len, self._ranks = output / "rollouts", seq_len, ranks
        self._form = form
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

        Equal groups give equal bytes, so an interrupted step can be written again. Raises
        `UsageError` for samples that the files cannot hold.
        """
        samples = [self._form.fit(sample) for group in groups for sample in group.samples]
        samples = [sample for sample in samples if sample.trained]
        fitting = [sample for sample in samples if len(sample.input_ids) <= self._seq_len]
        folder = self._path(self.step)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, batches in enumerate(self._pack(fitting)):
            replace_file(folder / f"rank_{rank}.bin", msgspec.msgpack.encode(batches))
        replace_file(folder / WRITTEN, msgspec.json.encode([group.id for group in groups]))
        self.step += 1
        return len(samples) - len(fitting)

    def _pack(self, samples: Sequence[Sample]) -> list[list[MicroBatch]]:
        return pack(samples, self._seq_len, self._ranks, self._form)


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
    parser.add_argument("--no-experts", action="store_true", help="write no experts")
    parser.add_argument(
        "--kept", choices=["refuse", "hold", "mask"], default="refuse",
        help="tokens of top-p, top-k and min-p: stop, write their sets, or leave them untrained",
    )  # fmt: skip
    parser.add_argument(
        "--dense-layers", type=int, nargs="*", default=[], help="layers without a router"
    )
    options = parser.parse_args()
    form = Form(not options.no_experts, options.kept, tuple(options.dense_layers))
    writer = StepWriter(options.output, options.seq_len, options.ranks, form)
    with GroupStream(options.consumer, follow=not options.no_follow) as stream:
        groups = iter(stream)
        while len(taken := take(groups, options.groups, writer)) == options.groups:
            left_out = writer.write(taken)
            stream.acknowledge(taken[-1])
            print(f"step {writer.step - 1}: {options.groups} groups, {left_out} traces too long")


if __name__ == "__main__":
    main()
