"""``tugline cancel``: cancel queued and running tasks or sessions."""

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, Required, print_json
from tugline.client.api import Client
from tugline.errors import Missing
from tugline.protocol import Cancelled

BY = "tugline cancel"


async def cancel(*names: Required, remote: Remote = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Cancel tasks or sessions; results so far are kept.

    Args:
        names: What to cancel.
    """
    async with remote.connect() as client:
        cancelled = {name: await _cancel(client, name) for name in names}
    if as_json:
        print_json(cancelled)
        return
    for name, counts in cancelled.items():
        parts = {
            "ended": len(counts.ended),
            "stopping": len(counts.stopping),
            "final before": counts.final,
        }
        line = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        print(f"{name}: {line or 'nothing to cancel'}")


async def _cancel(client: Client, name: str) -> Cancelled:
    try:
        return await client.cancel(task=name, by=BY)
    except Missing:
        pass
    try:
        return await client.cancel(session=name, by=BY)
    except Missing as error:
        raise Missing(f"there is neither a task nor a session {name!r} at {client.url}") from error
