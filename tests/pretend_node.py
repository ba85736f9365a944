"""A server, a gateway and parts that cost nothing: what is tested is the node between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from stub_model import StubGateway
from tugline.errors import FencedError, ServerError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.node.app import Node
from tugline.node.settings import NodeSettings
from tugline.protocol import (
    Commit,
    CommitOutcome,
    Control,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    Release,
    Renewal,
    Stop,
    StopKind,
    Work,
)
from tugline.recording.trajectories import unpack
from tugline.rollout.parts import Parts
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Sandbox, SandboxSpec
from tugline.sandbox.files import put
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout, enforce_timeout
from tugline.types import Limits, PluginSpec, Reward, Session, Task, Trajectory

LEASE_S = 0.6


class Server:
    """A `Dispatcher` in memory: leases with epochs, one node, no retries of its own."""

    def __init__(self) -> None:
        self.queue: list[Work] = []
        self.leased: dict[str, Work] = {}
        self.results: dict[str, Trajectory] = {}
        self.backs: list[tuple[str, Release]] = []
        self.stops: list[Stop] = []
        self.logs: dict[str, bytes] = {}
        self.followed: tuple[str, ...] = ()
        self.control = Control()
        self.applied = 0
        self.node = ""
        self.hellos: list[NodeRegistration] = []
        self.rooms: list[int] = []
        self.said: list[str] = []
        """What was asked, in order."""
        self.away = False
        self.draining = False
        self.commits = asyncio.Semaphore(1000)
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------ for the test
    def submit(self, *tasks: Task) -> list[str]:
        """Queue every sample."""
        added = [
            Work(Session(id=f"{task.id}-{n}", task=task.id, sample=n, epoch=1), task)
            for task in tasks
            for n in range(task.samples)
        ]
        self.queue += added
        self.wake()
        return [work.session.id for work in added]

    def stop(self, session: str, why: StopKind) -> None:
        """Order a session to be stopped until it is gone."""
        self.stops.append(Stop(session, self.leased[session].session.epoch, why, "a test"))
        self.wake()

    def order(self, control: Control) -> None:
        """Change what all nodes have in common."""
        self.control = control
        self.wake()

    def lose(self) -> None:
        """Forget the node, and give what it has to the queue again."""
        self.node = ""
        self._requeue()
        self.wake()

    def wake(self) -> None:
        """Look at open questions again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, true: Callable[[], object], within_s: float = 10.0) -> None:
        """Wait for something, not for ever."""
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - anything may make it true
                await asyncio.sleep(0.005)

    # ------------------------------------------------------------------ Dispatcher
    async def register(self, hello: NodeRegistration) -> NodeRegistered:
        """A new node takes the place of the one before."""
        self._heard("register")
        self.hellos.append(hello)
        self._requeue()
        self.node = f"n{next(self._numbers)}"
        return NodeRegistered(node=self.node, token="t", lease_s=LEASE_S, control=self.control)

    async def lease(self, node: str, ask: LeaseRequest) -> LeaseResponse:
        """As `ControlPlane.lease`, for one node."""
        self._heard("lease")
        self.rooms.append(ask.capacity)
        ends = asyncio.get_running_loop().time() + ask.wait_s
        while True:
            orders = self._orders(node, ask, ask.capacity)
            news = orders.control.generation > ask.applied or orders.work or orders.stop
            left = ends - asyncio.get_running_loop().time()
            if news or orders.draining or orders.follow != () or left <= 0:
                return orders
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    async def renew(self, node: str, renewal: Renewal) -> LeaseResponse:
        """As `ControlPlane.renew`."""
        self._heard("renew")
        return self._orders(node, renewal, 0)

    async def commit(self, session: str, epoch: int, trajectory: bytes) -> Commit:
        """Keep a result once."""
        self._heard("commit")
        async with self.commits:
            self._heard("committed")
            self._fence(session, epoch)
            del self.leased[session]
            self.stops = [stop for stop in self.stops if stop.session != session]
            self.results[session] = unpack(trajectory)
            return Commit(CommitOutcome.COMMITTED)

    async def release(self, session: str, back: Release) -> None:
        """Note it; the session is not queued again."""
        self._heard("release")
        self._fence(session, back.epoch)
        del self.leased[session]
        self.stops = [stop for stop in self.stops if stop.session != session]
        self.backs.append((session, back))

    async def drain(self, node: str) -> None:
        """Note it."""
        self._heard("drain")

    async def log(self, session: str, epoch: int, offset: int, chunk: bytes) -> int:
        """As `server.logs.Logs.append`, without a limit."""
        self._heard("log")
        held = self.logs.get(session, b"")
        if offset == len(held):
            self.logs[session] = held + chunk
        return len(self.logs.get(session, b""))

    # ------------------------------------------------------------------ inside
    def _heard(self, what: str) -> None:
        self.said.append(what)
        if self.away:
            msg = "connection refused"
            raise ServerError(msg)

    def _orders(self, node: str, said: LeaseRequest | Renewal, room: int) -> LeaseResponse:
        if node != self.node:
            msg = "this node was lost"
            raise FencedError(msg)
        self.applied = said.applied
        held = {one.session: one.epoch for one in said.held}
        known = {name: work.session.epoch for name, work in self.leased.items()}
        fenced = [
            Stop(name, epoch, StopKind.FENCED)
            for name, epoch in held.items()
            if known.get(name) != epoch
        ]
        again = [work for name, work in self.leased.items() if name not in held and room]
        fresh, self.queue = self.queue[:room], self.queue[room:]
        self.leased |= {work.session.id: work for work in fresh}
        stops = [stop for stop in self.stops if stop.session in held]
        return LeaseResponse(
            work=(*again, *fresh),
            stop=(*fenced, *stops),
            control=self.control,
            draining=self.draining,
            follow=self.followed,
        )

    def _requeue(self) -> None:
        for work in self.leased.values():
            old = work.session
            new = Session(id=old.id, task=old.task, sample=old.sample, epoch=old.epoch + 1)
            self.queue.append(Work(new, work.task))
        self.leased.clear()

    def _fence(self, session: str, epoch: int) -> None:
        work = self.leased.get(session)
        if work is None or work.session.epoch != epoch:
            msg = f"{session} belongs to another"
            raise FencedError(msg)


class PausedGateway(StubGateway):
    """A stub that notes what a node does to it."""

    def __init__(self) -> None:
        super().__init__([])
        self.did: list[object] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def pause(self, mode: str, *, within_s: float = 600.0) -> None:
        """Hold agents' calls."""
        self.did.append(("pause", str(mode)))
        self.gate.clear()

    def resume(self) -> None:
        """Let them go on."""
        self.did.append("resume")
        self.gate.set()

    def set_weights_version(self, version: int) -> None:
        """Note the version."""
        self.did.append(version)


class Script(Harness):
    """Every part at once, with times that a test sets; counts what goes on in each stage."""

    name = "pretend"
    wants_box = True

    def __init__(self, gateway: PausedGateway, **times: float) -> None:
        """`times`: seconds of ``init``, ``run``, ``eval``. The instruction ``hang`` never ends."""
        self.gateway, self.times = gateway, {"init": 0.0, "run": 0.0, "eval": 0.0, **times}
        self.now = {"init": 0, "run": 0, "eval": 0, "boxes": 0}
        self.most = dict(self.now)
        self.hang: frozenset[str] = frozenset()
        """Sessions that never end, whatever their instruction says."""
        self.order: list[str] = []
        """Sessions in the order in which they began to run."""
        self.ended: list[str] = []
        """What became of agents that did not end by themselves."""

    @contextlib.contextmanager
    def going(self, stage: str) -> Iterator[None]:
        """Count one more in a stage while the block lasts."""
        self.now[stage] += 1
        self.most[stage] = max(self.most[stage], self.now[stage])
        try:
            yield
        finally:
            self.now[stage] -= 1

    def launch(self, context: LaunchContext) -> Launch:
        """The instruction, and whose it is."""
        return Launch(argv=(context.instruction, context.base_url.rpartition("/")[-1]))

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """A box in a folder, after the time of INIT if it is for an agent."""
        for name in ("work", "home", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        put(directory / "work", spec.files if spec else {})
        if directory.name == "agent":
            with self.going("init"):
                await asyncio.sleep(self.times["init"])
        with self.going("boxes"):
            yield PretendSandbox(self, directory)

    def reap(self, directory: Path) -> int:
        """Nothing is ever left."""
        return 0

    def check_available(self) -> str | None:
        """Never."""
        return None

    def list_weaknesses(self) -> tuple[str, ...]:
        """None that matter here."""
        return ()


class ScriptedEvaluator(Evaluator):
    """The evaluator of a script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Half a point, after a while."""
        with self.script.going("eval"):
            async with outcome.open_sandbox({}):
                await asyncio.sleep(self.script.times["eval"])
        return Verdict(Reward(0.5), {})


class PretendSandbox(Sandbox):
    """A program in it asks the model once, says so, and takes its time."""

    def __init__(self, script: Script, directory: Path) -> None:
        self.workdir, self.home = directory / "work", directory / "home"
        self.logs = directory / "logs"
        self._script = script

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Put them there."""
        put(Path(root), files)

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Nothing is asked for."""
        return None

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """It does nothing."""
        return Patch()

    async def expose(self, url: str) -> str:
        """As it is."""
        return url

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Wait for as long as RUN takes; ``hang`` waits for ever."""
        what, session = argv
        script = self._script
        script.order.append(session)
        with script.going("run"):
            script.gateway.requests.setdefault(session, []).append({})
            (self.logs / f"{log_name}.log").write_text(f"I am {session}\n")
            try:
                async with enforce_timeout(timeout_s):
                    await script.gateway.gate.wait()
                    hangs = what == "hang" or session in script.hang
                    await asyncio.sleep(3600 if hangs else script.times["run"])
            except TimeoutError:
                return Exit(-15, timed_out=True, seconds=0.0)
            except asyncio.CancelledError:
                script.ended.append(session)
                raise
        return Exit(0, timed_out=False, seconds=0.0)


class Given(Parts):
    """Everything but the builder is scripted."""

    def __init__(self, part: Script) -> None:
        super().__init__()
        self.part, self.scripted = part, ScriptedEvaluator(part)

    def _make(self, kind: str, part: PluginSpec) -> Any:
        if kind == "builder":
            return super()._make(kind, part)
        return self.scripted if kind == "evaluator" else self.part


def task(name: str = "t", *, what: str = "work", samples: int = 1, **limits: float) -> Task:
    """Work for the script."""
    return Task(
        id=name,
        instruction=what,
        harness=PluginSpec("pretend"),
        evaluator=PluginSpec("pretend"),
        samples=samples,
        limits=Limits(**limits),
    )


class Bench:
    """A node at work on a server that a test plays."""

    def __init__(self, folder: Path, server: Server | None = None, **settings: Any) -> None:
        times = {name: settings.pop(name) for name in ("init", "run", "eval") if name in settings}
        self.folder, self.server = folder, server or Server()
        self.gateway = PausedGateway()
        self.script = Script(self.gateway, **times)
        given = {"name": "n", "slots": 4, "memory_floor_mb": 0, "disk_floor_gb": 0.0, **settings}
        self.settings = NodeSettings(**given)
        self.node = self.another()
        self.running: asyncio.Task[None] | None = None

    def another(self) -> Node:
        """A node in the same folder, as after a restart."""
        return Node(self.server, self.gateway, Given(self.script), self.folder, self.settings)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Server]:
        """The node runs while the block lasts."""
        self.running = asyncio.create_task(self.node.run())
        try:
            yield self.server
        finally:
            self.running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.running
