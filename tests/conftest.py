"""What every test shares: a machine that others use too, and property tests without a clock."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("tugline", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("tugline")
