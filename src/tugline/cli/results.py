"""``tugline results``: read results of a server, and save them.

With ``--consumer`` the server stores the position, and results are acknowledged once they are on
disk (I3); with ``--out`` alone the position is that of the latest result in the folder.
"""

import asyncio
import glob
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import print_json, print_text
from tugline.cli.rejudge_server import make_entry
from tugline.client.api import Client
from tugline.client.streams import Result
from tugline.errors import Missing, UsageError
from tugline.protocol import ResultView
from tugline.recording.trajectories import ResultFolder
from tugline.recording.verdicts import VerdictEntry, put_in_force


async def results(
    *,
    consumer: str | None = None,
    task: list[str] | None = None,
    out: Path | None = None,
    recordings: bool = False,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Read results in order of commit, and save them with their trajectories.

    Args:
        consumer: Read from the position of this consumer, and acknowledge results.
        task: Only results of this task; repeatable.
        out: Save to this folder: results.jsonl and trajectories/.
        recordings: Also save recordings/, for export, verify and view.
        follow: Wait for further results.
    """
    if recordings and out is None:
        raise UsageError("--recordings requires --out, the folder to save to")
    saved = ResultFolder(out) if out else None
    after = max((view.position for view in saved.views.values()), default=0) if saved else None
    count = 0
    patches = 0
    try:
        async with remote.connect() as client:
            stream = client.results(
                consumer,
                after=after if consumer is None else None,
                tasks=task or (),
                follow=follow,
                auto_ack=consumer is not None,
            )
            async with aclosing(stream) as items:
                async for item in items:
                    if out and recordings and item.packed:
                        await _save_recording(client, item, out / "recordings")
                    if saved:
                        await asyncio.to_thread(saved.add, item.view, item.packed)
                    if as_json:
                        print_json(item.view)
                    else:
                        print(_format_result(item.view))
                    count += 1
                    patches += bool(item.view.patch)
    finally:
        if saved:
            saved.write_index()
            print_text(f"saved in {out}: {count} new, {len(saved.views)} in total", stderr=True)
    if patches:
        print_text("`tugline view SESSION --patch` prints what an agent changed", stderr=True)
    if not count and not saved:
        print_text("no new results", stderr=True)


async def _save_recording(client: Client, item: Result, folder: Path) -> None:
    """Save the recording of a session, with the verdict that is in force."""
    try:
        await client.recording(item.view.session, folder)
    except Missing as error:  # on another machine; the result is saved
        print_text(str(error), stderr=True)
        return
    if item.view.revision:
        session = item.view.session
        [chosen] = [each for each in await client.verdicts(session) if each.in_force]
        entry = make_entry(session, item.view.task, chosen) if chosen.number > 1 else None
        await asyncio.to_thread(_put_in_force, folder, session, entry)


def _put_in_force(folder: Path, session: str, entry: VerdictEntry | None) -> None:
    for path in folder.glob(f"{glob.escape(session)}.*.rec"):
        put_in_force(path, entry)


def _format_result(view: ResultView) -> str:
    reward = "no reward" if view.reward is None else f"reward {view.reward:g}"
    tokens = f"{view.trained} of {view.sampled} tokens trainable"
    failure = f": {view.failure.boundary}, {view.failure.message}" if view.failure else ""
    patch = ", patch" if view.patch else ""
    return f"{view.position} {view.session} {view.status}, {reward}, {tokens}{patch}{failure}"
