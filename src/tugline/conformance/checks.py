"""What is asked of a harness, and the sessions that show it. Judging is pure.

Three sessions: a plain one of four turns, the same with faults at every turn, and one whose budget
ends in the middle; a fourth, slow one on demand. The first answer has reasoning, text and two tool
calls at once, which is what breaks histories.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tugline.conformance.cells import Cell
from tugline.conformance.rehearsal import Rehearsal, Stage
from tugline.conformance.script import Hitch, Turn
from tugline.types import Call, Outcome, TraceKind

INSTRUCTION = "Read one.txt and two.txt, then write both into both.txt."
FILES = {"one.txt": "walrus\n", "two.txt": "heron\n"}
SLOW = 1
"""The turn whose first words must leave before its last are sampled."""
_EARLY = 5
"""Parts of an answer that are more than its opening."""
_TOKEN_S = 0.03
_BUDGET = 2
_BUDGET_S = 90.0
_MOST_ASKED = 30
"""Requests after which a harness that got a budget's refusal counts as one that never stops."""


def script(cell: Cell) -> tuple[Turn, ...]:
    """Four turns, in the words of this harness's shell tool."""

    def run(command: str) -> tuple[str, dict[str, object]]:
        return cell.tool, {cell.argument: command, **cell.arguments}

    last = Turn("All done: both.txt holds both words.")
    if cell.ends_by_command:
        last = Turn("All done.", calls=(run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),))
    return (
        Turn(
            "First I read both files.",
            reasoning="They may be long. I look at each.",
            calls=(run("cat one.txt"), run("cat two.txt")),
        ),
        Turn(
            "Both files are short, so I write them into a third one, in the order I was given.",
            calls=(run("cat one.txt two.txt > both.txt"),),
        ),
        Turn(reasoning="I make sure.", calls=(run("cat both.txt"),)),
        last,
    )


def plain(cell: Cell) -> Stage:
    """Everything goes well; one turn is slow."""
    return Stage({INSTRUCTION: script(cell)}, FILES, {SLOW: Hitch(token_s=_TOKEN_S)})


def faulty(cell: Cell) -> Stage:
    """The engine refuses, then dies within an answer; then the line to the client breaks in one."""
    hitches = {0: Hitch(refuse=503), 1: Hitch(cut_after=12), 2: Hitch(token_s=_TOKEN_S)}
    return Stage({INSTRUCTION: script(cell)}, FILES, hitches, broken=frozenset({2}))


def short(cell: Cell) -> Stage:
    """The budget ends after two of four turns."""
    return Stage({INSTRUCTION: script(cell)}, FILES, max_turns=_BUDGET, timeout_s=_BUDGET_S)


def patient(cell: Cell) -> Stage:
    """The first token comes after 70 s, which is longer than some wait; then 30 s of answer."""
    hitches = {0: Hitch(first_s=70.0), 1: Hitch(token_s=0.5)}
    return Stage({INSTRUCTION: script(cell)}, FILES, hitches, timeout_s=240.0)


# --------------------------------------------------------------------------- judging
def main_calls(calls: Sequence[Call]) -> list[Call]:
    """The conversation itself, without side calls and abandoned answers."""
    return [
        call
        for call in calls
        if call.kind is not TraceKind.SIDE and call.outcome is Outcome.COMPLETE
    ]


def completes(cell: Cell, ran: Rehearsal) -> str | None:
    """Every turn was asked for and the program ended by itself."""
    turns = len(main_calls(ran.calls))
    if ran.exit.timed_out:
        return f"still running after {ran.exit.seconds:.0f} s and {turns} turns"
    if turns != len(script(cell)):
        return f"{turns} turns instead of {len(script(cell))}, {_ending(ran)}"
    return f"exit code {ran.exit.code}" if ran.exit.code else None


def tool_call_executed(_: Cell, ran: Rehearsal) -> str | None:
    """Both parallel calls and the later ones ran, and their results came back."""
    if ran.files.get("both.txt") != "".join(FILES.values()):
        return f"both.txt holds {ran.files.get('both.txt')!r}"
    results = " ".join(m.content for call in ran.calls[1:2] for m in call.messages)
    missing = [word for word in ("walrus", "heron") if word not in results]
    return f"the second request lacks the results {missing}" if missing else None


def streaming(_: Cell, ran: Rehearsal) -> str | None:
    """The slow turn's answer went out while it was sampled, not only its headers."""
    if len(ran.calls) <= SLOW:
        return f"only {len(ran.calls)} turns"
    call = ran.calls[SLOW]
    last = call.timings.last_token or 0.0
    parts = next((seen.chunks for seen in ran.seen if seen.request == call.request), [])
    if len(parts) == 1:
        return "the answer came whole"
    early = sum(at < last for at, _ in parts)
    if early < _EARLY:
        return f"{early} of {len(parts)} parts of the answer left before its last token was there"
    return None


def history_exact(_: Cell, ran: Rehearsal) -> str | None:
    """Every turn but the first continues the one before."""
    calls = main_calls(ran.calls)
    broken = [f"turn {call.number}: {call.branch}" for call in calls if call.branch is not None]
    if len(calls) < 3:
        return f"only {len(calls)} turns"
    return ", ".join(broken) or None


def prefix_kept(_: Cell, ran: Rehearsal) -> str | None:
    """Every prompt starts with the parent's prompt and answer, id for id."""
    calls = main_calls(ran.calls)
    for before, after in itertools.pairwise(calls):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        if not np.array_equal(after.prompt_ids[: len(whole)], whole):
            return f"turn {after.number} does not start with turn {before.number}"
    return None if len(calls) > 1 else f"only {len(calls)} turns"


def usage_seen(_: Cell, ran: Rehearsal) -> str | None:
    """A true count of prompt tokens, of one call or of all, stands in what the program wrote."""
    prompts = [len(call.prompt_ids) for call in ran.calls]
    wanted = {*prompts, *itertools.accumulate(prompts)}
    if any(re.search(rf"(?<![\d.]){count}(?![\d.])", ran.told) for count in wanted):
        return None
    return f"none of {sorted(wanted)} in its output"


def retry_safe(cell: Cell, ran: Rehearsal) -> str | None:
    """The faults went unnoticed and cost no token twice."""
    turns = len(main_calls(ran.calls))
    if turns != len(script(cell)) or ran.exit.timed_out:
        return f"{turns} turns instead of {len(script(cell))}, {_ending(ran)}"
    if ran.sampled != ran.owed:
        return f"{ran.sampled} tokens sampled for answers of {ran.owed}"
    counted = sum(len(call.sampled_ids) for call in ran.calls)
    return None if counted == ran.owed else f"{counted} tokens counted of {ran.owed} sampled"


def budget_stop_survived(_: Cell, ran: Rehearsal) -> str | None:
    """The program gives up by itself, soon, and no call was made beyond the budget."""
    if ran.exit.timed_out:
        return f"still running {ran.exit.seconds:.0f} s after it began, {len(ran.seen)} requests"
    if len(ran.seen) > _MOST_ASKED:
        return f"{len(ran.seen)} requests before it gave up"
    asked = len(ran.calls)
    return None if asked == _BUDGET else f"{asked} calls with a budget of {_BUDGET}"


def _ending(ran: Rehearsal) -> str:
    how = "out of time" if ran.exit.timed_out else f"exit code {ran.exit.code}"
    statuses = [seen.status for seen in ran.seen]
    return f"{how}; statuses {statuses}; {' '.join(ran.log.split())[-300:]!r}"


class Part(NamedTuple):
    """A session, and what it shows."""

    stage: Callable[[Cell], Stage]
    judges: Mapping[str, Callable[[Cell, Rehearsal], str | None]]


SESSIONS: dict[str, Part] = {
    "plain": Part(
        plain,
        {
            "completes": completes,
            "tool_call_executed": tool_call_executed,
            "streaming": streaming,
            "history_exact": history_exact,
            "prefix_kept": prefix_kept,
            "usage_seen": usage_seen,
        },
    ),
    "faulty": Part(faulty, {"retry_safe": retry_safe}),
    "budget": Part(short, {"budget_stop_survived": budget_stop_survived}),
    "slow": Part(patient, {"slow_start_survived": retry_safe}),
}


def checks_of(*, slow: bool) -> list[str]:
    """The names of what is checked."""
    sessions = [part for name, part in SESSIONS.items() if slow or name != "slow"]
    return [*(name for part in sessions for name in part.judges), "no_foreign_host"]
