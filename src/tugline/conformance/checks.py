"""What is asked of a harness, judged from what its sessions left. Pure.

Every judge returns None where all is well, else what is wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np

from tugline.conformance.cells import Case
from tugline.conformance.rehearsal import Run
from tugline.conformance.sessions import BUDGET, CUT, FILES, LAST_WORDS, SLOW, script
from tugline.types import Branch, Call, Outcome, TraceKind

_EARLY = 5
"""Parts of an answer that are more than its opening."""
_IN_FLIGHT = 3
"""Tokens that may be on their way from the engine when a line is cut."""
_MOST_ASKED = 30
"""Requests after which a harness that got a budget's refusal counts as one that never stops."""


def main_calls(calls: Sequence[Call]) -> list[Call]:
    """The conversation itself, without side calls and abandoned answers."""
    return [
        call
        for call in calls
        if call.kind is not TraceKind.SIDE and call.outcome is Outcome.COMPLETE
    ]


def completes(cell: Case, ran: Run) -> str | None:
    """Every turn was asked for and the program ended by itself."""
    turns = len(main_calls(ran.calls))
    if ran.exit.timed_out:
        return f"still running after {ran.exit.seconds:.0f} s and {turns} turns"
    if turns != len(script(cell)):
        return f"{turns} turns instead of {len(script(cell))}, {_ending(ran)}"
    return f"exit code {ran.exit.code}" if ran.exit.code else None


def tool_call_executed(_: Case, ran: Run) -> str | None:
    """Both parallel calls and the later ones ran, and their results came back."""
    if ran.files.get("both.txt") != "".join(FILES.values()):
        return f"both.txt holds {ran.files.get('both.txt')!r}"
    results = " ".join(m.content for call in ran.calls[1:2] for m in call.messages)
    missing = [word for word in ("walrus", "heron") if word not in results]
    return f"the second request lacks the results {missing}" if missing else None


def streaming(_: Case, ran: Run) -> str | None:
    """The slow turn's answer went out while it was sampled, not only its headers."""
    if len(ran.calls) <= SLOW:
        return f"only {len(ran.calls)} turns"
    return _streamed(ran, ran.calls[SLOW])


def _streamed(ran: Run, call: Call) -> str | None:
    last = call.timings.last_token or 0.0
    parts = next((seen.chunks for seen in ran.seen if seen.request == call.request), [])
    if len(parts) == 1:
        return "the answer came whole"
    early = sum(at < last for at, _ in parts)
    if early < _EARLY:
        return f"{early} of {len(parts)} parts of the answer left before its last token was there"
    return None


def history_exact(_: Case, ran: Run) -> str | None:
    """Every turn but the first continues the one before."""
    calls = main_calls(ran.calls)
    return f"only {len(calls)} turns" if len(calls) < 3 else continues(_, ran)


def continues(_: Case, ran: Run) -> str | None:
    """No turn forks, however many there are."""
    calls = main_calls(ran.calls)
    broken = [f"turn {call.number}: {call.branch}" for call in calls if call.branch is not None]
    return ", ".join(broken) or None


def prefix_kept(_: Case, ran: Run) -> str | None:
    """Every prompt starts with the parent's prompt and answer, id for id."""
    calls = main_calls(ran.calls)
    for before, after in itertools.pairwise(calls):
        whole = np.concatenate((before.prompt_ids, before.sampled_ids))
        if not np.array_equal(after.prompt_ids[: len(whole)], whole):
            return f"turn {after.number} does not start with turn {before.number}"
    return None if len(calls) > 1 else f"only {len(calls)} turns"


def usage_seen(_: Case, ran: Run) -> str | None:
    """A true count of prompt tokens, of one call or of all, stands in what the program wrote."""
    prompts = [len(call.prompt_ids) for call in ran.calls]
    wanted = {*prompts, *itertools.accumulate(prompts)}
    if any(re.search(rf"(?<![\d.]){count}(?![\d.])", ran.told) for count in wanted):
        return None
    return f"none of {sorted(wanted)} in its output"


def retry_safe(cell: Case, ran: Run) -> str | None:
    """The faults went unnoticed and cost no token twice."""
    turns = len(main_calls(ran.calls))
    if turns != len(script(cell)) or ran.exit.timed_out:
        return f"{turns} turns instead of {len(script(cell))}, {_ending(ran)}"
    # An answer that is not streamed is gone with the engine that died over it.
    most = ran.owed + _IN_FLIGHT + (0 if cell.streams else CUT)
    if not ran.owed <= ran.sampled <= most:
        return f"{ran.sampled} tokens sampled for answers of {ran.owed}"
    counted = sum(len(call.sampled_ids) for call in ran.calls)
    return None if counted == ran.owed else f"{counted} tokens counted of {ran.owed} sampled"


def budget_stop_survived(_: Case, ran: Run) -> str | None:
    """The program gives up by itself, soon, and no call was made beyond the budget."""
    if ran.exit.timed_out:
        return f"still running {ran.exit.seconds:.0f} s after it began, {len(ran.seen)} requests"
    if len(ran.seen) > _MOST_ASKED:
        return f"{len(ran.seen)} requests before it gave up"
    asked = len(ran.calls)
    return None if asked == BUDGET else f"{asked} calls with a budget of {BUDGET}"


def _ending(ran: Run) -> str:
    how = "out of time" if ran.exit.timed_out else f"exit code {ran.exit.code}"
    statuses = [seen.status for seen in ran.seen]
    return f"{how}; statuses {statuses}; {' '.join(ran.log.split())[-300:]!r}"


def text_shown(_: Case, ran: Run) -> str | None:
    """What the model says in the end reaches whoever started the program."""
    return None if LAST_WORDS in ran.log else f"{LAST_WORDS!r} is not in its output"


def sub_agents_linked(_: Case, ran: Run) -> str | None:
    """A sub-agent's calls have a thread of their own, and name the one that started it."""
    main = {call.thread for call in ran.calls if call.kind is TraceKind.MAIN}
    subs = [call for call in ran.calls if call.kind is TraceKind.SUBAGENT]
    if not subs:
        return f"no call of a sub-agent, {_ending(ran)}"
    wrong = [c.number for c in subs if c.thread in main or c.parent_thread not in main]
    if wrong:
        return f"calls {wrong} name no thread of their own, or not the main one as its parent"
    forked = [call.number for call in ran.calls if call.branch not in {None, Branch.NEW_THREAD}]
    return f"calls {forked} do not continue their threads" if forked else None


def title_is_side_call(cell: Case, ran: Run) -> str | None:
    """The request for a title is beside the task and does not fork the conversation."""
    sides = [call for call in ran.calls if call.kind is TraceKind.SIDE]
    if not ran.side_calls or len(sides) != ran.side_calls:
        return f"{len(sides)} side calls recorded, {ran.side_calls} made"
    return completes(cell, ran) or history_exact(cell, ran)


# --------------------------------------------------------------------------- any model
def ends(_: Case, ran: Run) -> str | None:
    """Whatever the model said, the program talked to it and ended by itself."""
    if ran.exit.timed_out or not main_calls(ran.calls):
        return f"{len(main_calls(ran.calls))} answers, {_ending(ran)}"
    return None


def any_streamed(_: Case, ran: Run) -> str | None:
    """At least one answer went out while it was sampled; few words and tool calls cannot."""
    verdicts = [_streamed(ran, call) for call in ran.calls]
    return None if None in verdicts else "; ".join(filter(None, verdicts)) or "no answer"
