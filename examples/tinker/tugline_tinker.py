"""Graded groups of Tugline as training data of Tinker, for its policy-gradient losses."""

from collections.abc import Iterable

import numpy as np
from tinker import Datum, ModelInput

from tugline.errors import UsageError
from tugline.exports.forms import drop_experts, drop_sets
from tugline.stream import GradedGroup
from tugline.types import Sample

NO_EXPERTS = "Tinker has no form for them; pass experts=False to train without"
NO_SETS = "Tinker has no form for them; pass kept=False to leave such tokens untrained"


def make_data(
    groups: Iterable[GradedGroup], *, experts: bool = True, kept: bool = True
) -> list[Datum]:
    """Return a datum for each trace, except for groups without a signal, which train nothing.

    Raises `UsageError` for traces with experts or kept sets, which Tinker does not replay. Without
    `experts`, traces are trained without; without `kept`, tokens with a set are not trained.
    """
    samples = [sample for group in groups for sample in group.samples]
    samples = [drop_experts(each, refuse=NO_EXPERTS if experts else None) for each in samples]
    samples = [drop_sets(each, refuse=NO_SETS if kept else None) for each in samples]
    return [make_datum(sample) for sample in samples if sample.advantages.any()]


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
