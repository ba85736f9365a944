"""Small statistics."""

from stats.middle import mean, median

__all__ = ["mean", "median"]
