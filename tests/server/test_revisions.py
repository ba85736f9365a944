"""Consumers get each change of a reward exactly once, whatever the order of things."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from support.control_plane import IdleNode
from support.tasks import make_task
from tugline.protocol import RejudgeRequest, ResultQuery, RunKind, RunStart
from tugline.recording.trajectories import unpack
from tugline.server.control import ControlPlane
from tugline.server.store import results, runs, sessions
from tugline.server.store.results import End
from tugline.types import PluginSpec, Reward, Status

SAMPLES = 2
STEPS = 60
LAST = 8
"""Number of verdicts at the end, so that some rewards change for every seed."""
REWARDS = (0.0, 0.5, 1.0)


@dataclass
class Reader:
    """A consumer of results or of groups, which may start again from what it acknowledged."""

    name: str
    groups: bool
    cursor: int = 0
    unacked: list[tuple[str, int]] = field(default_factory=list)
    """What it has got since its last acknowledgement: session or task, and number of changes."""
    acked: Counter[tuple[str, int]] = field(default_factory=Counter)
    """What it has acknowledged."""
    last: dict[str, float | None] = field(default_factory=dict)
    """Last reward of each session that it has got."""

    async def read(self, control: ControlPlane, limit: int = 100) -> int:
        """Read a page; its number of results."""
        query = ResultQuery(after=self.cursor, groups=self.groups, limit=limit)
        page = await control.results(query)
        self.cursor = page.cursor
        revisions = Counter[str]()
        for item in page.items:
            self.last[item.session] = item.reward
            revisions[item.task if self.groups else item.session] += item.revision
        got = [group.id for group in page.groups] if self.groups else list(revisions)
        self.unacked += [(name, revisions[name]) for name in got]
        return len(page.items)

    async def ack(self, control: ControlPlane) -> None:
        """Acknowledge what it has got."""
        await control.database.write(results.ack, self.name, self.cursor)
        self.acked.update(self.unacked)
        self.unacked = []

    async def restart(self, control: ControlPlane) -> None:
        """Forget what is not acknowledged."""
        self.cursor = await control.database.read(results.read_acked, self.name)
        self.unacked = []


@dataclass
class World:
    """A control plane, a node that holds all sessions, and consumers."""

    control: ControlPlane
    node: IdleNode
    dice: random.Random
    readers: list[Reader]
    numbers: dict[str, int] = field(default_factory=dict)
    """Number of the last verdict on each session that has ended."""
    evaluators: int = 0

    async def end(self) -> None:
        """End a session."""
        if self.node.held:
            session = self.dice.choice(sorted(self.node.held))
            reward = self.dice.choice(REWARDS)
            await self.node.commit(session, reward=reward, patch="a", seconds={"eval": 1.0})
            self.numbers[session] = 1

    async def judge(self) -> None:
        """Add a verdict on a session."""
        if not self.numbers:
            return
        session = self.dice.choice(sorted(self.numbers))
        self.evaluators += 1
        spec = PluginSpec("session_completed", {"number": self.evaluators})
        request = RejudgeRequest(run="again", sessions=(session,), evaluator=spec)
        [[task]] = (await self.control.verdicts.rejudge(request)).tasks.values()
        reward = self.dice.choice(REWARDS)
        end = End(Status.COMPLETED, reward=reward, verdict=Reward(reward))
        await self.control.database.write(
            lambda tx: results.finish(tx, sessions.get(tx, f"{task}-0"), end)
        )
        self.numbers[session] += 1

    async def use(self) -> None:
        """Put verdicts on some sessions in force, together."""
        names = sorted(self.numbers)
        chosen = self.dice.sample(names, self.dice.randint(1, len(names))) if names else []
        numbers = {name: self.dice.randint(1, self.numbers[name]) for name in chosen}
        if numbers:
            await self.control.verdicts.use(numbers)

    async def read(self) -> None:
        """Let a consumer read a page."""
        await self.dice.choice(self.readers).read(self.control, self.dice.choice((1, 2, 100)))

    async def ack(self) -> None:
        """Let a consumer acknowledge."""
        await self.dice.choice(self.readers).ack(self.control)

    async def restart(self) -> None:
        """Let a consumer start again."""
        await self.dice.choice(self.readers).restart(self.control)


@pytest.mark.parametrize("seed", range(6))
async def test_each_change_reaches_each_consumer_once(control: ControlPlane, seed: int) -> None:
    """What a consumer acknowledged never comes again, and in the end it has every reward in force.

    The orders of ends, verdicts, choices, reads, acknowledgements and restarts are random.
    """
    batch = [make_task(name, SAMPLES) for name in "abc"]
    node = await IdleNode.at_work(control, *batch, room=SAMPLES * len(batch))
    await control.database.write(runs.start, "again", RunStart(kind=RunKind.REJUDGE))
    readers = [Reader(f"{kind}{n}", kind == "groups") for kind in ("groups", "all") for n in (1, 2)]
    world = World(control, node, random.Random(seed), readers)
    actions = (world.end, world.judge, world.use, world.read, world.ack, world.restart)
    for _ in range(STEPS):
        await world.dice.choice(actions)()
    while node.held:
        await world.end()
    for _ in range(LAST):
        await world.judge()
        await world.use()
    rewards = {}
    revisions = 0
    for session in world.numbers:
        view = await control.database.read(results.get, session)
        trajectory = unpack(await control.trajectory(session))
        assert trajectory.reward == Reward(view.reward or 0.0)
        assert trajectory.revision == view.revision
        rewards[session] = view.reward
        revisions += view.revision
    assert revisions
    for reader in readers:
        while await reader.read(control):
            pass
        await reader.ack(control)
        assert reader.last == rewards
        assert max(reader.acked.values()) == 1


async def test_a_group_comes_once_for_verdicts_used_together(control: ControlPlane) -> None:
    """A consumer that had the group gets it once more, one that had not gets only the new one."""
    node = await IdleNode.at_work(control, make_task("a", 3), room=3)
    for session in ("a-0", "a-1", "a-2"):
        await node.commit(session, reward=0.0, patch="a", seconds={"eval": 1.0})
    await control.database.write(runs.start, "again", RunStart(kind=RunKind.REJUDGE))
    ahead = Reader("ahead", groups=True)
    assert await ahead.read(control) == 3
    world = World(control, node, random.Random(1), [], dict.fromkeys(("a-0", "a-1", "a-2"), 1))
    while min(world.numbers.values()) < 2:
        await world.judge()
    await control.verdicts.use(world.numbers)
    behind = Reader("behind", groups=True)
    for reader in (ahead, behind):
        assert await reader.read(control) == 3
        assert await reader.read(control) == 0
    assert [name for name, _ in behind.unacked] == ["a"]
    assert [name for name, _ in ahead.unacked] == ["a", "a"]
