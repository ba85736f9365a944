"""``tugline generate``: run tasks without a server, and keep accepted sessions for `tugline sft`.

The same command resumes. The files are rewritten from the recordings, so a new ``--accept`` needs
no model calls.
"""

import contextlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console

from tugline.cli.local_run import read_tags, run_with_progress
from tugline.cli.node_options import DEFAULT_NODE, NodeOptions
from tugline.cli.options import Count, Json, NotNegative
from tugline.cli.output import make_table, print_text, save_report, track
from tugline.cli.task import Paths
from tugline.datasets.files import load_tasks
from tugline.errors import UsageError
from tugline.exports.base import make_exporter
from tugline.exports.pipeline import Export
from tugline.exports.pipeline import run as export
from tugline.protocol import ResultView, RunKind
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.types import PluginSpec, count_prompt_tokens

FILES = {
    "conversations.jsonl": PluginSpec("sft", {"arguments": "object"}),
    "traces.parquet": PluginSpec("parquet"),
}
"""Files for `tugline sft`; traces need token ids and pyarrow."""


class Figures(msgspec.Struct, kw_only=True):
    """Totals of sessions; the tokens include failed sessions and repeated attempts."""

    sessions: int = 0
    accepted: int = 0
    failed: int = 0
    """Sessions without a reward."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cost: float = 0.0
    """Cost of the tokens."""


def generate(
    *paths: Paths,
    out: Path,
    samples: Count | None = None,
    accept: str = "reward>=1",
    price_in: NotNegative | None = None,
    price_out: NotNegative | None = None,
    local: NodeOptions = DEFAULT_NODE,
    as_json: Json = False,
) -> None:
    """Run tasks with a strong model; keep accepted sessions for `tugline sft`.

    Args:
        out: Folder of the run; an existing run resumes.
        samples: Sessions per task (default: samples of the task).
        accept: Minimum of the reward, or of a part of it: 'passed>=2'.
        price_in: Price of a million prompt tokens (default: prices.prompt_tokens of the settings).
        price_out: Price of a million sampled tokens (default: prices.sampled_tokens).
    """
    condition = _parse_condition(accept)
    tasks = [
        replace(task, samples=samples or task.samples)
        for task in load_tasks(paths, local.task_changes)
    ]
    given = {"prompt_tokens": price_in, "sampled_tokens": price_out}
    prices = {name: price for name, price in given.items() if price is not None}
    console = Console(stderr=True, highlight=False)
    done = run_with_progress(tasks, local, out, console, RunKind.GENERATE, prices=prices)
    totals, accepted = _read_run(out, done.views, read_tags(tasks), condition)
    for total in totals.values():
        total.cost = done.prices.price_tokens(total.prompt_tokens, total.sampled_tokens)
    rows = _write_set(out, accepted)
    save_report(out / "generation.json", {"tags": totals, "files": rows}, as_json=as_json)
    if not as_json:
        _print_figures(totals, rows)
    if not accepted:
        console.print(f"no sessions were accepted; see why with: tugline view {out}")
        sys.exit(1)


def _parse_condition(text: str) -> tuple[str, float]:
    """Return the name of a part of the reward, and its minimum. Raises `UsageError`."""
    match = re.fullmatch(r"\s*([\w.\-]+)\s*>=\s*(-?\d+\.?\d*)\s*", text)
    if match is None:
        raise UsageError(f"--accept is {text!r}, must be NAME>=NUMBER, such as 'reward>=1'")
    return match[1], float(match[2])


def _read_run(
    out: Path,
    views: Sequence[ResultView],
    tags: Mapping[str, Mapping[str, str]],
    condition: tuple[str, float],
) -> tuple[dict[str, Figures], list[Path]]:
    """Return totals of `views` by tag, and the accepted recordings."""
    totals = {"all": Figures()}
    accepted = []
    part, minimum = condition
    figures: dict[str, list[Figures]] = {}
    for view in views:
        names = ["all", *(f"{name}={value}" for name, value in tags[view.task].items())]
        figures[view.session] = [totals.setdefault(name, Figures()) for name in names]
        for total in figures[view.session]:
            total.sessions += 1
            total.failed += view.reward is None
    for path in track(list_recordings(out), "reading", "recordings"):
        recording = read(path)
        own = figures.get(recording.header.session.id, []) if recording.header else []
        reward = recording.result.reward if own and recording.result else None
        values = {**reward.parts, "reward": reward.value} if reward else {}
        is_accepted = values.get(part, -math.inf) >= minimum
        accepted += [path] * is_accepted
        for total in own:
            total.accepted += is_accepted
            total.prompt_tokens += count_prompt_tokens(recording.calls)
            for call in recording.calls:
                total.sampled_tokens += len(call.sampled_ids) + call.unreported_tokens
    return totals, accepted


def _write_set(out: Path, accepted: Sequence[Path]) -> dict[str, int]:
    """Write the files that have rows, replacing earlier files; return the numbers of rows."""
    rows = {}
    for name, form in FILES.items():
        (out / name).unlink(missing_ok=True)
        with contextlib.suppress(UsageError):  # the file has no rows, or pyarrow is missing
            plan = Export(exporter=make_exporter(form), out=out / name)
            summary = export(plan, accepted, lambda *_: None)
            rows[name] = sum(file.rows for file in summary.files.values())
    return rows


def _print_figures(totals: Mapping[str, Figures], rows: Mapping[str, int]) -> None:
    lines = (
        (
            name,
            total.sessions,
            f"{total.accepted} ({total.accepted / max(1, total.sessions):.0%})",
            *(f"{n:,}" for n in (total.failed, total.prompt_tokens, total.sampled_tokens)),
            f"{total.cost:.4g}",
        )
        for name, total in totals.items()
    )
    print_text(
        make_table(("tag", *Figures.__struct_fields__), lines),
        ", ".join(f"{count} rows in {name}" for name, count in rows.items()),
    )
