"""Handlers of tasks, sessions, nodes and weights; `runs` and `feeds` have the others.

A node joins with the join token, then uses its own token. It may write to the sessions that it
holds; other requests are rejected like those for a lost lease (fencing), whatever their epoch.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.responses import Response

from tugline import protocol
from tugline.errors import FencedError, Invalid, Missing
from tugline.protocol.nodes import Epoch
from tugline.recording.folder import file_name, pack_files
from tugline.recording.view.html_page import pack_recording
from tugline.server.http import route
from tugline.server.store import nodes, results, sessions, tasks
from tugline.server.validation import decode_trajectory
from tugline.types import Task, encode

MAX_BATCH = 1000
"""Maximum number of tasks per request."""
MAX_RESULT = 256 << 20
"""Maximum size of a compressed trajectory in bytes."""
MAX_HELD = 16 << 20
"""Maximum size in bytes of a request that lists a node's sessions."""
ROUTES = route.Routes()


class CancelQuery(msgspec.Struct, frozen=True):
    """Parameters of a cancellation or a retry."""

    by: Annotated[str, Meta(min_length=1, max_length=128)] = "a client"
    """Originator, who is named in the results and events of these sessions."""


class SubmitQuery(msgspec.Struct, frozen=True):
    """Parameters of a submission."""

    run: protocol.Name | None = None
    """Registered run that the tasks belong to."""


@ROUTES.add("POST", "/v1/tasks", route.CLIENTS, max_body=64 << 20)
async def submit(
    call: route.ApiCall[SubmitQuery, list[Task]],
) -> list[protocol.Accepted] | Response:
    """Submit one task or up to 1,000 tasks; all are stored or none."""
    if not 1 <= len(call.body) <= MAX_BATCH:
        raise Invalid(f"the body has {len(call.body)} tasks, must have 1 to {MAX_BATCH}")
    run = call.query.run
    if run is not None:
        call.caller.check_name("run", run)
    accepted = await call.control.submit(route.admit(call), run)
    status = 201 if any(each.new for each in accepted) else 200
    return Response(msgspec.json.encode(accepted), status, media_type=route.JSON)


@ROUTES.add("GET", "/v1/tasks", route.READERS)
async def list_tasks(call: route.QueryCall[protocol.TaskQuery]) -> protocol.Page:
    """List tasks, in the order of submission."""
    return await call.db.read(tasks.page, call.query)


@ROUTES.add("GET", "/v1/tasks/{id}", route.READERS)
async def get_task(call: route.PlainCall) -> protocol.TaskView:
    """Get the current state of a task."""
    return await call.db.read(tasks.view, call.id)


@ROUTES.add("GET", "/v1/tasks/{id}/body", route.READERS)
async def get_body(call: route.PlainCall) -> Task:
    """Get a task as it was submitted."""
    return await call.db.read(tasks.body, call.id)


@ROUTES.add("POST", "/v1/tasks/{id}/cancel", route.CLIENTS, find_owner=tasks.view)
async def cancel_task(call: route.QueryCall[CancelQuery]) -> protocol.Cancelled:
    """Cancel the unfinished sessions of a task."""
    return await call.db.write(results.cancel_task, call.id, call.query.by)


@ROUTES.add("POST", "/v1/tasks/{id}/retry", route.CLIENTS, find_owner=tasks.view)
async def retry_task(call: route.QueryCall[CancelQuery]) -> list[str]:
    """Queue sessions that failed for a reason outside the policy again; returns their ids."""
    return [*await call.db.write(results.run_again, call.id, call.query.by)]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Lease of the session in a request of a node."""

    epoch: Epoch


class BodyChunk(Lease, frozen=True, kw_only=True):
    """Position of a chunk in a log."""

    offset: protocol.Position
    """Byte offset of the chunk in the log."""


# --------------------------------------------------------------------------- sessions
@ROUTES.add("GET", "/v1/sessions", route.READERS)
async def list_sessions(call: route.QueryCall[protocol.SessionQuery]) -> protocol.Page:
    """List sessions in the order of submission, and the results of those that have ended."""
    return await call.db.read(sessions.page, call.query)


@ROUTES.add("GET", "/v1/sessions/{id}", route.READERS)
async def get_session(call: route.PlainCall) -> protocol.SessionView:
    """Get the current state of a session."""
    return (await call.db.read(sessions.get, call.id)).view()


@ROUTES.add("POST", "/v1/sessions/{id}/cancel", route.CLIENTS, find_owner=sessions.get)
async def cancel_session(call: route.QueryCall[CancelQuery]) -> protocol.Cancelled:
    """Cancel a session."""
    return await call.db.write(results.cancel_session, call.id, call.query.by)


@ROUTES.add("PUT", "/v1/sessions/{id}/note", route.CLIENTS, find_owner=sessions.get)
async def write_note(call: route.BodyCall[protocol.SessionNote]) -> None:
    """Replace the note on a session; an empty text removes it."""
    await call.db.write(sessions.write_note, call.id, call.body.text.strip())


@ROUTES.add("GET", "/v1/sessions/{id}/log", route.READERS)
async def read_log(call: route.QueryCall[protocol.LogQuery]) -> Response:
    """Read the agent's output as text; with `follow` until the session ends."""
    query = call.query
    waits = call.waits
    offset = query.offset if query.tail is None else -query.tail
    first = await call.control.read_log(call.id, offset=offset)
    start = str(first.offset - len(first.data))

    async def pieces() -> AsyncGenerator[bytes]:
        part = first
        while part.data or (query.follow and not part.ended):
            if part.data:
                yield part.data
            wait_s = waits.keep_alive_s if query.follow else 0.0
            part = await call.control.read_log(call.id, offset=part.offset, wait_s=wait_s)

    return call.stream(pieces(), route.TEXT, **{"tugline-offset": start})


@ROUTES.add("GET", "/v1/sessions/{id}/result", route.READERS)
async def get_result(call: route.PlainCall) -> protocol.ResultView:
    """Get a result without its tokens."""
    return await call.db.read(results.get, call.id)


class TrajectoryQuery(msgspec.Struct, frozen=True):
    """Expected state of a trajectory."""

    revision: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Only this revision; a conflict if there is a later one."""


@ROUTES.add("GET", "/v1/sessions/{id}/trajectory", route.READERS)
async def get_trajectory(call: route.QueryCall[TrajectoryQuery]) -> Response:
    """Get a trajectory: compressed msgpack as stored, msgpack, or JSON."""
    media = call.accept(route.ZSTD, route.JSON, route.MSGPACK)
    data = await call.control.trajectory(call.id, call.query.revision)
    body = data if media == route.ZSTD else await asyncio.to_thread(_unpack, data, media)
    return Response(body, media_type=media)


def _unpack(data: bytes, media: str) -> bytes:
    trajectory = decode_trajectory(data)
    if media == route.MSGPACK:
        return encode(trajectory)
    return msgspec.json.encode(trajectory, enc_hook=np.ndarray.tolist)


class RecordingQuery(msgspec.Struct, frozen=True):
    """Format of a recording."""

    files: bool = False
    """Return a tar archive of the recording, its tokenizer and, once it has a result, its patch."""


@ROUTES.add("GET", "/v1/sessions/{id}/recording", route.READERS)
async def get_recording(call: route.QueryCall[RecordingQuery]) -> Response:
    """Get a session's recording so far, as gzip of JSON and arrays; 204 if it is not stored here.

    It is stored here if the node's files are in the server's folder, as with `tugline up`, or if
    the server is that of a training run.
    """
    session = (await call.db.read(sessions.get, call.id)).session()
    folder = call.control.folder
    places = (f"nodes/*/recordings/{file_name(session)}", f"recordings/{file_name(session)}")
    path = next((path for place in places for path in folder.glob(place)), None)
    if path is None:
        return Response(status_code=204)
    if not call.query.files:
        return Response(await asyncio.to_thread(pack_recording, path), media_type=route.GZIP)
    patch = ""
    with contextlib.suppress(Missing):  # it has no result yet
        patch = (await call.db.read(results.get, call.id)).patch
    return Response(await asyncio.to_thread(pack_files, path, patch), media_type=route.TAR)


# --------------------------------------------------------------------------- for nodes
@ROUTES.add("POST", "/v1/sessions/{id}/result", route.NODES, max_body=MAX_RESULT)
async def commit(call: route.ApiCall[Lease, bytes]) -> protocol.Commit:
    """Commit a result, a trajectory as zstd-compressed msgpack; idempotent."""
    await _check_holder(call)
    return await call.control.dispatcher.commit(call.id, call.query.epoch, call.body)


@ROUTES.add("POST", "/v1/sessions/{id}/release", route.NODES)
async def release(call: route.BodyCall[protocol.Release]) -> None:
    """Return a session to the queue."""
    await _check_holder(call)
    await call.control.dispatcher.release(call.id, call.body)


@ROUTES.add("POST", "/v1/sessions/{id}/log", route.NODES, max_body=4 << 20)
async def append_log(call: route.ApiCall[BodyChunk, bytes]) -> protocol.LogLength:
    """Append to a session's log."""
    await _check_holder(call)
    chunk = call.query
    length = await call.control.dispatcher.log(call.id, chunk.epoch, chunk.offset, call.body)
    return protocol.LogLength(length)


async def _check_holder(call: route.ApiCall[Any, Any]) -> None:
    holder = (await call.db.read(sessions.get, call.id)).node
    if holder not in {None, call.caller.node}:
        raise FencedError(f"session {call.id} is held by another node now")


# --------------------------------------------------------------------------- nodes
@ROUTES.add("POST", "/v1/nodes", frozenset({route.ApiRole.JOIN}), status=201)
async def register(call: route.BodyCall[protocol.NodeRegistration]) -> protocol.NodeRegistered:
    """Join as a node."""
    return await call.control.dispatcher.register(call.body)


@ROUTES.add("GET", "/v1/nodes", route.READERS)
async def list_nodes(call: route.PlainCall) -> list[protocol.NodeView]:
    """List the nodes."""
    return await call.db.read(nodes.list_views)


@ROUTES.add("POST", "/v1/nodes/{id}/lease", route.NODES, max_body=MAX_HELD)
async def lease(call: route.BodyCall[protocol.LeaseRequest]) -> protocol.LeaseResponse:
    """Wait for work or orders, up to `LeaseRequest.wait_s`."""
    _check_own(call)
    return await call.attend(call.control.dispatcher.lease(call.id, call.body))


@ROUTES.add("POST", "/v1/nodes/{id}/renew", route.NODES, max_body=MAX_HELD)
async def renew(call: route.BodyCall[protocol.Renewal]) -> protocol.LeaseResponse:
    """Renew a node's lease."""
    _check_own(call)
    return await call.control.dispatcher.renew(call.id, call.body)


@ROUTES.add("POST", "/v1/nodes/{id}/drain", route.NODES | route.CLIENTS, shared=True)
async def drain(call: route.PlainCall) -> None:
    """Drain a node: it gets no more work, finishes its sessions and exits."""
    if call.caller.role is route.ApiRole.NODE:
        _check_own(call)
    await call.control.dispatcher.drain(call.id)


def _check_own(call: route.ApiCall[Any, Any]) -> None:
    if call.caller.node != call.id:
        raise route.Refusal("a node may only act for itself", "forbidden")


# --------------------------------------------------------------------------- weights
@ROUTES.add("GET", "/v1/weights", route.READERS)
async def get_weights(call: route.PlainCall) -> protocol.Control:
    """Get the version of the weights, and whether model calls are paused."""
    return await call.db.read(nodes.control)


@ROUTES.add("POST", "/v1/weights", route.CLIENTS, shared=True)
async def announce(call: route.BodyCall[protocol.Version]) -> protocol.Barrier:
    """Announce new weights; returns when the nodes have confirmed."""
    return await call.attend(call.control.announce(call.body.version))


@ROUTES.add("POST", "/v1/weights/pause", route.CLIENTS, shared=True)
async def pause(call: route.BodyCall[protocol.Pause]) -> protocol.Barrier:
    """Pause model calls on all nodes; returns when the nodes have confirmed."""
    pausing = call.control.pause(call.body.mode, within_s=call.body.within_s)
    return await call.attend(pausing)


@ROUTES.add("POST", "/v1/weights/resume", route.CLIENTS, shared=True)
async def resume(call: route.PlainCall) -> protocol.Barrier:
    """Resume model calls on all nodes."""
    return await call.attend(call.control.resume())
