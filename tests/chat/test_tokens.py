"""Sequences that share their ids behave as lists that share nothing."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tugline.chat.tokens import TokenSequence
from tugline.types import Ids

IDS = st.lists(st.sampled_from([0, 1, 10, 11, 12, 101, 110, 151_643]), max_size=6)


def array(ids: list[int]) -> Ids:
    """Ids as the array in which an engine's answer has them."""
    return np.array(ids, np.int32)


@given(data=st.data())
def test_sequences_are_as_lists(data: st.DataObject) -> None:
    """Ids, digits and common beginnings are those of lists, however sequences were built."""
    first = data.draw(IDS)
    made = [(TokenSequence(array(first)), first)]
    for _ in range(data.draw(st.integers(0, 12))):
        tokens, ids = data.draw(st.sampled_from(made))
        if data.draw(st.booleans()):
            more = data.draw(IDS)
            made.append((tokens.extend(array(more)), ids + more))
        else:
            length = data.draw(st.integers(0, len(ids)))
            made.append((tokens.truncate(length), ids[:length]))
    for tokens, ids in made:
        assert len(tokens) == len(ids)
        assert json.loads(b"".join(tokens.to_json(b"[", b"]"))) == ids
        assert tokens.to_array().tolist() == ids
        count = data.draw(st.integers(0, len(ids) + 2))
        assert tokens.to_array(count).tolist() == ids[max(0, len(ids) - count) :]
        other, others = data.draw(st.sampled_from(made))
        alike = [a == b for a, b in zip(ids, others, strict=False)]
        shared = next((at for at, same in enumerate(alike) if not same), len(alike))
        assert tokens.shared_prefix(other) == other.shared_prefix(tokens) == shared
