"""Reference cycles that a block of code leaves: objects that only the garbage collector frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def count_cycles() -> Iterator[Counter[str]]:
    """Count, by type, Tugline's objects that the block leaves in cycles; filled at its end."""
    cycles: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield cycles
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        cycles.update(name for name in names if name.startswith("tugline."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
