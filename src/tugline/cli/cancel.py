"""``tugline cancel``: cancel queued and running tasks or sessions."""

import asyncio
from typing import Annotated

import msgspec
import typer

from tugline.cli.options import Folder, Json, Server, Token, connect
from tugline.client.api import Client
from tugline.errors import Missing
from tugline.protocol import Cancelled

BY = "tugline cancel"


def cancel(
    names: Annotated[list[str], typer.Argument(metavar="TASK|SESSION...", help="What to cancel.")],
    *,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Cancel tasks or sessions; results so far are kept."""

    async def main() -> dict[str, Cancelled]:
        async with connect(server, token, folder) as client:
            return {name: await _cancel(client, name) for name in names}

    cancelled = asyncio.run(main())
    if as_json:
        typer.echo(msgspec.json.encode(cancelled))
        return
    for name, counts in cancelled.items():
        parts = {
            "ended": len(counts.ended),
            "stopping": len(counts.stopping),
            "final before": counts.final,
        }
        line = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
        typer.echo(f"{name}: {line or 'nothing to cancel'}")


async def _cancel(client: Client, name: str) -> Cancelled:
    try:
        return await client.cancel(task=name, by=BY)
    except Missing:
        pass
    try:
        return await client.cancel(session=name, by=BY)
    except Missing as error:
        msg = f"there is neither a task nor a session {name!r} at {client.url}"
        raise Missing(msg) from error
