"""A node with a simulated harness, runtime and evaluator, on a real control plane."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.calls import make_call
from support.polling import until
from support.server import make_control
from support.tasks import make_task
from tugline.aio import PausableTimeout, enforce_timeout
from tugline.errors import ServerError
from tugline.evaluators.base import Evaluator, SessionOutcome, Verdict
from tugline.gateway.terms import Opened, SessionState
from tugline.harnesses.base import Harness, Launch, LaunchContext
from tugline.node.app import Node
from tugline.node.settings import NodeSettings
from tugline.protocol import ResultQuery, SessionView
from tugline.recording.records import RecordedResult
from tugline.recording.trajectories import unpack
from tugline.rollout.parts import Parts
from tugline.sandbox.base import Exit, SandboxSpec
from tugline.sandbox.local import LocalRuntime, LocalSandbox
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.server.control import ControlPlane
from tugline.server.store import sessions, stats
from tugline.types import Call, Group, Limits, PluginSpec, Reward, Session, Status, Task, Trajectory

GROUP = Group()


def open_plane(folder: Path, lease_s: float = 1.0) -> ControlPlane:
    """A control plane on SQLite."""
    return make_control(f"sqlite:{folder / 'server.db'}", folder, lease_s=lease_s)


class Link:
    """The node's view of the control plane: it may be unreachable, and requests are noted."""

    def __init__(self, control: ControlPlane) -> None:
        self.control, self.away = control, False
        self.refusal: ServerError | None = None
        self.refused: dict[str, Exception] = {}
        """Errors by session, each raised once in place of a commit."""
        self.requests: list[str] = []
        self.commits = asyncio.Event()
        """Cleared while commits get no answer."""
        self.commits.set()

    def __getattr__(self, name: str) -> Any:
        async def request(*args: Any) -> Any:
            self.requests.append(name)
            if self.away or self.refusal:
                raise self.refusal or ServerError("connection refused")
            if name == "commit":
                await self.commits.wait()
                if args[0] in self.refused:
                    raise self.refused.pop(args[0])
            return await getattr(self.control.dispatcher, name)(*args)

        return request


class HoldingGateway:
    """A gateway that holds agents while paused and notes the node's actions, without a model."""

    url = "http://nowhere"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Calls of each session."""
        self.actions: list[object] = []
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.recordings = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.recordings)

    @contextlib.asynccontextmanager
    async def open(self, session: Session, *_: Any, **_options: Any) -> AsyncIterator[Opened]:
        """An address with the session's name."""
        yield Opened(f"{self.url}/s/{session.id}", "key")

    def read_calls(self, session: str) -> list[Call]:
        """As many calls as were counted."""
        return [
            make_call(n, [1, 2, 3], [10, 11], session=session) for n in range(self.counts[session])
        ]

    async def write_result(self, session: str, result: RecordedResult) -> None:
        """Discard it."""

    def forget(self, session: str) -> None:
        """Nothing is kept of a session."""

    def describe(self, session: str) -> SessionState:
        """No failure, no budgets."""
        return SessionState(self.recordings / f"{session}.rec")

    async def pause(self, mode: str, *, within_s: float = 600.0) -> None:
        """Hold agents' calls."""
        self.actions.append(("pause", str(mode)))
        self.open_gate.clear()

    async def resume(self) -> None:
        """Let them continue."""
        self.actions.append("resume")
        self.open_gate.set()

    async def set_weights_version(self, version: int) -> None:
        """Note the version."""
        self.actions.append(version)


class Script(Harness, LocalRuntime):
    """Harness and runtime, and the shared state of the simulation."""

    name = "simulated"

    def __init__(self, gateway: HoldingGateway) -> None:
        LocalRuntime.__init__(self)
        self.gateway = gateway
        self.now = {"init": 0, "run": 0, "eval": 0, "sandboxes": 0}
        self.most = dict(self.now)
        self.held = {stage: asyncio.Event() for stage in ("init", "run", "eval")}
        for event in self.held.values():
            event.set()
        self.hang: frozenset[str] = frozenset()
        """Sessions that never end, besides those with the instruction ``hang``."""
        self.report: dict[str, Any] = {}
        """Report of each evaluation."""
        self.order: list[str] = []
        """Sessions in the order in which they began to run."""
        self.cancelled: list[str] = []
        """Sessions whose agents did not end by themselves."""

    def hold(self, stage: str) -> None:
        """Let all sessions wait in a stage until `release`."""
        self.held[stage].clear()

    def release(self, stage: str) -> None:
        """Let them continue."""
        self.held[stage].set()

    @contextlib.contextmanager
    def count(self, stage: str) -> Iterator[None]:
        """Count one more in a stage while the block lasts."""
        self.now[stage] += 1
        self.most[stage] = max(self.most[stage], self.now[stage])
        try:
            yield
        finally:
            self.now[stage] -= 1

    def launch(self, context: LaunchContext) -> Launch:
        """The instruction, and the session's name."""
        return Launch(argv=(context.instruction, context.base_url.rpartition("/")[-1]))

    async def _create(
        self, directory: Path, spec: SandboxSpec, stack: contextlib.AsyncExitStack
    ) -> LocalSandbox:
        if directory.name == "agent":
            with self.count("init"):
                await self.held["init"].wait()
        stack.enter_context(self.count("sandboxes"))
        return SimulatedSandbox(directory, OverlayWorkspace(directory, None, spec.files), self)


class SimulatedEvaluator(Evaluator):
    """Rewards every session with 0.5."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def evaluate(self, outcome: SessionOutcome) -> Verdict:
        """Open a sandbox and wait while EVAL is held."""
        with self._script.count("eval"):
            async with outcome.open_sandbox({}):
                await self._script.held["eval"].wait()
        return Verdict(Reward(0.5), self._script.report)


class SimulatedSandbox(LocalSandbox):
    """Its program calls the model once, writes a line and ends."""

    _runtime: Script

    async def start(self) -> None:
        """Create its folders in no time, so that sessions begin to run in their order."""
        self._create()

    async def put(self, *_: object) -> None:
        """Nothing: its program reads no files."""

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log: Path,
    ) -> Exit:
        """Wait while the gateway or RUN is held, or forever."""
        instruction, session = argv
        script = self._runtime
        script.order.append(session)
        with script.count("run"):
            script.gateway.counts[session] += 1
            await asyncio.to_thread(log.write_text, f"I am {session}\n")
            try:
                async with enforce_timeout(timeout_s):
                    await script.gateway.open_gate.wait()
                    await script.held["run"].wait()
                    if instruction == "hang" or session in script.hang:
                        await asyncio.Event().wait()
            except TimeoutError:
                return Exit(-15, timed_out=True, seconds=0.0)
            except asyncio.CancelledError:
                script.cancelled.append(session)
                raise
        return Exit(0, timed_out=False, seconds=0.0)


class SimulatedParts(Parts):
    """Plug-ins from the script, except the builder."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script

    def _make(self, kind: str, spec: PluginSpec, contract: type[Any]) -> Any:
        if kind == "builder":
            return super()._make(kind, spec, contract)
        return SimulatedEvaluator(self.script) if kind == "evaluator" else self.script


def make_simulated_task(
    name: str = "t", samples: int = 1, *, what: str = "work", group: Group = GROUP, **limits: float
) -> Task:
    """A task for the simulation."""
    parts = dict.fromkeys(("harness", "evaluator"), PluginSpec("simulated"))
    limited = Limits(**limits)
    return make_task(name, samples, instruction=what, group=group, limits=limited, **parts)


class Bench:
    """A node and its control plane."""

    def __init__(self, folder: Path, control: ControlPlane, **settings: Any) -> None:
        self.folder, self.control = folder, control
        self.link = Link(control)
        self.gateway = HoldingGateway()
        self.script = Script(self.gateway)
        given = {"name": "n", "slots": 4, "memory_floor_mb": 0, "disk_floor_gb": 0.0, **settings}
        self.settings = NodeSettings(**given)
        self.node = self.make_node()

    def make_node(self) -> Node:
        """A node in the same folder, as after a restart."""
        parts = SimulatedParts(self.script)
        return Node(self.link, self.gateway, parts, self.folder, self.settings)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run the node while the block lasts."""
        self.running = asyncio.create_task(self.node.run())
        try:
            yield
        finally:
            self.running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.running

    async def wait_until_ended(self) -> None:
        """Wait for the node to end by itself."""
        await asyncio.wait_for(asyncio.shield(self.running), 20)

    async def statuses(self) -> dict[str, Status]:
        """Status of every session with a result."""
        return {
            one.session: one.status
            for one in (await self.control.results(ResultQuery(limit=1000))).items
        }

    async def read_session(self, session: str) -> SessionView:
        """A session as the server has it."""
        return (await self.control.database.read(sessions.get, session)).view()

    async def read_epoch(self) -> int:
        """Epoch of the first session."""
        return (await self.read_session("t-0")).epoch

    async def count_by_status(self) -> dict[str, int]:
        """Sessions by status."""
        return (await self.control.database.read(stats.counts)).sessions

    async def wait_for_results(self, count: int) -> dict[str, Trajectory]:
        """The trajectories, once there are so many."""

        async def there() -> bool:
            return len(await self.statuses()) >= count

        await until(there)
        return {name: unpack(await self.control.trajectory(name)) for name in await self.statuses()}

    async def begin(self, task: Task, count: int = 1) -> None:
        """Submit a task, and wait until so many sessions run."""
        await self.control.submit([task])
        await self.wait_in("run", count)

    async def wait_in(self, stage: str, count: int = 1) -> None:
        """Wait until so many sessions are in a stage."""
        await until(lambda: self.script.now[stage] == count)

    @property
    def journal(self) -> list[str]:
        """Names of the files in the node's journal."""
        return sorted(path.name for path in (self.folder / "journal").glob("*"))


@contextlib.asynccontextmanager
async def open_bench(
    folder: Path, *, lease_s: float = 1.0, **settings: Any
) -> AsyncIterator[Bench]:
    """A node at work on a control plane of its own while the block lasts."""
    async with open_plane(folder, lease_s) as control:
        bench = Bench(folder, control, **settings)
        async with bench.working():
            yield bench
