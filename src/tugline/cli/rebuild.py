"""``tugline rebuild``: build byte-identical trajectories from recorded sessions.

The exit code is 1 if one could not be built.
"""

from pathlib import Path

from tugline.cli.key_values import parse_builder
from tugline.cli.options import DEFAULT_SERVER, Json, Remote
from tugline.cli.output import print_report, print_text, show_progress
from tugline.recording.trajectories import INDEX, Index, rebuild_all


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
        builder: Builder to use (default: the builder of each task).
        option: key=value option of the builder; repeatable.
        salvage: Build from the part of a damaged file before the damage.
    """
    root = Path(session)
    spec = parse_builder(builder, option)
    with (
        remote.find_recordings(session) as paths,
        show_progress("rebuilding", "recordings", len(paths)) as progress,
    ):
        index = rebuild_all(
            paths,
            root if root.is_dir() else paths[0].parent,
            out,
            spec,
            salvage=salvage,
            on_file=progress.advance,
        )
    failed = any(entry.error for entry in index.entries)
    print_report(index, lambda: _show(index, out), as_json=as_json, failed=failed)


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
        f"{sum(entry.ledger.sampled for entry in built)} sampled tokens are trainable"
    )
