"""Numbers as they are counted while work goes on, and as Prometheus reads them.

Parts count in plain objects of their own, which costs them a fraction of a microsecond and ties
them to no registry; a page is made of these when somebody asks for it. Names and labels stand in
docs/observability.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

T = TypeVar("T")
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of a page."""
MOMENTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds in seconds for what should take no time."""
SPELLS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Bounds in seconds for work."""
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Bounds for how many."""


class Distribution:
    """How often what was measured fell below each of some bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SPELLS) -> None:
        """`bounds` are inclusive and grow."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """One more measurement."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many measurements there were."""
        return sum(self.counts)


Labelled = Mapping[str, float] | Mapping[tuple[str, ...], float]
"""A value for each label, or for each combination of labels."""

Spreads = Mapping[str, Distribution] | Mapping[tuple[str, ...], Distribution]
"""The same of distributions."""


def gauge(name: str, text: str, values: Labelled | float, *labels: str) -> Metric:
    """What is so now."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in _one_or_each(values):
        family.add_metric(key, value)
    return family


def counter(name: str, text: str, values: Labelled | float, *labels: str) -> Metric:
    """What was counted since the start; the page adds ``_total`` to `name`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in _one_or_each(values):
        family.add_metric(key, value)
    return family


def histogram(
    name: str,
    text: str,
    values: Spreads | Distribution,
    *labels: str,
) -> Metric:
    """How measurements are spread."""
    family = HistogramMetricFamily(name, text, labels=labels)
    many = [((), values)] if isinstance(values, Distribution) else _each(values)
    for key, spread in many:
        so_far, buckets = 0, []
        for bound, count in zip((*spread.bounds, float("inf")), spread.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", so_far))
        family.add_metric(key, buckets, spread.total)
    return family


def page(families: Iterable[Metric]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _one_or_each(values: Labelled | float) -> Iterable[tuple[tuple[str, ...], float]]:
    return _each(values) if isinstance(values, Mapping) else [((), values)]


def _each(values: Mapping[Any, T]) -> Iterable[tuple[tuple[str, ...], T]]:
    return [((key,) if isinstance(key, str) else key, value) for key, value in values.items()]
