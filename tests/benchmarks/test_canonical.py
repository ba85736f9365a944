"""The published merging rule and ours, on cases that break it; the docs have the table."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from canonical import Canonical

from support.calls import make_call as call
from support.random_sessions import whole
from tugline.traces.base import PrefixMerging
from tugline.types import Call, Finish, Trace

END, OTHER_END, HEAD = 1, 2, 3
PROMPT = [10, 11, 12, 13, END, HEAD]
TAIL = [20, 21, END, HEAD]
"""A tool's result, and the head of the next answer."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def answer(number: int, end: int = END) -> list[int]:
    """Ten sampled tokens: three of text, six of a tool call, and the end of the turn."""
    return [1000 + 10 * number + at for at in range(9)] + [end]


ANSWERS = [answer(number) for number in range(6)]


def growing(
    answers: Sequence[list[int]] = ANSWERS,
    echo: Callable[[list[int]], list[int]] = list,
    **how: object,
) -> list[Call]:
    """Calls whose prompts are the previous prompt, the echo of its answer, and a tool result."""
    calls, prompt = [], PROMPT
    for number, sampled in enumerate(answers):
        calls.append(call(number, prompt, sampled, **how))
        prompt = [*prompt, *echo(sampled), *TAIL]
    return calls


def repeated() -> list[Call]:
    """Turn 3 of 6 repeats the prompt of turn 1; later turns continue turn 2."""
    first, second, *rest = growing(ANSWERS[:5])
    repetition = call(2, PROMPT, answer(7))
    later = [msgspec.structs.replace(each, number=each.number + 1) for each in rest]
    return [first, second, repetition, *later]


CASES = {
    "nothing special": growing(),
    "identical prompt at turns 1 and 3": repeated(),
    # Tool calls end with one id, texts with another, as in Llama's and gpt-oss's formats.
    "mixed end-of-turn ids": growing([answer(n, (OTHER_END, END)[n % 2]) for n in range(6)]),
    # The template adds the missing end-of-turn id to their echoes.
    "every answer cut for length": growing(
        [ids[:9] for ids in ANSWERS], lambda ids: [*ids, END], finish=Finish.LENGTH
    ),
    "the harness rewrites its own turns": growing(echo=lambda ids: [500, 501, *ids[3:]]),
    # The template renders them as two assistant turns.
    "text and tool call as two items": growing(echo=lambda ids: [*ids[:3], END, HEAD, *ids[3:]]),
    # An error message replaces the first answer.
    "a turn with a format error deleted": growing(
        echo=lambda ids: [] if ids == ANSWERS[0] else ids
    ),
}


def in_context(traces: Sequence[Trace], calls: Sequence[Call]) -> int:
    """Number of trained tokens whose context is exactly that of their sampling."""
    by_number = {each.number: each for each in calls}
    return sum(
        trace.ids[:at].tolist() == whole(by_number[span.call])[:at]
        for trace in traces
        for span in trace.spans
        for at in range(span.start + 1, span.end + 1)
        if trace.mask[at - 1]
    )


@pytest.mark.parametrize("name", CASES)
def test_the_documented_table_of_both_rules_is_correct(name: str) -> None:
    """Each row of the table is computed here; our rule trains every token, in its context."""
    calls = CASES[name]
    theirs, ledger, _ = Canonical().build(calls)
    ours, own, _ = PrefixMerging().build(calls)
    assert not any(trace.exact for trace in theirs)
    assert own.trained == own.sampled == ledger.sampled == in_context(ours, calls)
    published = (ledger.sampled, ledger.trained, in_context(theirs, calls))
    row = " | ".join(map(str, (name, *published, own.trained, in_context(ours, calls), len(ours))))
    assert f"| {row} |" in PAGE.read_text(encoding="utf-8"), row
