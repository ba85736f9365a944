"""``tugline view``: show a recorded session on the terminal, as JSON or as HTML."""

import sys
from pathlib import Path

from rich.console import Console

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import print_json, print_text
from tugline.errors import UsageError
from tugline.log import visible
from tugline.patch import format_patch, unpack_patch
from tugline.recording.file import Recording, read
from tugline.recording.patches import describe_no_patch, load_patch
from tugline.recording.tokenizer_file import load_tokenizer
from tugline.recording.view.html_page import render_page, write_run
from tugline.recording.view.session_view import TokenText, ViewedSession, encode_json, view_session
from tugline.recording.view.terminal import Terminal

_WIDTH = 120
"""Width of a session's lines if the output is not a terminal."""


def view(
    session: str,
    /,
    *,
    builder: str | None = None,
    turn: int | None = None,
    tokenizer: Path | None = None,
    as_json: Json = False,
    html: Path | None = None,
    patch: bool = False,
    salvage: bool = False,
    remote: Remote = DEFAULT_SERVER,
) -> None:
    """Show what happened in a session: turns, tokens, forks, ledger and timings.

    Args:
        session: A recording file, or the id of a session; with --html also a folder of recordings.
        builder: Show the traces of this builder (default: the task's builder).
        turn: Show only this call, with its messages.
        tokenizer: Path of tokenizer.json, if there is none beside the recording.
        html: Write an HTML page to this file; for a folder of recordings, write a page per session
            and an index into this new folder.
        patch: Print what the agent changed: a diff, or with --json the files as they were left.
        salvage: Show the part of a damaged file before the damage.
    """

    def load(path: Path) -> tuple[ViewedSession, TokenText]:
        recording = read(path, salvage=salvage)
        header = recording.header
        texts = TokenText(load_tokenizer(path, header, tokenizer) if header else None)
        return view_session(path, recording, builder), texts

    if html is not None and Path(session).is_dir() and turn is None and not as_json:
        print(write_run(Path(session), html, load))
        return
    with remote.find_recording(session) as path:
        if patch:
            _print_patch(path, read(path, salvage=salvage), as_json=as_json)
            return
        session_view, texts = load(path)
    numbers = [each.call for each in session_view.view.turns]
    if turn is not None and turn not in numbers:
        known = f"its calls are {numbers[0]} to {numbers[-1]}" if numbers else "it has no calls"
        raise UsageError(f"--turn is {turn}, but {path} has no such call; {known}")
    if html is not None:
        html.write_text(render_page(session_view, texts), encoding="utf-8")
        print_text(f"wrote {html} ({html.stat().st_size / 1e3:,.0f} kB)", stderr=as_json)
    if as_json:
        print(encode_json(session_view, turn).decode())
    elif html is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        terminal = Terminal(console, session_view, texts)
        terminal.print_session() if turn is None else terminal.print_turn(turn)


def _print_patch(path: Path, recording: Recording, *, as_json: bool) -> None:
    """Print the patch of a session. Raises `UsageError` if it has none, or `CaptureError`."""
    if recording.header is None or recording.result is None or not recording.result.patch:
        raise UsageError(f"{path} names no patch: {describe_no_patch(recording.result)}")
    task = recording.header.task
    changes = unpack_patch(load_patch(path, recording.result.patch))
    if as_json:
        print_json(changes)
        return
    if task.workspace.has_base:
        print_text("files of the workspace are shown whole, as the agent left them", stderr=True)
    text = format_patch(task.files, changes) or "the agent changed nothing\n"
    if sys.stdout.isatty():  # an agent wrote it, and its escape sequences must not reach a terminal
        text = "\n".join(map(visible, text.split("\n")))
    print(text, end="")
