"""Tasks: in, looked at, cancelled."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tugline.errors import Invalid
from tugline.protocol import Accepted, Cancelled, Page, TaskState, TaskView
from tugline.server.http.route import CLIENTS, READERS, Call, Cursor, Limit, Nothing, Route
from tugline.types import Task

MAX_BATCH = 1000
"""Tasks of one request."""
MAX_BATCH_BYTES = 64 << 20


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


class By(msgspec.Struct, frozen=True):
    """Who cancels."""

    by: Annotated[str, Meta(min_length=1, max_length=128)] = "a client"
    """Said in the results that end this way."""


async def submit(call: Call[Nothing, list[Task]]) -> list[Accepted]:
    """Submit one task or up to 1,000; all are kept or none."""
    if not 1 <= len(call.body) <= MAX_BATCH:
        msg = f"the body holds {len(call.body)} tasks, must be 1 to {MAX_BATCH}"
        raise Invalid(msg)
    accepted = await call.control.submit(call.body)
    call.status = 201 if any(one.new for one in accepted) else 200
    return accepted


async def listed(call: Call[TaskQuery, Nothing]) -> Page:
    """List tasks, in the order of submission."""
    of = call.query
    return await call.control.tasks(
        state=of.state, tenant=of.tenant, tag=of.tag, after=of.after, limit=of.limit
    )


async def one(call: Call[Nothing, Nothing]) -> TaskView:
    """A task as it stands."""
    return await call.control.task(call.id)


async def body(call: Call[Nothing, Nothing]) -> Task:
    """A task as it was submitted."""
    return await call.control.task_body(call.id)


async def cancel(call: Call[By, Nothing]) -> Cancelled:
    """Cancel what is not over of a task."""
    return await call.control.cancel(task=call.id, by=call.query.by)


ROUTES = (
    Route(
        "POST",
        "/v1/tasks",
        CLIENTS,
        submit,
        statuses=(201, 200),
        problems=("conflict",),
        max_body=MAX_BATCH_BYTES,
    ),
    Route("GET", "/v1/tasks", READERS, listed),
    Route("GET", "/v1/tasks/{id}", READERS, one),
    Route("GET", "/v1/tasks/{id}/body", READERS, body),
    Route("POST", "/v1/tasks/{id}/cancel", CLIENTS, cancel),
)
