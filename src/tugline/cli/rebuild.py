"""``tugline rebuild``: rebuild trajectories from recorded sessions, byte for byte the same.

Exit code 0 if every recording gave a trajectory, 1 if one could not be read or built.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import print_report, print_text
from tugline.errors import UsageError
from tugline.recording.trajectories import INDEX, Index, rebuild_all
from tugline.types import PluginSpec

_MANY = 20
"""Recordings from which on progress is shown."""


def rebuild(
    session: str,
    /,
    *,
    out: Path,
    builder: str | None = None,
    option: list[str] | None = None,
    salvage: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Build trajectories from recorded sessions alone, for a trainer to load.

    Args:
        session: A recording file, a folder of them, or the id of a session.
        out: New folder for <session>.traj and index.json.
        builder: Builder to use (default: the one of each task).
        option: key=value for the builder; may be given again.
        salvage: Build what comes before the damage of a broken file.
    """
    root, spec = Path(session), parse_builder(builder, option)
    console = Console(stderr=True)
    with (
        remote.find_recordings(session) as paths,
        Progress(console=console, transient=True, disable=len(paths) < _MANY) as progress,
    ):
        bar = progress.add_task("rebuilding", total=len(paths))
        index = rebuild_all(
            paths,
            root if root.is_dir() else paths[0].parent,
            out,
            spec,
            salvage=salvage,
            on_file=lambda: progress.advance(bar),
        )
    failed = any(entry.error for entry in index.entries)
    print_report(index, lambda: _show(index, out), as_json=as_json, failed=failed)


def parse_builder(name: str | None, options: Iterable[str] | None) -> PluginSpec | None:
    """Parse ``--builder`` and its ``--option key=value``."""
    given = parse_options(options, "--option")
    if name is None:
        if given:
            msg = f"--option {next(iter(options or ()))} is for a builder; name it with --builder"
            raise UsageError(msg)
        return None
    return PluginSpec(name, given)


def parse_options(texts: Iterable[str] | None, flag: str) -> dict[str, Any]:
    """Parse ``key=value`` options of a plug-in; values are JSON where they parse, else text."""
    return {key: _parse_value(text) for key, text in parse_pairs(texts, flag).items()}


def parse_pairs(texts: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Parse ``key=value`` texts of a repeatable flag. Raises `UsageError`."""
    pairs = {}
    for text in texts or ():
        key, equals, pairs[key] = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} {text!r} must be key=value")
    return pairs


def _parse_value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _show(index: Index, out: Path) -> None:
    built = [entry for entry in index.entries if entry.file]
    for entry in index.entries:
        if entry.error or entry.note:
            print_text(f"{entry.recording}: {entry.error or entry.note}")
    print_text(
        f"{len(built)} of {len(index.entries)} recordings to {out}/{INDEX}: "
        f"{sum(entry.traces for entry in built)} traces, "
        f"{sum(entry.tokens for entry in built)} tokens, "
        f"{sum(entry.ledger.trained for entry in built)} of "
        f"{sum(entry.ledger.sampled for entry in built)} sampled ones trained"
    )
