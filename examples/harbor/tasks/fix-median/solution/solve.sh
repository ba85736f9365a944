#!/bin/bash
set -e
cat > /app/stats/middle.py <<'PY'
"""Where the middle of some values is."""


def mean(values):
    """The sum of the values by their number."""
    return sum(values) / len(values)


def median(values):
    """The value in the middle, or the mean of the two there."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
PY
