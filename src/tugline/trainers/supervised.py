"""Conversations of the key `supervised`, whose answers are trained beside the sessions of a step.

The rows of a step depend only on the configuration and its number: every row is used once in each
pass over all of them. So a resumed run takes the same rows.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path

from transformers import AutoConfig

from tugline.atomic import read_or_make
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import UsageError
from tugline.launch.engine import make_rendering
from tugline.trainers.config import TrainConfig
from tugline.trainers.sft import read_set
from tugline.types import Sample

_DIGEST = "supervised.sha256"
"""File of a run's folder with the digest of the rows."""


class SupervisedRows:
    """The rows of a run, of which each step takes some; none without `supervised`."""

    def __init__(self, samples: Sequence[Sample], per_step: int, seed: int) -> None:
        self.samples = samples
        self.per_step = per_step
        self._seed = seed

    def choose(self, step: int) -> list[Sample]:
        """Return the rows of a step, counted from 1."""
        count = len(self.samples)
        places = range((step - 1) * self.per_step, step * self.per_step)
        return [self.samples[_shuffle(count, f"{self._seed}/{n // count}")[n % count]]
                for n in places]  # fmt: skip

    def store(self, folder: Path) -> None:
        """Store the digest of the rows. Raises `UsageError` if an earlier start had others."""
        if not self.samples:
            return
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        if read_or_make(folder / _DIGEST, digest.hexdigest) != digest.hexdigest():
            msg = f"the rows of supervised.data have changed since {folder} was started"
            raise UsageError(f"{msg}. Restore them, or choose another --out")


@lru_cache(maxsize=2)
def _shuffle(count: int, seed: str) -> Sequence[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def read_supervised(config: TrainConfig) -> SupervisedRows:
    """Read the rows of a run; of the model, only its configuration and tokenizer are read.

    Raises `UsageError` for a file that is no data set, for rows that are longer than the window,
    and if no row has an answer.
    """
    if config.supervised is None or config.model is None:
        return SupervisedRows((), 0, 0)
    text = AutoConfig.from_pretrained(config.model, local_files_only=True).get_text_config()
    window = config.context or int(text.max_position_embeddings)
    tokenizer = Tokenizer.load(config.model)
    make = cache(partial(make_rendering, config.engine, tokenizer, str(text.model_type)))
    samples, left_out = read_set(config.supervised.data, tokenizer, make, window)
    if left_out["too_long"]:
        total = len(samples) + left_out.total()
        msg = f"supervised.data: {left_out['too_long']} of {total} rows are longer than the window"
        raise UsageError(f"{msg} of {window} tokens; remove or shorten them, or raise `window`")
    if not samples:
        raise UsageError("supervised.data has no row with an answer to train on")
    return SupervisedRows(samples, config.supervised.rows, config.schedule.seed)
