"""The published rule beside ours, on the cases that break it; the docs have the table."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from canonical import Canonical

from calls import make_call as call
from drawn_sessions import whole
from tugline.traces.base import PrefixMerging, count_calls
from tugline.types import Call, Finish, Reason, Trace

END, OTHER_END, HEAD = 1, 2, 3
PROMPT = [10, 11, 12, 13, END, HEAD]
TAIL = [20, 21, END, HEAD]
"""A tool's result, and the head of the next answer."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "trajectories.md"


def answer(number: int, end: int = END) -> list[int]:
    """Ten sampled tokens: three of text, six of a tool call, and the end of the turn."""
    return [1000 + 10 * number + at for at in range(9)] + [end]


def growing(answers: Sequence[list[int]], echoes: Sequence[list[int]], **how: object) -> list[Call]:
    """Each prompt is the one before, the echo of its answer, and a tool's result."""
    calls, prompt = [], PROMPT
    for number, (sampled, echo) in enumerate(zip(answers, echoes, strict=True)):
        calls.append(call(number, prompt, sampled, **how))
        prompt = [*prompt, *echo, *TAIL]
    return calls


def straight() -> list[Call]:
    """Nothing special: six turns, echoed as they were sampled."""
    answers = [answer(number) for number in range(6)]
    return growing(answers, answers)


def repeated() -> list[Call]:
    """Turn 3 of 6 asks what turn 1 asked; the work goes on from turn 2."""
    answers = [answer(number) for number in range(5)]
    first, second, *rest = growing(answers, answers)
    stray = call(2, PROMPT, answer(7))
    later = [msgspec.structs.replace(one, number=one.number + 1) for one in rest]
    return [first, second, stray, *later]


def mixed_ends() -> list[Call]:
    """Tool calls end with one id, texts with another, as in Llama's and gpt-oss's formats."""
    answers = [answer(number, (OTHER_END, END)[number % 2]) for number in range(6)]
    return growing(answers, answers)


def truncated() -> list[Call]:
    """Every answer is cut for length; the template closes it where it is echoed."""
    answers = [answer(number)[:9] for number in range(6)]
    return growing(answers, [[*one, END] for one in answers], finish=Finish.LENGTH)


def rewritten() -> list[Call]:
    """The harness sends its own answers back in other words."""
    answers = [answer(number) for number in range(6)]
    return growing(answers, [[500, 501, *one[3:]] for one in answers])


def two_items() -> list[Call]:
    """Text and tool call come back as two items, rendered as two turns of the assistant."""
    answers = [answer(number) for number in range(6)]
    return growing(answers, [[*one[:3], END, HEAD, *one[3:]] for one in answers])


def deleted() -> list[Call]:
    """The first answer was malformed: its turn is gone, a complaint stands in its place."""
    answers = [answer(number) for number in range(6)]
    return growing(answers, [[], *answers[1:]])


CASES = {
    "nothing special": straight,
    "identical prompt at turns 1 and 3": repeated,
    "mixed end-of-turn ids": mixed_ends,
    "every answer cut for length": truncated,
    "the harness rewrites its own turns": rewritten,
    "text and tool call as two items": two_items,
    "a turn with a format error deleted": deleted,
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


def row(name: str) -> str:
    """What the page says of a case."""
    calls = CASES[name]()
    theirs, ledger, _ = Canonical().build(calls)
    ours, own, _ = PrefixMerging().build(calls)
    cells = (
        ledger.sampled,
        ledger.trained,
        in_context(theirs, calls),
        own.trained,
        in_context(ours, calls),
        len(ours),
    )
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


@pytest.mark.parametrize("name", CASES)
def test_the_page_tells_what_each_rule_keeps(name: str) -> None:
    """Every figure of the table is computed here; ours trains every token, in its context."""
    calls = CASES[name]()
    ours, ledger, _ = PrefixMerging().build(calls)
    assert ledger.trained == ledger.sampled == in_context(ours, calls)
    assert row(name) in PAGE.read_text(encoding="utf-8"), row(name)


def test_the_published_rule_stitches_raw_answers_to_rendered_tails() -> None:
    """What the prompt has up to the first end of turn is taken for the answer, whatever it is."""
    calls = [
        call(0, [10, HEAD], [30, 31, END]),
        call(1, [10, HEAD, 40, 41, 42, END, 20, HEAD], [32, END]),
    ]
    (trace,), ledger, _ = Canonical().build(calls)
    assert trace.ids.tolist() == [10, HEAD, 30, 31, END, 20, HEAD, 32, END]
    assert trace.mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert [(span.call, span.start, span.end) for span in trace.spans] == [(0, 2, 5), (1, 7, 9)]
    assert not trace.exact
    assert ledger.trained == 5


def test_a_failed_split_loses_the_rest_of_the_chain() -> None:
    """The call whose prompt holds no end of turn and all after it are dropped, by name."""
    calls = [
        call(0, [10], [30, END]),
        call(1, [10, 30], [31, END]),
        call(2, [10, 30, 31, END, 20], [32, END]),
    ]
    traces, ledger, dropped = Canonical().build(calls)
    assert [trace.ids.tolist() for trace in traces] == [[10, 30, END]]
    assert ledger.dropped == {Reason.UNMERGED: 4}
    assert [one.dropped for one in count_calls(calls, traces, dropped).values()] == [
        {},
        {Reason.UNMERGED: 2},
        {Reason.UNMERGED: 2},
    ]
