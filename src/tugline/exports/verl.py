"""Rows for verl: the columns of its rollout batch, one row per trace.

By default lists have their own lengths, like verl's own agent loop output. With the options
``prompt_length`` and ``response_length`` they are padded to these: prompts on the left, responses
on the right, so that columns become the tensors of a ``DataProto``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tugline.errors import ConfigError
from tugline.exports.base import SessionExport, SkipReason
from tugline.exports.tables import TableExporter
from tugline.types import Trace


class Verl(TableExporter):
    """One row per trace; the response begins with the first sampled token."""

    columns = """
        uid:text session:text trace:int data_source:text prompts:longs responses:longs
        input_ids:longs attention_mask:longs position_ids:longs response_mask:longs
        rollout_log_probs:floats rm_scores:floats reward:float min_global_steps:int
        max_global_steps:int __num_turns__:int"""

    def __init__(
        self,
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        pad_id: int = 0,
    ) -> None:
        """Set the lengths in tokens that prompts and responses are padded to with `pad_id`."""
        if (prompt_length is None) != (response_length is None):
            msg = "export 'verl': give prompt_length and response_length both, or neither"
            raise ConfigError(msg)
        self.prompt_length = prompt_length
        self.response_length = response_length
        self.pad_id = pad_id

    def row(
        self, session: SessionExport, index: int, trace: Trace
    ) -> Mapping[str, object] | SkipReason:
        """Return the columns; a trace that does not fit the padding is skipped, not cut."""
        first, versions = trace.spans[0].start, [span.version for span in trace.spans]
        size = len(trace.ids) - first
        left = first if self.prompt_length is None else self.prompt_length
        right = size if self.response_length is None else self.response_length
        if first > left or size > right:
            return SkipReason.TOO_LONG

        def padded(values: npt.NDArray[Any], fill: int = 0) -> npt.NDArray[Any]:
            return np.pad(values, (left - first, right - size), constant_values=fill)

        ids = padded(trace.ids.astype(np.int64), self.pad_id)
        seen = padded(np.ones(len(trace.ids), np.int64))
        scores = np.zeros(right, np.float32)
        scores[size - 1] = session.reward
        return {
            "uid": session.header.task.id,
            "session": session.header.session.id,
            "trace": index,
            "data_source": session.header.task.harness.name,
            "prompts": ids[:left],
            "responses": ids[left:],
            "input_ids": ids,
            "attention_mask": seen,
            "position_ids": np.maximum(seen.cumsum() - 1, 0),
            "response_mask": padded(trace.mask.astype(np.int64))[left:],
            "rollout_log_probs": padded(trace.logprobs)[left:],
            "rm_scores": scores,
            "reward": session.reward,
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "__num_turns__": len({span.call for span in trace.spans}),
        }
