"""The published rule beside ours, on the cases that break it; the docs have the table."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from canonical import Canonical

from calls import make_call as call
from drawn_sessions import whole
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Finish, Trace

END, OTHER_END, HEAD = 1, 2, 3
PROMPT = [10, 11, 12, 13, END, HEAD]
TAIL = [20, 21, END, HEAD]
"""A tool's result, and the head of the next answer."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "trajectories.md"


def answer(number: int, end: int = END) -> list[int]:
    """Ten sampled tokens: three of text, six of a tool call, and the end of the turn."""
    return [1000 + 10 * number + at for at in range(9)] + [end]


ANSWERS = [answer(number) for number in range(6)]


def growing(
    answers: Sequence[list[int]] = ANSWERS,
    echo: Callable[[list[int]], list[int]] = list,
    **how: object,
) -> list[Call]:
    """Each prompt is the one before, the echo of its answer, and a tool's result."""
    calls, prompt = [], PROMPT
    for number, sampled in enumerate(answers):
        calls.append(call(number, prompt, sampled, **how))
        prompt = [*prompt, *echo(sampled), *TAIL]
    return calls


def repeated() -> list[Call]:
    """Turn 3 of 6 asks what turn 1 asked; the work goes on from turn 2."""
    first, second, *rest = growing(ANSWERS[:5])
    stray = call(2, PROMPT, answer(7))
    later = [msgspec.structs.replace(one, number=one.number + 1) for one in rest]
    return [first, second, stray, *later]


CASES = {
    "nothing special": growing(),
    "identical prompt at turns 1 and 3": repeated(),
    # Tool calls end with one id, texts with another, as in Llama's and gpt-oss's formats.
    "mixed end-of-turn ids": growing([answer(n, (OTHER_END, END)[n % 2]) for n in range(6)]),
    # The template closes them where they are echoed.
    "every answer cut for length": growing(
        [one[:9] for one in ANSWERS], lambda one: [*one, END], finish=Finish.LENGTH
    ),
    "the harness rewrites its own turns": growing(echo=lambda one: [500, 501, *one[3:]]),
    # They are rendered as two turns of the assistant.
    "text and tool call as two items": growing(echo=lambda one: [*one[:3], END, HEAD, *one[3:]]),
    # A complaint stands in the place of the first answer.
    "a turn with a format error deleted": growing(
        echo=lambda one: [] if one == ANSWERS[0] else one
    ),
}


def in_context(traces: Sequence[Trace], calls: Sequence[Call]) -> int:
    """Trained tokens whose context is, id for id, the one that they were sampled in."""
    by_number = {one.number: one for one in calls}
    return sum(
        trace.ids[:at].tolist() == whole(by_number[span.call])[:at]
        for trace in traces
        for span in trace.spans
        for at in range(span.start + 1, span.end + 1)
        if trace.mask[at - 1]
    )


@pytest.mark.parametrize("name", CASES)
def test_the_page_tells_what_each_rule_keeps(name: str) -> None:
    """Every figure of the table is computed here; ours trains every token, in its context."""
    calls = CASES[name]
    theirs, ledger, _ = Canonical().build(calls)
    ours, own, _ = PrefixMerging().build(calls)
    assert not any(trace.exact for trace in theirs)
    assert own.trained == own.sampled == ledger.sampled == in_context(ours, calls)
    kept = (ledger.sampled, ledger.trained, in_context(theirs, calls))
    row = " | ".join(map(str, (name, *kept, own.trained, in_context(ours, calls), len(ours))))
    assert f"| {row} |" in PAGE.read_text(encoding="utf-8"), row
