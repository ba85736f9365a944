"""Checks after a storm, from outside: API, files, and the logs of receiver and trainer.

Each check is a row: its name, the measured value, and the required one.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from chaos.fleet import Fleet
from chaos.storm import StormLog, Strike
from chaos.wire import Api, JsonLog
from tugline.recording import file as recordings
from tugline.recording.folder import list_recordings
from tugline.recording.trajectories import unpack
from tugline.types import Status, Trajectory

RECOVERY_S = 2.0
REQUEUE_S = 1.0
"""Beyond the lease."""
HUNG_S = 10.0
"""Only times above this fail, since other work slows the machine; the goals are printed."""


class Row(NamedTuple):
    """One check."""

    name: str
    measured: str
    required: str
    passed: bool


@dataclass(frozen=True)
class Evidence:
    """All of the server's final state, and what receiver and trainer logged."""

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
    ran = (result["session"] for result in results if result["bytes"])
    bodies = {name: api.bytes("GET", f"/v1/sessions/{name}/trajectory") for name in ran}
    return Evidence(
        tasks=list(_pages(api, "/v1/tasks?", "tasks")),
        results=results,
        events=list(list_all(api, "/v1/events", "position")),
        trajectories={name: unpack(data) for name, data in bodies.items()},
        trained=JsonLog.read(fleet.folder / "trained.jsonl"),
        delivered=JsonLog.read(fleet.folder / "delivered.jsonl"),
        deliveries=list(list_all(api, "/v1/deliveries", "id")),
    )


def _pages(api: Api, path: str, key: str) -> Iterator[Mapping[str, Any]]:
    cursor: str | None = ""
    while cursor is not None:
        page = api.get(f"{path}limit=200{f'&after={cursor}' if cursor else ''}")
        yield from page[key]
        cursor = page["next"]


def list_all(api: Api, path: str, key: str, field: str = "") -> Iterator[Mapping[str, Any]]:
    """Yield what `path` lists (in `field`), page by page; `key` is the cursor of each item."""
    items: Any = [{key: 0}]
    while items:
        page = api.get(f"{path}?after={items[-1][key]}&limit=200")
        items = page[field] if field else page
        yield from items


# --------------------------------------------------------------------------- checks
def audit(fleet: Fleet, log: StormLog, evidence: Evidence) -> list[Row]:
    """Run every check."""
    return [
        *_check_tasks(log, evidence),
        *_check_commits(evidence),
        *_check_trainer(evidence),
        *_check_callbacks(log, evidence),
        *_check_ledgers(fleet, evidence),
        *_check_times(fleet, log, evidence),
        _none("programs that ended by themselves", fleet.unexpected_exits),
    ]


def _check_tasks(log: StormLog, evidence: Evidence) -> Iterator[Row]:
    known = {task["id"]: task for task in evidence.tasks}
    lost = log.accepted.keys() - known.keys()
    yield _none("accepted tasks that are lost", lost)
    open_ = [name for name in log.accepted if known.get(name, {}).get("state") != "released"]
    yield _none("accepted tasks that have not ended", open_)
    sessions = {name for names in log.accepted.values() for name in names}
    with_result = {result["session"] for result in evidence.results}
    yield _none("sessions without a result", sessions - with_result)


def _check_commits(evidence: Evidence) -> Iterator[Row]:
    committed = [event for event in evidence.events if event["kind"] == "session.result"]
    counts = (Counter(each["session"] for each in list_) for list_ in (evidence.results, committed))
    yield _none(
        "sessions committed twice", {s for each in counts for s, n in each.items() if n > 1}
    )


def _check_trainer(evidence: Evidence) -> Iterator[Row]:
    acked = max((line["acked"] for line in evidence.trained if "acked" in line), default=0)
    stored = {result["position"]: result for result in evidence.results}
    lines = [line["result"] for line in evidence.trained if "result" in line]
    received = {result["position"]: result for result in lines}
    yield _none("acknowledged results that are lost", [p for p in received if p not in stored])
    yield _none("results that the trainer never got", stored.keys() - received.keys())
    changed = [p for p in received.keys() & stored.keys() if received[p] != stored[p]]
    yield _none("results that changed after they were read", changed)
    floor, again = 0, []
    for line in evidence.trained:
        floor = max(floor, line.get("acked", 0))
        if line.get("result", {}).get("position", floor + 1) <= floor:
            again.append(line["result"]["position"])
    yield _none("results sent again after they were acknowledged", again)
    last = max(stored, default=0)
    yield Row("the trainer's last acknowledgement", str(acked), f">= {last}", acked >= last)


def _check_callbacks(log: StormLog, evidence: Evidence) -> Iterator[Row]:
    expected = {
        result["session"] for result in evidence.results if result["task"] in log.with_callback
    }
    expected |= log.with_callback  # a callback of their release, too
    subjects: dict[str, set[str]] = defaultdict(set)
    for delivery in evidence.delivered:
        subjects[delivery["id"]].add(_subject(delivery["body"]))
    ids = Counter(name for each in subjects.values() for name in each)
    yield _none("results and releases without their callback", expected - ids.keys())
    ambiguous = [name for name, each in subjects.items() if len(each) > 1]
    yield _none("callback ids with two subjects", ambiguous)
    yield _none("subjects with two callback ids", [name for name, n in ids.items() if n > 1])
    pending = [each["id"] for each in evidence.deliveries if each["state"] != "delivered"]
    yield _none("callbacks not delivered", pending)
    repeated = len(evidence.delivered) - len(subjects)
    yield Row("callbacks delivered", f"{len(subjects)} and {repeated} again", ">= 1 each", True)


def _subject(body: Mapping[str, Any]) -> str:
    """The session or task of a callback."""
    return str(body["result"]["session"] if body["kind"] == "session.result" else body["task"])


def _check_ledgers(fleet: Fleet, evidence: Evidence) -> Iterator[Row]:
    views = {result["session"]: result for result in evidence.results}
    off = [
        name
        for name, trajectory in evidence.trajectories.items()
        if not trajectory.ledger.balanced
        or (trajectory.ledger.sampled, trajectory.ledger.trained)
        != (views[name]["sampled"], views[name]["trained"])
        or sum(int(trace.mask.sum()) for trace in trajectory.traces) != trajectory.ledger.trained
    ]
    yield _none("sessions whose tokens do not add up", off)
    files = [file for node in fleet.nodes for file in list_recordings(fleet.folder / node.name)]
    recorded = {file.stem: recordings.read(file) for file in files}
    calls = sum(len(recording.calls) for recording in recorded.values())
    yield Row("recordings read, model calls in them", f"{len(files)}, {calls}", "> 0", calls > 0)
    epochs = {event["session"]: event["detail"]["epoch"] for event in evidence.events
              if event["kind"] == "session.leased"}  # fmt: skip
    foreign = [
        name
        for name, result in evidence.trajectories.items()
        if result.status is Status.COMPLETED
        and not _is_result_of(result, recorded.get(f"{name}.{epochs[name]}"))
    ]
    yield _none("results that are not of their session's last lease", foreign)


def _is_result_of(result: Trajectory, recording: recordings.Recording | None) -> bool:
    """Whether a result is of a recorded run; no two runs take the same time."""
    sampled = sum(len(call.sampled_ids) for call in recording.calls) if recording else -1
    run = recording.result if recording else None
    return run is not None and (run.seconds.get("run"), sampled) == (
        result.seconds.get("run"),
        result.ledger.sampled,
    )


def _check_times(fleet: Fleet, log: StormLog, evidence: Evidence) -> Iterator[Row]:
    recoveries = [outage.recovery_s for outage in fleet.outages if outage.ready]
    slow, usual = max(recoveries), median(recoveries)
    yield Row(f"slowest recovery of the server, of {len(recoveries)}",
              f"{slow:.2f} s (median {usual:.2f})",
              f"<= {HUNG_S} s, goal {RECOVERY_S} s", slow <= HUNG_S)  # fmt: skip
    requeues = sorted(_measure_requeues(fleet, log.strikes, evidence.events))
    limit = fleet.lease_s + HUNG_S
    yield Row(f"slowest requeue after a node's death, of {len(requeues)}",
              f"{requeues[-1]:.2f} s" if requeues else "none",
              f"<= {limit} s, goal {fleet.lease_s + REQUEUE_S} s",
              bool(requeues) and requeues[-1] <= limit)  # fmt: skip
    strikes = (f"{strike.victim} {strike.how}" for strike in log.strikes)
    statuses = (result["status"] for result in evidence.results)
    for name, values in (("strikes", strikes), ("results", statuses)):
        counts = sorted(Counter(values).items())
        yield Row(name, ", ".join(f"{value} {count}" for value, count in counts), "-", True)
    time = f"{log.ended_s:.0f} s, {len(evidence.results) / log.ended_s:.1f} sessions/s, "
    time += f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} in the last five minutes"
    yield Row("time", time, "-", True)


def _measure_requeues(
    fleet: Fleet, strikes: Iterable[Strike], events: Sequence[Mapping[str, Any]]
) -> Iterator[float]:
    """Seconds from the death of a node to the requeue of each session it held."""
    for strike in (each for each in strikes if each.victim.startswith("node")):
        until = strike.at + fleet.lease_s + REQUEUE_S
        if any(o.down < until and (o.ready or until) > strike.at - 1 for o in fleet.outages):
            continue  # a restarted server gives every node a new lease
        node, held = _list_held(strike, events)
        for event in events:
            if event["kind"] == "session.requeued" and event["session"] in held and (
                event["created"] > strike.at and event.get("node") == node
            ):  # fmt: skip
                held.discard(event["session"])
                yield event["created"] - strike.at


def _list_held(strike: Strike, events: Sequence[Mapping[str, Any]]) -> tuple[str | None, set[str]]:
    """The id of a node that was struck, and the sessions it held then."""
    node, held = None, set()
    for event in (each for each in events if each["created"] <= strike.at):
        if event["kind"] == "node.joined" and event["detail"].get("name") == strike.victim:
            node, held = event["node"], set()
        elif event.get("node") == node and event["kind"] == "session.leased":
            held.add(event["session"])
        elif event["kind"] in {"session.requeued", "session.result"}:
            held.discard(event["session"])
    return node, held


def _none(name: str, exceptions: Iterable[object]) -> Row:
    """A row that passes if there are no exceptions."""
    some = sorted(map(str, exceptions))
    measured = f"{len(some)}: {', '.join(some[:5])}" if some else "0"
    return Row(name, measured, "0", not some)


def format_table(rows: Sequence[Row]) -> str:
    """Align the rows as a table."""
    width = max(len(row.name) for row in rows)
    return "\n".join(
        f"{'ok ' if row.passed else 'BAD'} {row.name:<{width}}  {row.measured}  "
        f"(must be {row.required})"
        for row in rows
    )
