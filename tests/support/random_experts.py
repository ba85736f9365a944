"""Random sessions of a mixture-of-experts model whose engine sometimes computes a prefix anew.

The experts of a token follow from its id, its position and the state of the engine, so that a
prefix computed again in another state has other experts at some of its tokens.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from support.random_sessions import SESSIONS, RandomSession, whole
from tugline.types import Call, Experts, Kept, MaskedSpan, Reason, Sampling

LAYERS = 2
TOP_K = 2
COUNT = 300


def choose(ids: list[int], state: int) -> Experts:
    """Experts of tokens in a state of the engine, of the smallest type that holds them."""
    rows = np.zeros((len(ids), LAYERS, TOP_K), np.int64)
    for at, token in enumerate(ids):
        other = state * (at % 3 == 1)
        for layer in range(LAYERS):
            first = 7 * token + at + layer + 5 * other
            rows[at, layer] = first % COUNT, (first + 1) % COUNT
    wide = rows.size and rows.max() > 255
    return rows.astype(np.uint16 if wide else np.uint8)


def _add(call: Call, draw: st.DrawFn, state: int) -> Call:
    """Return a call with experts, complete or not, and with sets for its answer."""
    count = len(call.sampled_ids)
    rows = choose(whole(call)[:-1], state)
    way = draw(st.integers(0, 5))
    masked: tuple[MaskedSpan, ...] = ()
    known = count
    if way == 1 and count:  # the last reports are missing
        known = draw(st.integers(0, count - 1))
        masked = (MaskedSpan(Reason.NO_ROUTES, known, count),)
        rows = rows[: len(call.prompt_ids) + max(0, known - 1)]
    elif way == 2 and count > 1:  # the beginning was computed with others
        masked = (MaskedSpan(Reason.ROUTES_CHANGED, 0, 1),)
    sets = [sorted({token, draw(st.integers(0, 9))}) for token in call.sampled_ids.tolist()]
    truncated = draw(st.booleans())
    return replace(
        call,
        experts=rows if known and len(rows) else None,
        masked=masked,
        kept=Kept.of(sets) if truncated else None,
        sampling=Sampling(top_p=0.5) if truncated else Sampling(),
    )


@st.composite
def sessions_with_experts(draw: st.DrawFn) -> RandomSession:
    """Sessions in which every call with ids has experts, or its tokens are masked."""
    drawn = draw(SESSIONS)
    state = 0
    calls = {}
    for call in sorted(drawn.calls, key=lambda call: call.number):
        state = draw(st.integers(0, 1)) if draw(st.integers(0, 3)) == 3 else state
        calls[call.number] = call if call.mode == "text" else _add(call, draw, state)
    return drawn._replace(calls=[calls[call.number] for call in drawn.calls])


SESSIONS_WITH_EXPERTS = sessions_with_experts()
