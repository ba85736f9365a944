"""``set_clock.py ...`` is ``tugline ...`` on a machine whose clock is set back at SIGUSR1."""

from __future__ import annotations

import signal
import time

from tugline.cli.app import main

HOUR = 3600.0
_real = time.time


def _set_back(*_args: object) -> None:
    time.time = lambda: _real() - HOUR  # type: ignore[assignment]


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _set_back)
    main()
