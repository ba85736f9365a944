"""Structured logging to stderr or a file: one event name, then key=value. Never a prompt's text."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import structlog


def configure(*, level: str = "warning", path: Path | None = None) -> None:
    """Send events of at least `level` to `path` as JSON lines, or to stderr for people."""
    renderer: Any = structlog.dev.ConsoleRenderer()
    stream = sys.stderr
    if path is not None:
        renderer = structlog.processors.JSONRenderer()
        stream = path.open("a", encoding="utf-8")
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
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )


def get(name: str) -> Any:
    """A logger whose events carry ``part=name``."""
    return structlog.get_logger(part=name)
