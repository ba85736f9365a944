"""The embedded engine: exact ids, and logprobs of the distribution really sampled from."""

from __future__ import annotations

from tugline.chat.engines.generate import Generate


class Embedded(Generate):
    """Exact mode; each reply says its weight versions."""

    def __init__(self) -> None:
        super().__init__("embedded")
