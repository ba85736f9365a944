"""``tugline logs``: output of a session's agent."""

import asyncio
import codecs
import re
import sys
from typing import Annotated

import typer

from tugline.cli.options import Folder, Server, Token, connect
from tugline.recording.view.session_view import visible

_LINE = re.compile(r"[^\t\n\r]+")


def logs(
    session: Annotated[str, typer.Argument(help="Id of the session, such as fix-add-0.")],
    *,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow until the session ends.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=1, help="Only so many bytes from the end.")
    ] = None,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
) -> None:
    """Print the log of a session; on a terminal without its escape sequences."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    terminal = sys.stdout.isatty()

    async def main() -> None:
        async with connect(server, token, folder) as client:
            async for chunk in client.log(session, tail=tail, follow=follow):
                shown = _LINE.sub(lambda line: visible(line[0]), decoder.decode(chunk))
                sys.stdout.buffer.write(shown.encode() if terminal else chunk)
                sys.stdout.buffer.flush()

    asyncio.run(main())
