"""``tugline results``: read results, or save them as files, from the last position.

With ``--consumer`` the server stores the position, and results are acknowledged only once they are
on disk (I3); with ``--out`` alone the folder has it.
"""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from tugline.cli.options import Folder, Json, Server, Token, connect
from tugline.protocol import ResultView
from tugline.recording.trajectories import RESULTS, ResultFolder


def results(  # noqa: PLR0913 - each is a flag
    *,
    consumer: Annotated[
        str | None, typer.Option(help="Read from this consumer's position, and acknowledge.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only of this task; can be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Save to this folder: {RESULTS} and trajectories/.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Wait for further results.")
    ] = False,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Read results in order of commit, and save them with their trajectories."""
    saved = ResultFolder(out) if out else None
    after = max((view.position for view in saved.views.values()), default=0) if saved else None
    seen = 0

    async def main() -> None:
        nonlocal seen
        async with (
            connect(server, token, folder) as client,
            aclosing(
                client.results(
                    consumer,
                    after=after if consumer is None else None,
                    tasks=task or (),
                    follow=follow,
                    auto_ack=consumer is not None,
                )
            ) as items,
        ):
            async for item in items:
                if saved:
                    await asyncio.to_thread(saved.add, item.view, item.packed)
                typer.echo(msgspec.json.encode(item.view) if as_json else _line(item.view))
                seen += 1

    try:
        asyncio.run(main())
    finally:
        if saved:
            saved.write_index()
            where = f"saved in {out}: {seen} new, {len(saved.views)} in all"
            Console(stderr=True, highlight=False, soft_wrap=True).print(where, markup=False)
    if not seen and not saved:
        typer.echo("nothing new", err=True)


def _line(view: ResultView) -> str:
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    tokens = f"{view.trained} of {view.sampled} tokens trained"
    why = f": {view.failure.boundary}, {view.failure.message}" if view.failure else ""
    return f"{view.position} {view.session} {view.status}, {reward}, {tokens}{why}"
