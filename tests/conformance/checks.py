"""The checks of a session. Pure; each returns None if all is well, else the reason.

The plain session has those of `tugline harness check`, too.
"""

import itertools
import re

from conformance.session_run import SessionRun
from conformance.sessions import BUDGET, CUT, SLOW
from tugline.cli.harness_check import Case, find_forks, main_calls
from tugline.plugins import find
from tugline.types import Branch, Call, TraceKind

_EARLY = 5
"""Least number of parts that show an answer is streamed."""
_TAIL = 400
"""Characters of the output that a crash is looked for in."""
_IN_FLIGHT = 3
"""Tokens that may be on their way from the engine when a connection is cut."""
_MOST_REQUESTS = 30
"""Requests after a budget's refusal until a harness counts as one that never stops."""


def streaming(_: Case, run: SessionRun) -> str | None:
    """The answer of the slow turn was sent while it was sampled, not only its headers."""
    if len(run.calls) <= SLOW:
        return f"only {len(run.calls)} turns"
    call = run.calls[SLOW]
    came = [each for each in run.requests if each.at <= call.timings.received]
    parts = came[-1].chunks if came else []
    if len(parts) == 1:
        return "the answer came whole"
    early = sum(at < (call.timings.last_token or 0.0) for at, _ in parts)
    if early < _EARLY:
        return f"{early} of {len(parts)} parts of the answer left before its last token was there"
    return None


def usage_seen(_: Case, run: SessionRun) -> str | None:
    """The program printed the exact count of prompt tokens, of one call or of several."""
    prompts = [len(call.prompt_ids) for call in run.calls]
    counts = {*prompts, *itertools.accumulate(prompts)}
    if any(re.search(rf"(?<![\d.]){count}(?![\d.])", run.output) for count in counts):
        return None
    return f"none of {sorted(counts)} in its output"


def retry_safe(case: Case, run: SessionRun) -> str | None:
    """The faults went unnoticed and no token was sampled or counted twice."""
    turns, expected = len(main_calls(run.calls)), len(case.script())
    if turns != expected or run.exit.timed_out:
        return f"{turns} turns instead of {expected}, {_describe_end(run)}"
    # An answer that is not streamed is lost with the engine that died over it.
    most = run.expected_tokens + _IN_FLIGHT + (0 if case.streams else CUT)
    if not run.expected_tokens <= run.sampled <= most:
        return f"{run.sampled} tokens sampled for answers of {run.expected_tokens}"
    counted = sum(len(call.sampled_ids) for call in run.calls)
    if counted != run.expected_tokens:
        return f"{counted} tokens counted of {run.expected_tokens} sampled"
    return None


def slow_start_survived(case: Case, run: SessionRun) -> str | None:
    """A first token after minutes does not cause a second request."""
    return retry_safe(case, run)


def budget_stop_survived(case: Case, run: SessionRun) -> str | None:
    """The program ends by itself, soon, without a crash, and makes no call beyond the budget."""
    crash = find("harness", case.harness)(**case.options).find_crash(
        run.exit, run.log.strip()[-_TAIL:]
    )
    if crash:
        return f"the refusal counts as a crash: {crash}"
    requests, calls = len(run.requests), len(run.calls)
    if run.exit.timed_out:
        return f"still running {run.exit.seconds:.0f} s after it began, {requests} requests"
    if requests > _MOST_REQUESTS:
        return f"{requests} requests before it gave up"
    return None if calls == BUDGET else f"{calls} calls with a budget of {BUDGET}"


def sub_agents_linked(_: Case, run: SessionRun) -> str | None:
    """A sub-agent's calls have a thread of their own, and name the one that started it."""
    main = {call.thread for call in run.calls if call.kind is TraceKind.MAIN}
    subs = [call for call in run.calls if call.kind is TraceKind.SUBAGENT]
    if not subs:
        return f"no call of a sub-agent, {_describe_end(run)}"
    wrong = [c.number for c in subs if c.thread in main or c.parent_thread not in main]
    if wrong:
        return f"calls {wrong} name no thread of their own, or not the main one as its parent"
    forked = [call.number for call in run.calls if call.branch not in {None, Branch.NEW_THREAD}]
    return f"calls {forked} do not continue their threads" if forked else None


def compaction_named(_: Case, run: SessionRun) -> str | None:
    """The request for a summary is known as one, and the history behind it as compacted."""
    named = [call.number for call in run.calls if call.kind is TraceKind.COMPACTION]
    forked = [(call.number, call.branch) for call in main_calls(run.calls) if call.branch]
    behind = [number for number, branch in forked if branch is Branch.COMPACTED]
    if not named or not behind or behind[0] < named[0]:
        return f"summaries are calls {named}, forks {forked}; {_describe_end(run)}"
    wrong = [number for number, _ in forked if number not in {*named, *behind}]
    return f"calls {wrong} fork for another reason" if wrong else None


def title_is_side_call(case: Case, run: SessionRun) -> str | None:
    """The request for a title is beside the task and does not fork the conversation."""
    sides: list[Call] = [call for call in run.calls if call.kind is TraceKind.SIDE]
    if not run.side_calls or len(sides) != run.side_calls:
        return f"{len(sides)} side calls recorded, {run.side_calls} made"
    turns, expected = len(main_calls(run.calls)), len(case.script())
    if turns != expected or run.exit.code:
        return f"{turns} turns instead of {expected}, {_describe_end(run)}"
    return find_forks(run.calls)


def _describe_end(run: SessionRun) -> str:
    how = "out of time" if run.exit.timed_out else f"exit code {run.exit.code}"
    statuses = [each.status for each in run.requests]
    return f"{how}; statuses {statuses}; {' '.join(run.log.split())[-300:]!r}"
