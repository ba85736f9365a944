"""Lines for slime: each is what ``Sample.from_dict`` takes, one per trace.

The traces of a session are siblings: they share ``rollout_id``, by which slime counts them as one
rollout, ``index`` and the reward. Sessions of a task share ``group_index``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tugline.exports.base import Exporter, Item
from tugline.types import Finish, Status, Trace

_WORDS = {Finish.STOP: "completed", Finish.LENGTH: "truncated", Finish.ABORT: "aborted"}


class Slime(Exporter):
    """One row per trace; the response begins with the first sampled token."""

    def row(self, item: Item, index: int, trace: Trace) -> Mapping[str, object]:
        """Whatever `Sample` has beside these keeps its default."""
        first = trace.spans[0].start
        return {
            "group_index": item.group,
            "index": item.number,
            "rollout_id": item.number,
            "prompt": item.header.task.instruction,
            "tokens": trace.ids,
            "response_length": len(trace.ids) - first,
            "reward": item.reward,
            "loss_mask": trace.mask[first:].astype(np.int8),
            "weight_versions": list(dict.fromkeys(str(span.version) for span in trace.spans)),
            "rollout_log_probs": trace.logprobs[first:],
            "status": _status(item, trace),
            "session_id": item.header.session.id,
            "metadata": {
                "task": item.header.task.id,
                "trace": index,
                "kind": trace.kind,
                "advantage": item.advantage,
            },
        }


def _status(item: Item, trace: Trace) -> str:
    result, last = item.recording.result, max(span.call for span in trace.spans)
    if result is None or result.status is not Status.COMPLETED:
        out_of_time = result is not None and result.status is Status.TIMED_OUT
        return "truncated" if out_of_time else "failed"
    return _WORDS[next(call.finish for call in item.recording.calls if call.number == last)]
