"""``tugline logs``: print the log of a session."""

import codecs
import re
import sys
from typing import Annotated

from cyclopts import Parameter

from tugline.cli.options import DEFAULT_SERVER, Count, Remote
from tugline.log import visible

_LINE = re.compile(r"[^\t\n\r]+")


async def logs(
    session: str,
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    tail: Count | None = None,
    remote: Remote = DEFAULT_SERVER,
) -> None:
    """Print the log of a session; on a terminal, without its escape sequences.

    Args:
        session: Id of the session, such as fix-add-0.
        follow: Follow the log until the session ends.
        tail: Only this number of bytes at the end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    terminal = sys.stdout.isatty()
    async with remote.connect() as client:
        async for chunk in client.log(session, tail=tail, follow=follow):
            shown = _LINE.sub(lambda line: visible(line[0]), decoder.decode(chunk))
            sys.stdout.buffer.write(shown.encode() if terminal else chunk)
            sys.stdout.buffer.flush()
