"""``tugline cancel``: cancel tasks or sessions of a server."""

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, Required, find_by_id
from tugline.cli.output import format_counts, print_report, print_text
from tugline.protocol import Cancelled, TaskView


async def cancel(*names: Required, remote: Remote = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Cancel tasks or sessions; results so far are kept.

    Args:
        names: Ids of tasks or sessions.
    """
    async with remote.connect() as client:
        views = {
            name: await find_by_id(client, name) for name in names
        }  # all, before the first cancel
        cancelled = {}
        for name, view in views.items():
            kind = "task" if isinstance(view, TaskView) else "session"
            cancelled[name] = await client.cancel(**{kind: name}, by="tugline cancel")
    lines = (f"{name}: {_describe_cancelled(counts)}" for name, counts in cancelled.items())
    print_report(cancelled, lambda: print_text(*lines), as_json=as_json)


def _describe_cancelled(done: Cancelled) -> str:
    parts = {"ended": len(done.ended), "stopping": len(done.stopping), "final before": done.final}
    return format_counts(parts) or "nothing to cancel"
