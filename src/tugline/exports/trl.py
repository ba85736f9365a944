"""Rows for TRL: rollouts for its GRPO trainers, and tokenised data for its SFT trainer.

``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask`` are what a ``rollout_func``
returns; ``input_ids``, ``completion_mask``, ``old_log_probs``, ``advantage``, ``model_version`` and
``group_id`` are a ``RolloutSample`` of its asynchronous trainer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tugline.exports.base import SessionExport
from tugline.exports.tables import TableExporter
from tugline.types import Trace


class Trl(TableExporter):
    """One row per trace; the completion begins with the first sampled token."""

    columns = """
        session:text task:text trace:int prompt_ids:ids completion_ids:ids logprobs:floats
        env_mask:bits input_ids:ids completion_mask:bits old_log_probs:floats reward:float
        advantage:float model_version:int group_id:int"""

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the columns; `model_version` is that of the oldest token."""
        first, mask = trace.spans[0].start, trace.mask.astype(np.int8)
        return {
            "session": session.header.session.id,
            "task": session.header.task.id,
            "trace": index,
            "prompt_ids": trace.ids[:first],
            "completion_ids": trace.ids[first:],
            "logprobs": trace.logprobs[first:],
            "env_mask": mask[first:],
            "input_ids": trace.ids,
            "completion_mask": mask,
            "old_log_probs": trace.logprobs,
            "reward": session.reward,
            "advantage": session.advantage,
            "model_version": min(span.version for span in trace.spans),
            "group_id": session.group,
        }
