"""How a command that runs for weeks is ended: gently at the first signal, at once at the second."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stopping(gently: Callable[[], object]) -> Iterator[None]:
    """Call `gently` at the first SIGTERM or Ctrl-C, and cancel the current task at the next."""
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked and me is not None:
            me.cancel()
        elif not asked:
            asked = True
            gently()

    for one in SIGNALS:
        loop.add_signal_handler(one, on_signal)
    try:
        yield
    finally:
        for one in SIGNALS:
            loop.remove_signal_handler(one)
