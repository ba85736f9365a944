"""Structured logging to stderr or a file: one event name, then key=value. Never a prompt's text.

Whoever begins the work of a node or a session says so with `about`, once; every event from there
on, in whatever module, task or thread, carries the ids. What other libraries log comes out in the
same form.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import structlog


def configure(*, level: str = "warning", path: Path | None = None) -> None:
    """Send events of at least `level` to `path` as JSON lines, or to stderr for people."""
    renderer: Any = structlog.dev.ConsoleRenderer()
    # Looked up for each event: who replaces sys.stderr gets what is written from then on.
    factory: Any = lambda *_: structlog.WriteLogger(sys.stderr)  # noqa: E731
    if path is not None:
        renderer = structlog.processors.JSONRenderer()
        factory = structlog.WriteLoggerFactory(file=path.open("a", encoding="utf-8"))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Others) for handler in root.handlers):
        root.addHandler(_Others())


class _Others(logging.Handler):
    """Warnings and errors of libraries, as events of the part that is named like their logger."""

    def emit(self, record: logging.LogRecord) -> None:
        get(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def get(name: str) -> Any:
    """A logger whose events carry ``part=name``."""
    return structlog.get_logger(part=name)


def about(**ids: object) -> AbstractContextManager[None]:
    """Events of this task, and of tasks and threads that it starts, carry `ids` for a while."""
    return structlog.contextvars.bound_contextvars(**ids)


def bind(**ids: object) -> None:
    """Events of this task carry `ids` from here on, to its end."""
    structlog.contextvars.bind_contextvars(**ids)


def bound() -> dict[str, Any]:
    """The ids that events carry here."""
    return structlog.contextvars.get_contextvars()
