"""The rollout server of a run: in this process with one node, or a remote one.

A remote server has any number of nodes and outlives the trainer; recordings stay on its nodes.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from tugline import log
from tugline.client.api import Client
from tugline.errors import Missing, ServerError
from tugline.launch.engine import EngineConnection
from tugline.launch.local import LocalServer, OnDone, open_local
from tugline.launch.naming import name_run
from tugline.launch.settings import Settings
from tugline.launch.tokens import describe_console
from tugline.protocol import Accepted, Control, RunKind
from tugline.rollout.rejudge import name_user
from tugline.server.settings import ServerSettings
from tugline.trainers.config import TrainConfig
from tugline.trainers.publish import WeightControl
from tugline.types import Call, Task, Trajectory

_LEASE_S = 120.0
"""Lease time, longer than a server's default, because training delays renewals in this process."""
_SERVER_S = 600.0
"""Seconds for which a remote server may be unavailable."""
_FORBIDDEN = 403
"""Status for a token whose tenant requires other names of runs."""
_log = log.get("trainer")


class RolloutServer(Protocol):
    """What a trainer needs of a server: `LocalServer` and `RemoteServer` have it."""

    @property
    def control(self) -> WeightControl:
        """Pauses model calls and announces weights at all gateways of the server."""

    async def weights(self) -> Control:
        """Read the newest weight version, and whether model calls are paused."""

    @property
    def report_step(self) -> Callable[..., Awaitable[object]]:
        """Reports figures and notes of a step, for the console; see `Client.report_step`."""

    async def submit(self, tasks: Sequence[Task]) -> object:
        """Submit `tasks`; those that were submitted before are left as they are."""

    async def run(self, tasks: Sequence[Task], on_done: OnDone) -> list[Trajectory]:
        """Run all samples of `tasks` that have no result; return the results of all."""

    async def run_again(self, tasks: Sequence[str]) -> frozenset[str]:
        """Queue the sessions that ended for a reason outside the policy again; return them."""

    async def load_results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """Return the existing trajectories of these tasks, in their order."""

    async def read_calls(self, tasks: Sequence[str]) -> list[Call]:
        """Return the recorded calls of these tasks; none if the recordings are elsewhere."""


class RemoteServer(Client):
    """Client of a remote server; see `RolloutServer`."""

    run_name: str | None = None
    """Registered run that submitted tasks belong to."""

    async def submit(
        self, tasks: Task | Iterable[Task], *, run: str | None = None
    ) -> list[Accepted]:
        """Submit tasks to `run`, by default to this one."""
        return await super().submit(tasks, run=run or self.run_name)

    @property
    def control(self) -> Client:
        """The same client, which has the calls for weights."""
        return self

    async def run(self, tasks: Sequence[Task], on_done: OnDone) -> list[Trajectory]:
        """Return the results of all samples of `tasks`; finished samples are not run again."""
        await self.submit(tasks)
        names = [task.id for task in tasks]
        done = 0
        async with aclosing(self.released(names)) as released:
            async for view in released:
                done += view.samples
                on_done(done, sum(task.samples for task in tasks))
        return await self.load_results(names)

    async def run_again(self, tasks: Sequence[str]) -> frozenset[str]:
        """Queue the sessions that ended for a reason outside the policy again; return them."""
        again: set[str] = set()
        for task in tasks:
            again.update(await self.retry_task(task, by="trainer"))
        return frozenset(again)

    async def load_results(self, tasks: Sequence[str]) -> list[Trajectory]:
        """Return the trajectories of finished tasks, in the order of `tasks`."""
        trajectories = []
        for task in tasks:
            async for view in self.sessions(task=task):
                with contextlib.suppress(Missing):  # it was cancelled before it ran
                    trajectories.append(await self.trajectory(view.id))
        return trajectories

    async def read_calls(self, tasks: Sequence[str]) -> list[Call]:
        """Return no calls: the recordings stay on the nodes."""
        return []


@contextlib.asynccontextmanager
async def open_rollout_server(
    config: TrainConfig,
    folder: Path,
    engine: EngineConnection,
    report: Callable[[str], object],
    *,
    console: bool = False,
) -> AsyncIterator[RolloutServer]:
    """Connect to ``server``, or open a server with a node in `folder`.

    With `console`, that of the opened server is served on loopback; `report` gets the link.
    """
    if config.server is not None:
        async with (
            RemoteServer(config.server, deadline_s=_SERVER_S) as remote,
            _register(remote, config, folder),
        ):
            yield remote
        return
    settings = Settings(
        server=ServerSettings(lease_s=_LEASE_S, port=0),
        # The name is the same in every folder, so that a resumed run replaces its old node.
        node=replace(config.node, name="train"),
        gateway=config.gateway,
        engine=config.engine,
    )
    async with (
        open_local(settings, folder, engine, serve=console) as local,
        _register(local, config, folder),
    ):
        local.watch.patience_s = config.schedule.patience
        local.watch.report = report
        if console and local.url is not None:
            report(describe_console(settings.server, folder, local.url, "training"))
        yield local


@contextlib.asynccontextmanager
async def _register(
    server: RemoteServer | LocalServer, config: TrainConfig, folder: Path
) -> AsyncIterator[None]:
    """Register the run at its server during the block; it has ended if the block succeeds."""
    name = name_run(folder)
    configuration = msgspec.to_builtins(config, enc_hook=str)
    try:
        await server.start_run(name, RunKind.TRAIN, configuration, by=name_user())
    except ServerError as error:
        if error.status != _FORBIDDEN:
            raise
        _log.warning("run not registered", run=name, error=str(error))
        yield
        return
    server.run_name = name
    yield
    with contextlib.suppress(ServerError):  # the run has ended, with all that it made
        await server.end_run(name)
