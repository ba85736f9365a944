"""Graded groups of Tugline as training data of Tinker, for its policy-gradient losses."""

from collections.abc import Iterable

import numpy as np
from tinker import Datum, ModelInput

from tugline.errors import UsageError
from tugline.stream import GradedGroup
from tugline.types import Sample


def make_data(groups: Iterable[GradedGroup]) -> list[Datum]:
    """Return a datum for each trace, except for groups without a signal, which train nothing."""
    return [
        make_datum(sample)
        for group in groups
        for sample in group.samples
        if sample.advantages.any()
    ]


def make_datum(sample: Sample) -> Datum:
    """Convert a trace; targets are one token ahead of the input.

    An advantage of 0 excludes a token from the loss. Raises `UsageError` for tokens that were
    sampled at a temperature other than 1, which Tinker's forward pass does not support.
    """
    temperatures = set(sample.temperatures[sample.loss_mask].tolist())
    if temperatures - {1.0}:
        msg = f"session {sample.session} was sampled at temperature {temperatures}, must be 1"
        raise UsageError(msg)
    return Datum(
        model_input=ModelInput.from_ints(sample.input_ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": sample.input_ids[1:].astype(np.int64),
            "logprobs": sample.logprobs[1:],
            "advantages": sample.advantages[1:],
        },
    )
