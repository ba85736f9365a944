"""Histograms, and metrics in the format of Prometheus.

Components count in plain objects, which takes a fraction of a microsecond and needs no registry;
these are converted to metrics when Prometheus requests them.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of `page`."""
MOMENTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bucket bounds for short operations, in seconds."""
SPELLS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Bucket bounds for long operations, in seconds."""
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
"""Bucket bounds for numbers of items."""

_LINE = re.compile(
    r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<kind>\w+): (?P<text>.+)$", re.MULTILINE
)
_TABLE = list(_LINE.finditer(Path(__file__).with_name("metrics.txt").read_text()))
"""All metrics: ``name{label,label} kind: description``. A counter's name ends in ``_total``."""

_KINDS: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Distribution:
    """Counts of measurements, one for each interval between bounds, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SPELLS) -> None:
        """`bounds` are inclusive and in ascending order."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: "Distribution") -> None:
        """Add the measurements of another distribution with the same bounds."""
        self.counts = [own + more for own, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


Value = float | Distribution
Values = Value | Mapping[Any, Value]
"""A value, or a value for each label or tuple of labels."""


def families(values: Mapping[str, Values]) -> list[Metric]:
    """Return the metrics of ``metrics.txt`` that have values, in its order."""
    return [_family(line, values[line["name"]]) for line in _TABLE if line["name"] in values]


def _family(line: re.Match[str], values: Values) -> Metric:
    labels = line["labels"].split(",") if line["labels"] else ()
    family = _KINDS[line["kind"]](line["name"], line["text"], labels=labels)
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        names = key if isinstance(key, tuple) else (key,)
        if isinstance(value, Distribution):
            bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
            counts = accumulate(value.counts)
            family.add_metric(names, list(zip(bounds, counts, strict=True)), value.total)
        else:
            family.add_metric(names, value)
    metric: Metric = family
    return metric


def page(metrics: Iterable[Metric]) -> bytes:
    """Return metrics in the text format of Prometheus."""
    return generate_latest(_MetricList(metrics))


class _MetricList(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
