"""The report of ``tugline rejudge``: changed rewards, refusals, and evaluators compared."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean

import msgspec
from rich.table import Column

from tugline.cli.output import make_table, print_text
from tugline.protocol import Estimate
from tugline.recording.verdicts import VerdictEntry
from tugline.rollout.rejudge import SessionVerdicts
from tugline.trainers.evaluation import Agreement, compare_verdicts, format_estimate, is_other
from tugline.types import is_pass

_MAX_SHOWN = 20
"""Number of sessions of each kind that are printed."""


class ChangedReward(msgspec.Struct, frozen=True):
    """Two rewards of a session."""

    session: str
    before: float | None
    now: float | None


class Verifier(msgspec.Struct, frozen=True):
    """An evaluator in the history, and its first verdicts on the selected sessions."""

    name: str
    evaluated: int
    solved: int
    reward: float
    """Mean reward."""


class VerifierPair(msgspec.Struct, frozen=True):
    """Two evaluators on the sessions that both have judged."""

    first: str
    second: str
    agreement: Agreement


class RejudgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the verdicts of one call, those of earlier calls with its evaluator included."""

    sessions: int
    evaluated: int
    history: str
    """Path or URL of all verdicts."""
    changed: tuple[ChangedReward, ...]
    """Sessions whose reward differs from the recorded one."""
    flipped: tuple[ChangedReward, ...]
    """Sessions whose two verdicts of ``--twice`` differ."""
    agreement: Agreement | None
    """None if no session has both rewards."""
    verifiers: tuple[Verifier, ...]
    """All evaluators of the history; `recorded` is that of the rollouts."""
    pairs: tuple[VerifierPair, ...]
    put_in_force: int
    """Sessions whose verdict in force is another one now."""
    refused: dict[str, str]
    """Reasons by session."""
    errors: dict[str, str]
    """Errors by session."""


def summarize(
    outcomes: Sequence[SessionVerdicts],
    path: str,
    history: Iterable[VerdictEntry],
    recordings: set[str],
    changed: int,
) -> RejudgeReport:
    """Compare the first verdict of each session with the recorded one, and with the second."""
    verdicts = _group(history, recordings)
    errors = {
        each.session: entry.error for each in outcomes for entry in each.entries if entry.error
    }
    sound = [each for each in outcomes if each.entries and each.session not in errors]
    changes = [ChangedReward(each.session, each.before, each.rewards[0]) for each in sound]
    repeats = [ChangedReward(each.session, each.rewards[0], each.rewards[-1]) for each in sound]
    pairs = [
        (each.entries[0].task, change.before, change.now)
        for each, change in zip(sound, changes, strict=True)
        if change.before is not None and change.now is not None
    ]
    return RejudgeReport(
        sessions=len(outcomes),
        evaluated=len(sound),
        history=path,
        changed=tuple(each for each in changes if is_other(each.before, each.now)),
        flipped=tuple(each for each in repeats if is_other(each.before, each.now)),
        agreement=compare_verdicts(pairs) if pairs else None,
        verifiers=tuple(_count(name, rewards) for name, rewards in verdicts.items()),
        pairs=tuple(_compare(verdicts)),
        put_in_force=changed,
        refused={each.session: each.refused for each in outcomes if each.refused},
        errors=errors,
    )


_Verdicts = Mapping[str, tuple[str, float]]
"""Task and reward by recording."""


def _group(history: Iterable[VerdictEntry], recordings: set[str]) -> dict[str, _Verdicts]:
    """Return the first verdicts of each evaluator by a unique name; first the recorded ones."""
    recorded: dict[str, tuple[str, float]] = {}
    groups: dict[tuple[str, str], dict[str, tuple[str, float]]] = {}
    for entry in history:
        if entry.recording in recordings and entry.round == 1 and entry.reward is not None:
            key = entry.name, entry.digest if entry.name else ""
            own = groups.setdefault(key, {})
            own[entry.recording] = entry.task, entry.reward.value
            if entry.before is not None:
                recorded.setdefault(entry.recording, (entry.task, entry.before))
    names = [name for name, _ in groups]
    unique = {
        (name or "each task's own") + (f" ({digest[:8]})" if names.count(name) > 1 else ""): own
        for (name, digest), own in groups.items()
    }
    return {"recorded": recorded, **unique}


def _count(name: str, verdicts: _Verdicts) -> Verifier:
    rewards = [reward for _, reward in verdicts.values()]
    return Verifier(name, len(rewards), sum(map(is_pass, rewards)), fmean(rewards or [0.0]))


def _compare(verdicts: Mapping[str, _Verdicts]) -> Iterator[VerifierPair]:
    """Compare every two evaluators on the sessions that both have judged."""
    for (first, before), (second, now) in combinations(verdicts.items(), 2):
        both = [(before[each][0], before[each][1], now[each][1]) for each in before if each in now]
        if both:
            yield VerifierPair(first, second, compare_verdicts(both))


def show(report: RejudgeReport) -> None:
    """Print a report for people."""
    rows = [
        (
            "sessions",
            f"{report.evaluated} of {report.sessions} judged, {len(report.refused)} refused",
        ),
        ("changed rewards", str(len(report.changed))),
        *_list_agreement(report.agreement),
    ]
    if report.put_in_force:
        rows.append(("put in force", f"{report.put_in_force} sessions"))
    table = make_table(("", ""), rows)
    table.show_header = False
    print_text(table)
    if len(report.verifiers) > 2:
        _show_verifiers(report)
    for title, rewards in (("changed", report.changed), ("flipped by itself", report.flipped)):
        _show_some(title, [f"{r.session} {_format(r.before)} -> {_format(r.now)}" for r in rewards])
    for title, reasons in (("refused", report.refused), ("error", report.errors)):
        _show_some(title, [f"{session}: {reason}" for session, reason in reasons.items()])
    print_text(f"all verdicts are in {report.history}")


def _show_verifiers(report: RejudgeReport) -> None:
    """Print the evaluators of the history, and how every two of them differ."""
    counts = [
        (v.name, str(v.evaluated), str(v.solved), f"{v.reward:.3f}") for v in report.verifiers
    ]
    print_text(make_table(("evaluator", "judged", "solved", "mean reward"), counts))
    rows = [
        (
            f"{pair.first} -> {pair.second}",
            str(pair.agreement.sessions),
            format_estimate(pair.agreement.same),
            format_estimate(pair.agreement.difference),
            _format_difference(pair.agreement.reward_difference),
        )
        for pair in report.pairs
    ]
    first = Column("evaluators", no_wrap=True)
    heads = (first, "sessions", "same verdict", "change of pass@1", "change of reward")
    print_text(make_table(heads, rows))


def _list_agreement(agreement: Agreement | None) -> Iterator[tuple[str, str]]:
    if agreement is None:
        return
    yield "same verdict", format_estimate(agreement.same)
    before, now = agreement.solved
    yield "solved", f"{before} before, {now} now, of {agreement.sessions}"
    yield "change of pass@1", format_estimate(agreement.difference)
    rewards = f"{agreement.reward[0]:.3f} before, {agreement.reward[1]:.3f} now"
    yield "mean reward", rewards
    yield "change of reward", _format_difference(agreement.reward_difference)


def _format_difference(mean: Estimate) -> str:
    return f"{mean.value:+.3f} ({mean.low:+.3f} to {mean.high:+.3f})"


def _show_some(title: str, lines: Sequence[str]) -> None:
    for line in lines[:_MAX_SHOWN]:
        print_text(f"{title}: {line}")
    if len(lines) > _MAX_SHOWN:
        print_text(f"{title}: and {len(lines) - _MAX_SHOWN} more")


def _format(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
