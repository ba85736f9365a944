"""Work that keeps coming, and a killer that strikes at random moments while it is done.

The seed decides what is asked for and who is struck; when, the machine decides too.
"""

import contextlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from chaos.fleet import HERE, Fleet

GROUP = 4
OPEN_SESSIONS = 48
"""So many are asked for ahead of what has ended."""
VICTIMS = {"server": 22, "node": 24, "agent": 22, "engine": 14, "receiver": 9, "trainer": 9}
"""Kills of each kind in a hundred."""
SETTLE_S = 150.0
"""How long the last sessions may take after the last strike."""
TOLD_S = 60.0
"""How long the last result may take to those who want it."""


@dataclass(frozen=True)
class Strike:
    """What was done to whom, and when."""

    at: float
    victim: str
    how: str
    """``killed``, or ``frozen`` beyond its lease."""


@dataclass
class Story:
    """All that the outside knows when it is over."""

    accepted: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sessions of each task that the server said it keeps."""
    called_back: set[str] = field(default_factory=set)
    """Tasks with a callback."""
    strikes: list[Strike] = field(default_factory=list)
    ended_s: float = math.inf


def body(name: str, draw: random.Random, callback: str) -> dict[str, Any]:
    """One task: a group of agents, some slow, some that are not waited for."""
    plan = {"turns": draw.randint(1, 3), "pause_s": draw.choice((0.0, 0.1, 0.3, 1.0))}
    agent = [sys.executable, "-S", str(HERE / "agent.py")]
    task: dict[str, Any] = {
        "id": name,
        "instruction": json.dumps(plan),
        "harness": {"name": "shell", "options": {"command": agent}},
        "evaluator": {"name": "chaos.judge:Answer"},
        "runtime": {"name": "local"},  # agents are told apart by the folder they are in
        "samples": GROUP,
        "limits": {"agent_s": 60.0},
        "tenant": draw.choice(("one", "two")),
        "priority": draw.randint(-2, 2),
        "group": {"attempts": 10},
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
    """`kills` strikes over at least `sessions` sessions; work is there until the last strike."""

    def __init__(self, fleet: Fleet, *, sessions: int, kills: int, seed: int) -> None:
        self.fleet, self.sessions, self.kills = fleet, sessions, kills
        self.story = Story()
        self._draw = random.Random(seed)
        self._all_struck = threading.Event()
        self._all_asked = threading.Event()
        self._ended = 0
        self._failed: list[BaseException] = []

    def run(self, other: tuple[Callable[[], None], ...] = ()) -> Story:
        """From the first task to the last result; `other` disasters are spread over it."""
        submitter = threading.Thread(target=self._guarded, args=(self._submit,), daemon=True)
        submitter.start()
        began = time.time()
        for number, strike in enumerate(self._plan(other)):
            due = time.time() + self._draw.uniform(0.3, 1.9)
            share = number / (self.kills + len(other))
            self._wait(lambda due=due, share=share: (
                time.time() >= due and self._ended >= share * self.sessions * 0.9
            ), 120.0, f"the sessions to get on (strike {number})")  # fmt: skip
            strike()
        self._all_struck.set()
        with contextlib.suppress(TimeoutError):  # the audit tells what is missing
            self._wait(self._over, SETTLE_S, "the last sessions to end")
            self.story.ended_s = time.time() - began
            self._wait(self._told, TOLD_S, "the trainer and the callbacks")
        return self.story

    def _over(self) -> bool:
        return self._all_asked.is_set() and self._ended >= sum(
            map(len, self.story.accepted.values())
        )

    def _told(self) -> bool:
        api = self.fleet.api(5.0)
        unread = api.get("/v1/results?consumer=trainer&limit=1")["items"]
        return not unread and not api.get("/v1/deliveries?state=pending&limit=1")

    def _wait(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        until = time.time() + within_s
        while not done():
            self.fleet.tend()
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
        asked = 0
        for batch in self._batches(draw):
            for accepted in api.post("/v1/tasks", batch):
                self.story.accepted[accepted["task"]] = tuple(accepted["sessions"])
            self.story.called_back |= {one["id"] for one in batch if "callback" in one}
            asked += len(batch) * GROUP
            while asked - self._count_ended(api) >= OPEN_SESSIONS:
                time.sleep(0.2)
        self._all_asked.set()
        while not self._over():
            self._count_ended(api)
            time.sleep(0.2)

    def _batches(self, draw: random.Random) -> Iterator[list[dict[str, Any]]]:
        """Yield batches of tasks: enough for `sessions`, and more while strikes are due."""
        number = 0
        while number * GROUP < self.sessions or not self._all_struck.is_set():
            size = draw.randint(1, 4)
            yield [body(f"t{number + n:04}", draw, self.fleet.callback) for n in range(size)]
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
        self._wait(lambda: self._standing(names), 30.0, f"one of {names} to stand")
        one = self._draw.choice([n for n in names if self._standing([n])])
        longer = kind == "node" and self._draw.random() < 0.5
        at = time.time()
        self.fleet.programs[one].kill(self.fleet.lease_s + 2 if longer else 0.0)
        self.story.strikes.append(Strike(at, one, "killed"))

    def _standing(self, names: list[str]) -> bool:
        programs = [self.fleet.programs[name] for name in names]
        return any(one.alive and one.frozen is None for one in programs)

    def _kill_agent(self) -> None:
        self._wait(lambda: bool(self.fleet.agents()), 30.0, "an agent to run")
        try:
            os.kill(self._draw.choice(self.fleet.agents()), signal.SIGKILL)
        except (IndexError, ProcessLookupError):  # the last one, or this one, ended just now
            self._kill_agent()
            return
        self.story.strikes.append(Strike(time.time(), "agent", "killed"))

    def freeze_a_node(self) -> None:
        """SIGSTOP a node until after its lease has ended."""
        standing = [one for one in self.fleet.nodes if self._standing([one.name])]
        if standing:
            one = self._draw.choice(standing)
            one.freeze(self.fleet.lease_s + 2)
            self.story.strikes.append(Strike(time.time(), one.name, "frozen"))
