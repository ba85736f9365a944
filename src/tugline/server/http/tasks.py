"""Routes of tasks."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.responses import Response

from tugline.errors import Invalid
from tugline.protocol import Accepted, Cancelled, Page, TaskState, TaskView
from tugline.server.http.route import CLIENTS, JSON, READERS, Call, Cursor, Limit, Nothing, Routes
from tugline.server.store import groups, tasks
from tugline.types import Task

MAX_BATCH = 1000
"""Tasks of one request."""
MAX_BATCH_BYTES = 64 << 20
ROUTES = Routes()


class TaskQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to list."""

    state: TaskState | None = None
    """Only open ones, or only released ones."""
    tenant: Annotated[str, Meta(max_length=64)] | None = None
    """Only those of this tenant."""
    tag: Annotated[str, Meta(max_length=1200, pattern="^[^=]+=")] | None = None
    """``key=value``."""
    after: Cursor | None = None
    limit: Limit = 100


class CancelQuery(msgspec.Struct, frozen=True):
    """Who cancels."""

    by: Annotated[str, Meta(min_length=1, max_length=128)] = "a client"
    """Named in the results that end this way."""


@ROUTES.add(
    "POST",
    "/v1/tasks",
    CLIENTS,
    statuses=(201, 200),
    problems=("conflict",),
    max_body=MAX_BATCH_BYTES,
)
async def submit(call: Call[Nothing, list[Task]]) -> list[Accepted] | Response:
    """Submit one task or up to 1,000; all are stored or none."""
    if not 1 <= len(call.body) <= MAX_BATCH:
        msg = f"the body holds {len(call.body)} tasks, must be 1 to {MAX_BATCH}"
        raise Invalid(msg)
    accepted = await call.control.submit(call.body)
    status = 201 if any(each.new for each in accepted) else 200
    return Response(msgspec.json.encode(accepted), status, media_type=JSON)


@ROUTES.add("GET", "/v1/tasks", READERS)
async def list_tasks(call: Call[TaskQuery, Nothing]) -> Page:
    """List tasks, in the order of submission."""
    return await call.db.read(tasks.page, **msgspec.structs.asdict(call.query))


@ROUTES.add("GET", "/v1/tasks/{id}", READERS)
async def get_task(call: Call[Nothing, Nothing]) -> TaskView:
    """Get the current state of a task."""
    return await call.db.read(tasks.view, call.id)


@ROUTES.add("GET", "/v1/tasks/{id}/body", READERS)
async def get_body(call: Call[Nothing, Nothing]) -> Task:
    """Get a task as it was submitted."""
    return await call.db.read(tasks.body, call.id)


@ROUTES.add("POST", "/v1/tasks/{id}/cancel", CLIENTS)
async def cancel_task(call: Call[CancelQuery, Nothing]) -> Cancelled:
    """Cancel the unfinished sessions of a task."""
    return await call.db.write(groups.cancel_task, call.id, call.query.by)
