"""Submit tasks continuously, and kill random programs at random moments meanwhile.

The seed decides the tasks and the victims; the moments depend on the machine, too.
"""

import contextlib
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.fleet import GROUP, Fleet, make_task

OPEN_SESSIONS = 48
"""Sessions that are submitted and have not ended."""
VICTIMS = {"server": 22, "node": 24, "agent": 22, "engine": 14, "receiver": 9, "trainer": 9}
"""Percentage of kills of each kind."""
SETTLE_S = 150.0
"""Time limit of the last sessions after the last strike."""
DELIVERY_S = 60.0
"""Time limit of the delivery of the last results."""


@dataclass(frozen=True)
class Strike:
    """A program that was killed or frozen, and when."""

    at: float
    victim: str
    how: str
    """``killed``, or ``frozen`` beyond its lease."""


@dataclass
class StormLog:
    """What was submitted and who was struck."""

    accepted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sessions of each task that the server accepted."""
    with_callback: set[str] = field(default_factory=set)
    """Tasks with a callback."""
    strikes: list[Strike] = field(default_factory=list)
    ended_s: float = math.inf


def make_random_task(name: str, draw: random.Random, callback: str) -> dict[str, Any]:
    """A group of agents, some slow, some of which the group does not wait for."""
    task = make_task(name, draw.randint(1, 3), draw.choice((0.0, 0.1, 0.3, 1.0))) | {
        "evaluator": {"name": "chaos.judge:Answer"},
        "runtime": {"name": "local"},  # agents are identified by their working folder
        "limits": {"agent_s": 60.0},
        "tenant": draw.choice(("one", "two")),
        "priority": draw.randint(-2, 2),
    }
    match draw.random():
        case dice if dice < 0.15:
            task["group"]["min_usable"] = 2
        case dice if dice < 0.3:
            task["group"]["deadline_s"] = draw.uniform(5, 30)
    if draw.random() < 0.4:
        task["callback"] = {"url": callback}
    return task


class Storm:
    """Make `kills` strikes over at least `sessions` sessions, submitting until the last strike."""

    def __init__(self, fleet: Fleet, *, sessions: int, kills: int, seed: int) -> None:
        self.fleet, self.sessions, self.kills = fleet, sessions, kills
        self.log = StormLog()
        self._draw = random.Random(seed)
        self._all_struck = threading.Event()
        self._all_submitted = threading.Event()
        self._ended = 0
        self._failed: list[BaseException] = []

    def run(self, other: tuple[Callable[[], None], ...] = ()) -> StormLog:
        """Run from the first task to the last result, with `other` faults spread over it."""
        submitter = threading.Thread(target=self._guarded, args=(self._submit,), daemon=True)
        submitter.start()
        began = time.time()
        for number, strike in enumerate(self._plan(other)):
            due = time.time() + self._draw.uniform(0.3, 1.9)
            share = number / (self.kills + len(other))
            self._wait(lambda due=due, share=share: (
                time.time() >= due and self._ended >= share * self.sessions * 0.9
            ), 120.0, f"sessions to end (strike {number})")  # fmt: skip
            strike()
        self._strike_undisturbed()
        self._all_struck.set()
        with contextlib.suppress(TimeoutError):  # the audit reports what is missing
            self._wait(self._is_over, SETTLE_S, "the last sessions to end")
            self.log.ended_s = time.time() - began
            self._wait(self._is_delivered, DELIVERY_S, "the trainer and the callbacks")
        return self.log

    def _is_over(self) -> bool:
        return self._all_submitted.is_set() and self._ended >= sum(
            map(len, self.log.accepted.values())
        )

    def _is_delivered(self) -> bool:
        api = self.fleet.api(5.0)
        unread = api.get("/v1/results?consumer=trainer&limit=1")["items"]
        return not unread and not api.get("/v1/deliveries?state=pending&limit=1")

    def _wait(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        until = time.time() + within_s
        while not done():
            self.fleet.supervise()
            if self._failed:
                raise self._failed[0]
            if time.time() > until:
                msg = f"waited {within_s} s for {what}: {self._ended} sessions have ended"
                raise TimeoutError(msg)
            time.sleep(0.02)

    # ----------------------------------------------------------------------- work
    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failed.append(error)
            raise

    def _submit(self) -> None:
        draw = random.Random(self._draw.random())
        api = self.fleet.api()
        submitted = 0
        for batch in self._batches(draw):
            for accepted in api.post("/v1/tasks", batch):
                self.log.accepted[accepted["task"]] = tuple(accepted["sessions"])
            self.log.with_callback |= {task["id"] for task in batch if "callback" in task}
            submitted += len(batch) * GROUP
            while submitted - self._count_ended(api) >= OPEN_SESSIONS:
                time.sleep(0.2)
        self._all_submitted.set()
        while not self._is_over():
            self._count_ended(api)
            time.sleep(0.2)

    def _batches(self, draw: random.Random) -> Iterator[list[dict[str, Any]]]:
        """Yield batches of tasks: enough for `sessions`, and more while strikes are due."""
        number = 0
        while number * GROUP < self.sessions or not self._all_struck.is_set():
            size = draw.randint(1, 4)
            names = [f"t{number + n:04}" for n in range(size)]
            yield [make_random_task(name, draw, self.fleet.callback) for name in names]
            number += size

    def _count_ended(self, api: Any) -> int:
        counts = api.get("/v1/status")["sessions"]
        final = ("completed", "failed", "timed_out", "cancelled")
        self._ended = sum(counts.get(status, 0) for status in final)
        return self._ended

    # ----------------------------------------------------------------------- strikes
    def _plan(self, other: tuple[Callable[[], None], ...]) -> list[Callable[[], None]]:
        exact = {name: self.kills * share / 100 for name, share in VICTIMS.items()}
        counts = Counter({name: max(1, round(share)) for name, share in exact.items()})
        counts["agent"] += self.kills - counts.total()
        strikes: list[Callable[[], None]] = [
            lambda name=name: self._kill(name) for name in counts.elements()
        ]
        strikes += other
        self._draw.shuffle(strikes)
        return strikes

    def _kill(self, kind: str) -> None:
        if kind == "agent":
            self._kill_agent()
            return
        names = [name for name in self.fleet.programs if name.startswith(kind)]
        self._wait(lambda: self._are_running(names), 30.0, f"one of {names} to run")
        victim = self._draw.choice([name for name in names if self._are_running([name])])
        longer = kind == "node" and self._draw.random() < 0.5
        at = time.time()
        self.fleet.programs[victim].kill(self.fleet.lease_s + 2 if longer else 0.0)
        self.log.strikes.append(Strike(at, victim, "killed"))

    def _are_running(self, names: list[str]) -> bool:
        programs = [self.fleet.programs[name] for name in names]
        return any(program.alive and program.frozen is None for program in programs)

    def _kill_agent(self) -> None:
        self._wait(lambda: bool(self.fleet.agents()), 30.0, "an agent to run")
        try:
            os.kill(self._draw.choice(self.fleet.agents()), signal.SIGKILL)
        except (IndexError, ProcessLookupError):  # the last agent, or this one, ended just now
            self._kill_agent()
            return
        self.log.strikes.append(Strike(time.time(), "agent", "killed"))

    def _strike_undisturbed(self) -> None:
        """Freeze a node while the server runs, so that a requeue is measured in any storm."""

        def is_quiet() -> bool:
            ready = self.fleet.outages[-1].ready
            names = [node.name for node in self.fleet.nodes]
            return bool(ready) and time.time() - ready > 2.0 and self._are_running(names)

        self._wait(is_quiet, 30.0, "server and a node to run")
        self.freeze_a_node()

    def freeze_a_node(self) -> None:
        """SIGSTOP a node until after its lease has ended."""
        running = [node for node in self.fleet.nodes if self._are_running([node.name])]
        if running:
            node = self._draw.choice(running)
            node.freeze(self.fleet.lease_s + 2)
            self.log.strikes.append(Strike(time.time(), node.name, "frozen"))
