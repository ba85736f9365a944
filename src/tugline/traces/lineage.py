"""How a call continues its parent, measured on the token ids rather than taken from the record.

The builders, `tugline verify`, the viewer, exports and replay all ask here, so they agree (I1).
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from tugline.types import Branch, Call, CallOutcome, Mode, shared_prefix


class Continuation(StrEnum):
    """How the prompt of a call continues its parent."""

    FIRST = "first"
    """The call has no parent: it begins a conversation."""
    EXACT = "exact"
    """The prompt begins with all ids of the parent, prompt and answer."""
    ECHO_CHANGED = "echo_changed"
    """As `EXACT`, although the harness wrote the parent's answer differently."""
    FORKED = "forked"
    """The prompt departs from the parent's ids, for the recorded reason."""
    BROKEN = "broken"
    """The prompt departs from the parent's ids, and the record claims that it does not."""
    NO_TOKEN_IDS = "no_token_ids"  # noqa: S105 - no secret
    """The engine reported no ids, so nothing can be compared."""


class Lineage(NamedTuple):
    """A call's continuation, and the ids that it has in common with its parent."""

    continuation: Continuation
    shared: int = 0
    """Leading ids of the prompt that are the parent's."""
    reasons: tuple[str, ...] = ()
    """Changes of the echo, or why the call forks or is broken: a `Branch`, ``client_gone``,
    ``ids_differ`` or ``parent_missing``."""


def trace_lineage(call: Call, parent: Call | None) -> Lineage:
    """Compare `call` with its recorded parent; `parent` is None if it is not recorded."""
    if call.mode is Mode.TEXT or (parent is not None and parent.mode is Mode.TEXT):
        return Lineage(Continuation.NO_TOKEN_IDS)
    branch = () if call.branch is None else (call.branch.value,)
    if call.parent is None:
        return Lineage(Continuation.FIRST, 0, branch)
    if parent is None:
        return Lineage(Continuation.BROKEN, 0, ("parent_missing",))
    shared = count_shared_ids(call, parent)
    if branch:
        return Lineage(Continuation.FORKED, shared, branch)
    if shared == len(parent.prompt_ids) + len(parent.sampled_ids):
        changes = tuple(change.value for change in call.echo_changes)
        return Lineage(
            Continuation.ECHO_CHANGED if changes else Continuation.EXACT, shared, changes
        )
    if parent.outcome is CallOutcome.CLIENT_GONE and shared >= len(parent.prompt_ids):
        return Lineage(Continuation.FORKED, shared, ("client_gone",))
    return Lineage(Continuation.BROKEN, shared, ("ids_differ",))


def count_shared_ids(call: Call, parent: Call) -> int:
    """Return how many leading ids of `parent`, prompt then answer, begin the prompt of `call`."""
    size = len(parent.prompt_ids)
    shared = shared_prefix(parent.prompt_ids, call.prompt_ids)
    if shared < size:
        return shared
    return size + shared_prefix(parent.sampled_ids, call.prompt_ids[size:])


def extends(call: Call, parent: Call) -> bool:
    """Whether the prompt of `call` begins with all ids of `parent`, prompt then answer."""
    end = len(parent.prompt_ids) + len(parent.sampled_ids)
    if len(call.prompt_ids) < end:
        return False
    last = parent.sampled_ids if len(parent.sampled_ids) else parent.prompt_ids
    if end and call.prompt_ids[end - 1] != last[-1]:
        return False  # most calls that do not extend differ here
    return count_shared_ids(call, parent) == end


def adds_to_parent(call: Call) -> bool:
    """Whether `call.messages` are only those added to the conversation of its parent.

    Those of any other call are a whole conversation. A prompt that only the engine rendered anew
    continues the conversation, though not the ids.
    """
    return call.parent is not None and call.branch in {None, Branch.ENGINE_RERENDERED}
