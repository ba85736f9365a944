"""The process of a command that runs until it is stopped."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from tugline import log
from tugline.cli.output import background_stderr

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def keep_running(main: Callable[[], Coroutine[Any, Any, None]], log_file: Path | None) -> None:
    """Run until `main` ends, or exit with 130 at a second signal."""
    log.configure(level="info" if log_file else "warning", path=log_file)
    try:
        with background_stderr():
            uvloop.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(INTERRUPTED)
