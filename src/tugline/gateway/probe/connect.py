"""What a node does with its engine when it starts: ask what it can do, and refuse what is unsound.

An engine that loses token ids, or whose replicas differ, is found out before the first session and
not in the training data (I1, I2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tugline import log
from tugline.errors import UsageError
from tugline.gateway.probe.diagnosis import Report
from tugline.gateway.probe.probe import probe
from tugline.gateway.replicas import ModelCard, Upstream
from tugline.types import Mode

_log = log.get("gateway.connect")


async def connect(
    urls: Sequence[str], *, mode: Mode | None = None, model: str | None = None
) -> Upstream:
    """The replicas at `urls`, in `mode` or the best they are sound in.

    Raises `EngineError` if one does not answer, `UsageError` naming the flag to add if the mode is
    not sound, the models there are if it is none of them, or what differs between two engines.
    """
    reports = await asyncio.gather(*(probe(url, model) for url in urls))
    if not reports:
        msg = "an engine needs at least one address, such as http://127.0.0.1:8000"
        raise UsageError(msg)
    wires = [report.wire(mode) for report in reports]
    for report in reports[1:]:
        _check_alike(reports[0], report)
    for report, wire in zip(reports, wires, strict=True):
        _log.info("engine", url=report.url, engine=wire.name, mode=wire.mode, model=report.model)
    card = ModelCard(reports[0].model, reports[0].window)
    return Upstream(urls, wires[0], model=card.id, card=card)


def _check_alike(one: Report, other: Report) -> None:
    for field in ("engine", "model", "window", "logprob_meaning"):
        left, right = getattr(one, field), getattr(other, field)
        if left != right:
            msg = (
                f"replicas must be alike: {field} is {left} at {one.url} and {right} at {other.url}"
            )
            raise UsageError(msg)
