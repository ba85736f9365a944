"""What must be true when the storm is over, read from the outside: API, files, books.

Each check is a row: what was looked at, what was found, what it must be.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from chaos.fleet import Fleet
from chaos.storm import Story, Strike
from chaos.wire import Api, Book
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.recording.trajectories import unpack
from tugline.types import Status, Trajectory

RECOVERY_S = 2.0
REQUEUE_S = 1.0
"""Beyond the lease."""
HUNG_S = 10.0
"""What is asked of wall time is printed; only what is this far beyond it fails, for a machine that
does other work is slower."""


class Row(NamedTuple):
    """One check."""

    what: str
    found: str
    must: str
    good: bool


@dataclass(frozen=True)
class Evidence:
    """All that the server tells in the end, and what others wrote down."""

    tasks: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    trajectories: Mapping[str, Trajectory]
    trained: Sequence[Mapping[str, Any]]
    delivered: Sequence[Mapping[str, Any]]
    deliveries: Sequence[Mapping[str, Any]]


def gather(fleet: Fleet) -> Evidence:
    """Read everything."""
    api = fleet.api()
    results = list(list_all(api, "/v1/results", "position", "items"))
    ran = (one["session"] for one in results if one["bytes"])
    bodies = {one: api.bytes("GET", f"/v1/sessions/{one}/trajectory") for one in ran}
    return Evidence(
        tasks=list(_pages(api, "/v1/tasks?", "tasks")),
        results=results,
        events=list(list_all(api, "/v1/events", "position")),
        trajectories={one: unpack(data) for one, data in bodies.items()},
        trained=Book.read(fleet.folder / "trained.jsonl"),
        delivered=Book.read(fleet.folder / "delivered.jsonl"),
        deliveries=list(list_all(api, "/v1/deliveries", "id")),
    )


def _pages(api: Api, path: str, key: str) -> Iterator[Mapping[str, Any]]:
    cursor: str | None = ""
    while cursor is not None:
        page = api.get(f"{path}limit=200{f'&after={cursor}' if cursor else ''}")
        yield from page[key]
        cursor = page["next"]


def list_all(api: Api, path: str, key: str, field: str = "") -> Iterator[Mapping[str, Any]]:
    """What is listed at `path` (in that `field`), page by page; each stands after its `key`."""
    items: Any = [{key: 0}]
    while items:
        page = api.get(f"{path}?after={items[-1][key]}&limit=200")
        items = page[field] if field else page
        yield from items


# --------------------------------------------------------------------------- checks
def audit(fleet: Fleet, story: Story, told: Evidence) -> list[Row]:
    """Every check."""
    return [
        *_tasks(story, told),
        *_commits(told),
        *_trainer(told),
        *_callbacks(story, told),
        *_ledgers(fleet, told),
        *_times(fleet, story, told),
        Row("programs that ended by themselves", "; ".join(fleet.deserters) or "none", "none",
            not fleet.deserters),
    ]  # fmt: skip


def _tasks(story: Story, told: Evidence) -> Iterator[Row]:
    known = {one["id"]: one for one in told.tasks}
    lost = story.accepted.keys() - known.keys()
    yield _none("accepted tasks that are lost", lost)
    open_ = [name for name in story.accepted if known.get(name, {}).get("state") != "released"]
    yield _none("accepted tasks that have not ended", open_)
    sessions = {one for each in story.accepted.values() for one in each}
    yield _none("sessions without a result", sessions - {one["session"] for one in told.results})


def _commits(told: Evidence) -> Iterator[Row]:
    times = Counter(one["session"] for one in told.results)
    times_said = Counter(one["session"] for one in told.events if one["kind"] == "session.result")
    twice = {name for count in (times, times_said) for name, n in count.items() if n > 1}
    yield _none("sessions committed twice", twice)


def _trainer(told: Evidence) -> Iterator[Row]:
    kept = [line["result"] for line in told.trained if "result" in line]
    acked = max((line["acked"] for line in told.trained if "acked" in line), default=0)
    truth = {one["position"]: one for one in told.results}
    mine = {one["position"]: one for one in kept}
    yield _none("acknowledged results that are lost", [p for p in mine if p not in truth])
    yield _none("results that the trainer never got", truth.keys() - mine.keys())
    yield _none("results that changed after they were read",
                [p for p in mine.keys() & truth.keys() if mine[p] != truth[p]])  # fmt: skip
    floor, again = 0, []
    for line in told.trained:
        floor = max(floor, line.get("acked", 0))
        if line.get("result", {}).get("position", floor + 1) <= floor:
            again.append(line["result"]["position"])
    yield _none("results told again after they were acknowledged", again)
    last = max(truth, default=0)
    yield Row("the trainer's last acknowledgement", str(acked), f">= {last}", acked >= last)


def _callbacks(story: Story, told: Evidence) -> Iterator[Row]:
    wanted = {one["session"] for one in told.results if one["task"] in story.called_back}
    wanted |= story.called_back  # and of their release
    subjects: dict[str, set[str]] = defaultdict(set)
    for one in told.delivered:
        subjects[one["id"]].add(_subject(one["body"]))
    heard = {name for each in subjects.values() for name in each}
    yield _none("results and releases without their callback", wanted - heard)
    yield _none("callback ids that stand for two things",
                [name for name, each in subjects.items() if len(each) > 1])  # fmt: skip
    ids = Counter(name for each in subjects.values() for name in each)
    yield _none("things told under two ids", [name for name, n in ids.items() if n > 1])
    undone = [one["id"] for one in told.deliveries if one["state"] != "delivered"]
    yield _none("callbacks not delivered", undone)
    repeated = len(told.delivered) - len(subjects)
    yield Row("callbacks delivered", f"{len(subjects)} and {repeated} again", ">= 1 each", True)


def _subject(body: Mapping[str, Any]) -> str:
    """The session whose result a callback is about, or the task that is over."""
    return str(body["result"]["session"] if body["kind"] == "session.result" else body["task"])


def _ledgers(fleet: Fleet, told: Evidence) -> Iterator[Row]:
    views = {one["session"]: one for one in told.results}
    off = [
        name
        for name, one in told.trajectories.items()
        if not one.ledger.balanced
        or (one.ledger.sampled, one.ledger.trained)
        != (views[name]["sampled"], views[name]["trained"])
        or sum(int(trace.mask.sum()) for trace in one.traces) != one.ledger.trained
    ]
    yield _none("sessions whose tokens do not add up", off)
    files = [file for node in fleet.nodes for file in list_recordings(fleet.folder / node.name)]
    recorded = {file.stem: recordings.read(file) for file in files}
    calls = sum(len(one.calls) for one in recorded.values())
    yield Row("recordings read, model calls in them", f"{len(files)}, {calls}", "> 0", calls > 0)
    epochs = {one["session"]: one["detail"]["epoch"] for one in told.events
              if one["kind"] == "session.leased"}  # fmt: skip
    foreign = [
        name
        for name, one in told.trajectories.items()
        if one.status is Status.COMPLETED and not _same(one, recorded.get(f"{name}.{epochs[name]}"))
    ]
    yield _none("results that are not of their session's last lease", foreign)


def _same(result: Trajectory, recording: recordings.Recording | None) -> bool:
    """Whether a result is of the run that was recorded there: no two take the same time."""
    sampled = sum(len(call.sampled_ids) for call in recording.calls) if recording else -1
    run = recording.result if recording else None
    return run is not None and (run.seconds.get("run"), sampled) == (
        result.seconds.get("run"),
        result.ledger.sampled,
    )


def _times(fleet: Fleet, story: Story, told: Evidence) -> Iterator[Row]:
    starts = [one for one in fleet.outages if one.ready]  # others were killed before
    slow = max(one.recovery_s for one in starts)
    usual = median(one.recovery_s for one in starts)
    yield Row(f"slowest recovery of the server, of {len(starts)}",
              f"{slow:.2f} s (median {usual:.2f})",
              f"<= {HUNG_S} s, asked {RECOVERY_S} s", slow <= HUNG_S)  # fmt: skip
    late = sorted(_requeues(fleet, story.strikes, told.events))
    must = fleet.lease_s + HUNG_S
    asked = fleet.lease_s + REQUEUE_S
    found = f"{late[-1]:.2f} s" if late else "never seen"
    what = f"slowest requeue after a node's death, of {len(late)}"
    yield Row(what, found, f"<= {must} s, asked {asked} s", bool(late) and late[-1] <= must)
    strikes = (f"{one.victim} {one.how}" for one in story.strikes)
    for what, names in (("strikes", strikes), ("results", (one["status"] for one in told.results))):
        counts = sorted(Counter(names).items())
        yield Row(what, ", ".join(f"{name} {count}" for name, count in counts), "-", True)
    said = f"{story.ended_s:.0f} s, {len(told.results) / story.ended_s:.1f} sessions/s, "
    said += f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} in the last five minutes"
    yield Row("time", said, "-", True)


def _requeues(
    fleet: Fleet, strikes: Iterable[Strike], events: Sequence[Mapping[str, Any]]
) -> Iterator[float]:
    """Seconds from the death of a node to the requeue of what it held, while a server was up."""
    for strike in (one for one in strikes if one.victim.startswith("node")):
        until = strike.at + fleet.lease_s + REQUEUE_S
        if any(one.down < until and (one.ready or until) > strike.at - 1 for one in fleet.outages):
            continue  # a server that was away gives every node a whole lease again
        node, held = _held(strike, events)
        for event in events:
            if event["kind"] == "session.requeued" and event["session"] in held and (
                event["created"] > strike.at and event.get("node") == node
            ):  # fmt: skip
                held.discard(event["session"])
                yield event["created"] - strike.at


def _held(strike: Strike, events: Sequence[Mapping[str, Any]]) -> tuple[str | None, set[str]]:
    """The id of the node that was struck, and what it had then."""
    node, held = None, set()
    for event in (one for one in events if one["created"] <= strike.at):
        if event["kind"] == "node.joined" and event["detail"].get("name") == strike.victim:
            node, held = event["node"], set()
        elif event.get("node") == node and event["kind"] == "session.leased":
            held.add(event["session"])
        elif event["kind"] in {"session.requeued", "session.result"}:
            held.discard(event["session"])
    return node, held


def _none(what: str, found: Iterable[object]) -> Row:
    some = sorted(map(str, found))
    shown = f"{len(some)}: {', '.join(some[:5])}" if some else "0"
    return Row(what, shown, "0", not some)


def table(rows: Sequence[Row]) -> str:
    """For people."""
    width = max(len(row.what) for row in rows)
    return "\n".join(
        f"{'ok ' if row.good else 'BAD'} {row.what:<{width}}  {row.found}  (must be {row.must})"
        for row in rows
    )
