"""Lines for slime: the input of ``Sample.from_dict``, one per trace.

The traces of a session are siblings: they share ``rollout_id``, by which slime counts them as one
rollout, ``index`` and the reward. Sessions of a task share ``group_index``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tugline.exports.base import Exporter, SessionExport
from tugline.types import Finish, Status, Trace

_STATUSES = {Finish.STOP: "completed", Finish.LENGTH: "truncated", Finish.ABORT: "aborted"}


class Slime(Exporter):
    """One row per trace; the response begins with the first sampled token."""

    def row(self, session: SessionExport, index: int, trace: Trace) -> Mapping[str, object]:
        """Return the fields of `Sample`; all others keep their default."""
        first = trace.spans[0].start
        return {
            "group_index": session.group,
            "index": session.index,
            "rollout_id": session.index,
            "prompt": session.header.task.instruction,
            "tokens": trace.ids,
            "response_length": len(trace.ids) - first,
            "reward": session.reward,
            "loss_mask": trace.mask[first:].astype(np.int8),
            "weight_versions": list(dict.fromkeys(str(span.version) for span in trace.spans)),
            "rollout_log_probs": trace.logprobs[first:],
            "status": _status(session, trace),
            "session_id": session.header.session.id,
            "metadata": {
                "task": session.header.task.id,
                "trace": index,
                "kind": trace.kind,
                "advantage": session.advantage,
            },
        }


def _status(session: SessionExport, trace: Trace) -> str:
    result, last = session.recording.result, max(span.call for span in trace.spans)
    if result is None or result.status is not Status.COMPLETED:
        out_of_time = result is not None and result.status is Status.TIMED_OUT
        return "truncated" if out_of_time else "failed"
    return _STATUSES[next(call.finish for call in session.recording.calls if call.number == last)]
