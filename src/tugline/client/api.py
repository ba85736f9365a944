"""Asynchronous client of a rollout server; `sync` is the blocking one.

Every call has a deadline (`deadline_s`), until which transient failures are retried, and every
stream resumes after a restart of the server. `submit` is idempotent, since the caller chooses the
ids of tasks. A result is delivered until its consumer has acknowledged it (I3).
"""

import asyncio
import contextlib
import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import msgspec

from tugline import protocol
from tugline.client import streams
from tugline.client.runs import BATCH, RunsClient
from tugline.client.transport import Transport, find_server, quote_id, shift_index
from tugline.errors import Missing, ServerError, UsageError
from tugline.recording.trajectories import unpack
from tugline.types import Status, Task, Trajectory

DEADLINE_S = 60.0
BATCH_BYTES = 32 << 20
"""Maximum number of bytes in a request."""


class Client(RunsClient):
    """Client of a rollout server; an async context manager.

    `server` defaults to ``TUGLINE_SERVER``, else to the server of ``tugline up`` in `folder`.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        folder: Path | str | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        url, token = find_server(server, token, folder)
        self._http = Transport(url, token, deadline_s=deadline_s)
        self.url = self._http.url
        """URL of the server."""

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    # ---------------------------------------------------------------------- tasks and sessions
    async def submit(
        self, tasks: Task | Iterable[Task], *, run: str | None = None
    ) -> list[protocol.Accepted]:
        """Submit tasks durably, in batches; a batch is accepted completely or not at all.

        `run` is a run of `start_run`. Raises `Invalid`, `Conflict` or `QuotaExceeded`, whose
        `field` starts with the task's index, and `Missing` for an unknown run.
        """
        accepted: list[protocol.Accepted] = []
        for batch in _split_batches([tasks] if isinstance(tasks, Task) else tasks):
            try:
                accepted += await self._http.ask(
                    "POST", "/v1/tasks", list[protocol.Accepted], query={"run": run}, body=batch
                )
            except ServerError as error:
                shift_index(error, len(accepted))
                raise
        return accepted

    async def task(self, task: str) -> protocol.TaskView:
        """Read the state of a task. Raises `Missing`."""
        return await self._http.get(f"/v1/tasks/{quote_id(task)}", protocol.TaskView)

    async def task_body(self, task: str) -> Task:
        """Read a task as submitted. Raises `Missing`."""
        return await self._http.get(f"/v1/tasks/{quote_id(task)}/body", Task)

    async def tasks(
        self,
        *,
        state: protocol.TaskState | None = None,
        tenant: str | None = None,
        tag: str | None = None,
        run: str | None = None,
    ) -> AsyncIterator[protocol.TaskView]:
        """List tasks in order of submission; `tag` is ``key=value``."""
        query = {"state": state, "tenant": tenant, "tag": tag, "run": run}
        async for page in self._list_pages("/v1/tasks", query):
            for view in page.tasks:
                yield view

    async def session(self, session: str) -> protocol.SessionView:
        """Read the state of a session. Raises `Missing`."""
        return await self._http.get(f"/v1/sessions/{quote_id(session)}", protocol.SessionView)

    async def sessions(
        self,
        *,
        task: str | None = None,
        status: Status | None = None,
        node: str | None = None,
        run: str | None = None,
    ) -> AsyncIterator[protocol.SessionView]:
        """List sessions in order of submission."""
        query = {"task": task, "status": status, "node": node, "run": run}
        async for page in self._list_pages("/v1/sessions", query):
            for view in page.sessions:
                yield view

    async def cancel(
        self, *, task: str | None = None, session: str | None = None, by: str = "a client"
    ) -> protocol.Cancelled:
        """Cancel a task or a session: at once if queued, else when the node receives the request.

        Raises `Missing`.
        """
        if (task is None) == (session is None):
            raise UsageError("cancel() takes either a task or a session")
        kind, name = ("tasks", task) if task is not None else ("sessions", session or "")
        path = f"/v1/{kind}/{quote_id(name)}/cancel"
        return await self._http.ask("POST", path, protocol.Cancelled, query={"by": by})

    async def retry_task(self, task: str, by: str = "a client") -> list[str]:
        """Queue sessions that failed for a reason outside the policy again; return their ids."""
        path = f"/v1/tasks/{quote_id(task)}/retry"
        return await self._http.ask("POST", path, list[str], query={"by": by})

    async def write_note(self, session: str, text: str) -> None:
        """Write a note on a session, at most 2,000 characters; an empty one removes it."""
        path = f"/v1/sessions/{quote_id(session)}/note"
        body = protocol.SessionNote(text=text)
        await self._http.ask("PUT", path, type(None), body=body)

    async def released(self, tasks: Iterable[str]) -> AsyncGenerator[protocol.TaskView, None]:
        """Yield each of these tasks once all its sessions are final, in order of release."""
        names = dict.fromkeys(tasks)
        after = (await self.status()).position
        for name in list(names):
            if (view := await self.task(name)).state is protocol.TaskState.RELEASED:
                del names[name]
                yield view
        alone = next(iter(names)) if len(names) == 1 else None
        async with aclosing(self.events(after=after, task=alone)) as events:
            while names:
                event = await anext(events)
                if event.kind is protocol.EventKind.RELEASED and event.task in names:
                    del names[event.task]
                    yield await self.task(event.task)

    async def wait(
        self, tasks: str | Iterable[str], *, within_s: float | None = None
    ) -> list[protocol.TaskView]:
        """Wait until all of these tasks are released. Raises `TimeoutError` after `within_s`."""
        names = [tasks] if isinstance(tasks, str) else list(tasks)
        async with asyncio.timeout(within_s):
            views = {view.id: view async for view in self.released(names)}
        return [views[name] for name in names]

    # ---------------------------------------------------------------------- results
    def results(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        run: str | None = None,
        follow: bool = True,
        auto_ack: bool = False,
    ) -> AsyncGenerator[streams.Result, None]:
        """Yield results with their trajectories in order of commit, from the `consumer`'s position.

        With `auto_ack`, a result is acknowledged when the next one is requested; else call `ack`.
        Without `follow` the stream ends at the newest result.
        """
        query = protocol.ResultQuery(consumer=consumer, after=after, task=tuple(tasks), run=run)
        pages = streams.stream_pages(self._http, query, follow=follow)
        results = (found async for _, found in pages)
        return streams.read_items(results, consumer, self.ack if auto_ack else None)

    def groups(
        self,
        consumer: str | None = None,
        *,
        after: int | None = None,
        tasks: Sequence[str] = (),
        run: str | None = None,
        follow: bool = True,
        auto_ack: bool = False,
    ) -> AsyncGenerator[streams.GroupResults, None]:
        """Yield whole groups in order of release; see `results`."""
        query = protocol.ResultQuery(
            consumer=consumer, after=after, task=tuple(tasks), run=run, groups=True
        )
        pages = streams.stream_pages(self._http, query, follow=follow)
        groups = (streams.group_results(page, found) async for page, found in pages)
        return streams.read_items(groups, consumer, self.ack if auto_ack else None)

    async def ack(self, consumer: str, cursor: int) -> protocol.Consumer:
        """Acknowledge everything up to `cursor`: it is not delivered to this consumer again."""
        query = {"consumer": consumer}
        return await self._http.ask(
            "POST", "/v1/results/ack", protocol.Consumer, query=query, body=protocol.Ack(cursor)
        )

    async def consumers(self) -> list[protocol.Consumer]:
        """List consumers with their positions."""
        return await self._http.get("/v1/consumers", list[protocol.Consumer])

    async def delete_consumer(self, consumer: str) -> None:
        """Delete a consumer; retention no longer waits for it. Raises `Missing`."""
        await self._http.ask("DELETE", f"/v1/consumers/{quote_id(consumer)}", type(None))

    async def result(self, session: str) -> protocol.ResultView:
        """Read the result of a session, without tokens. Raises `Missing`."""
        return await self._http.get(f"/v1/sessions/{quote_id(session)}/result", protocol.ResultView)

    async def trajectory(self, session: str) -> Trajectory:
        """Read the trajectory of a session. Raises `Missing` for one that never ran."""
        return unpack(await self._http.get(f"/v1/sessions/{quote_id(session)}/trajectory", bytes))

    async def recording(self, session: str, folder: Path) -> None:
        """Save the recording of a session, with its tokenizer, in `folder`.

        Raises `Missing`, also if the recording is outside of the server's folder.
        """
        path = f"/v1/sessions/{quote_id(session)}/recording"
        data = await self._http.get(path, bytes, query={"files": True})
        if not data:
            raise Missing(
                f"{self.url} has no recording of {session}; it is on the node that ran the session"
            )
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, filter="data")

    # ---------------------------------------------------------------------- observation
    def events(
        self, *, after: int | None = None, task: str | None = None
    ) -> AsyncGenerator[protocol.Event, None]:
        """Yield events after a position (default: new events) as they occur."""
        return streams.stream_events(self._http, after, task)

    def log(
        self, session: str, *, tail: int | None = None, follow: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the output of a session's agent, or its last `tail` bytes."""
        return streams.stream_log(self._http, session, tail=tail, follow=follow)

    async def status(self, *, details: bool = False) -> protocol.Counts:
        """Read the counts of sessions, tasks and nodes; with `details`, `queue` and `unread`."""
        query = {"details": details}
        return await self._http.get("/v1/status", protocol.Counts, query=query)

    async def list_events(self, *, after: int = 0, limit: int = 1000) -> list[protocol.Event]:
        """List up to `limit` past events after a position."""
        query = {"after": after, "limit": limit}
        return await self._http.get("/v1/events", list[protocol.Event], query=query)

    async def metrics(self) -> str:
        """Read the server's metrics in Prometheus format."""
        return (await self._http.get("/metrics", bytes)).decode()

    async def nodes(self) -> list[protocol.NodeView]:
        """List the nodes."""
        return await self._http.get("/v1/nodes", list[protocol.NodeView])

    async def drain(self, node: str) -> None:
        """Drain a node: it finishes its sessions and leaves."""
        await self._http.ask("POST", f"/v1/nodes/{quote_id(node)}/drain", type(None))

    async def deliveries(
        self, state: protocol.DeliveryState | None = None, *, after: int = 0, limit: int = 100
    ) -> list[protocol.Delivery]:
        """List webhook deliveries: pending, delivered or dead."""
        query = {"state": state, "after": after, "limit": limit}
        return await self._http.get("/v1/deliveries", list[protocol.Delivery], query=query)

    async def redeliver(self, delivery: int) -> protocol.Delivery:
        """Retry a webhook delivery. Raises `Missing`."""
        return await self._http.ask("POST", f"/v1/deliveries/{delivery}/retry", protocol.Delivery)

    # ---------------------------------------------------------------------- weights
    async def weights(self) -> protocol.Control:
        """Read the newest weight version, and whether model calls are paused."""
        return await self._http.get("/v1/weights", protocol.Control)

    async def announce(self, version: int) -> protocol.Barrier:
        """Announce new weights. `Barrier.missing` names nodes that have not confirmed."""
        return await self._barrier("", protocol.Version(version))

    async def pause(
        self, mode: protocol.PauseMode = protocol.PauseMode.WAIT, *, within_s: float = 60.0
    ) -> protocol.Barrier:
        """Pause model calls on all nodes; returns when they are paused, or after `within_s`."""
        return await self._barrier("/pause", protocol.Pause(mode, within_s), wait_s=within_s)

    async def resume(self) -> protocol.Barrier:
        """Resume model calls."""
        return await self._barrier("/resume")

    @contextlib.asynccontextmanager
    async def paused(
        self, mode: protocol.PauseMode = protocol.PauseMode.WAIT, *, within_s: float = 60.0
    ) -> AsyncIterator[protocol.Barrier]:
        """Pause model calls during the block.

        Raises `ServerError`, after resuming, naming the nodes that did not confirm in time.
        """
        try:
            barrier = await self.pause(mode, within_s=within_s)
            if barrier.missing:
                raise ServerError(
                    f"nodes did not pause within {within_s:g} s: {', '.join(barrier.missing)}"
                )
            yield barrier
        finally:
            await self.resume()

    # ---------------------------------------------------------------------- internals
    async def _list_pages(
        self, path: str, query: dict[str, Any]
    ) -> AsyncGenerator[protocol.Page, None]:
        after: str | None = None
        while True:
            page = await self._http.get(path, protocol.Page, query={**query, "after": after})
            yield page
            if (after := page.next) is None:
                return

    async def _barrier(
        self, path: str, body: msgspec.Struct | None = None, *, wait_s: float = 60.0
    ) -> protocol.Barrier:
        url = f"/v1/weights{path}"
        return await self._http.ask("POST", url, protocol.Barrier, body=body, wait_s=wait_s)


def _split_batches(tasks: Iterable[Task]) -> Iterable[list[msgspec.Struct]]:
    batch: list[msgspec.Struct] = []
    size = 0
    for task in tasks:
        task_size = len(msgspec.json.encode(task))
        if batch and (len(batch) == BATCH or size + task_size > BATCH_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(task)
        size += task_size
    if batch:
        yield batch
