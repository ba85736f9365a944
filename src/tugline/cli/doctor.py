"""``tugline doctor``: what a running inference engine can do, and what to change before training.

With ``--runtimes`` it looks at this machine: which runtimes it has, and what they do not contain.

Without an engine it looks at the server that runs here, its nodes and their engines. Exit code 0 if
all is sound (with ``--engine``: the wanted mode), 1 if it is not or nothing answers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tugline.cli.options import Folder, Server, Token, connect
from tugline.client.health import Finding, examine
from tugline.errors import UsageError
from tugline.gateway.probe.diagnosis import Outcome, Report
from tugline.gateway.probe.probe import probe
from tugline.plugins import find, list_names
from tugline.sandbox.base import Runtime
from tugline.types import Mode

_COLOUR = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.UNKNOWN: "yellow"}


class Found(NamedTuple):
    """What a runtime is worth on this machine."""

    unavailable: str | None
    weaknesses: tuple[str, ...]


def doctor(  # noqa: PLR0913 - each is a flag
    *,
    engine: Annotated[
        str | None, typer.Option(help="Address, such as http://127.0.0.1:8000.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served name; the first if not given.")] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="What you want to run; the best for training if not given.")
    ] = None,
    runtimes: Annotated[
        bool, typer.Option(help="What this machine can run agents in, and how well it contains.")
    ] = False,
    server: Server = None,
    token: Token = None,
    folder: Folder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
) -> None:
    """Check an engine's modes and flags, this machine's runtimes, or a server."""
    if runtimes:
        _list_runtimes(as_json=as_json)
        return
    if engine is None:
        _examine(server, token, folder, as_json=as_json)
        return
    report = asyncio.run(probe(engine_at(engine), model))
    refusal = ""
    try:
        report.wire(mode)
    except UsageError as error:
        refusal = str(error)
    if as_json:
        typer.echo(msgspec.json.encode(report.told() | {"refused": refusal or None}))
    else:
        _show(report, refusal)
    if refusal:
        raise typer.Exit(1)


def engine_at(url: str) -> str:
    """What ``--engine`` is, if it can be an address. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # an odd port, or half an IPv6 address
        sound = False
    if not sound:
        msg = f"--engine is {url!r}, must be http://HOST:PORT"
        raise UsageError(msg)
    return url


def _list_runtimes(*, as_json: bool) -> None:
    seen: dict[str, Found] = {}
    for name in list_names("runtime"):
        runtime: Runtime = find("runtime", name)()
        why = runtime.check_available()
        seen[name] = Found(why, () if why else tuple(runtime.list_weaknesses()))
    if as_json:
        typer.echo(msgspec.json.encode({name: one._asdict() for name, one in seen.items()}))
        return
    table = Table("runtime", "", "does not contain", box=None)
    for name, one in seen.items():
        sign = "[red]not here[/]" if one.unavailable else "[green]usable[/]"
        table.add_row(name, sign, escape(one.unavailable or "\n".join(one.weaknesses)))
    Console(highlight=False).print(table)


def _examine(server: str | None, token: str | None, folder: Path | None, *, as_json: bool) -> None:
    async def main() -> list[Finding]:
        async with connect(server, token, folder) as client:
            return await examine(client)

    found = asyncio.run(main())
    if as_json:
        typer.echo(msgspec.json.encode([one._asdict() for one in found]))
    else:
        table = Table("part", "", "what was seen", box=None)
        for one in found:
            sign = "[green]sound[/]" if one.sound else "[red]wrong[/]"
            table.add_row(one.what, sign, escape(one.detail))
        Console(highlight=False).print(table)
    if not all(one.sound for one in found):
        raise typer.Exit(1)


def _show(report: Report, refusal: str) -> None:
    console = Console(highlight=False)
    engine = escape(f"{report.engine} {report.version}")
    console.print(f"[bold]{engine}[/] at {report.url}: {escape(str(report.model))}")
    table = Table("check", "", "what was seen")
    for check in report.checks:
        colour = _COLOUR[check.outcome]
        table.add_row(check.name, f"[{colour}]{check.outcome}[/]", escape(check.detail))
    console.print(table)
    for advice in report.advice:
        console.print(f"[yellow]change[/] {escape(advice)}")
    for name, found in report.routes.items():
        console.print(f"[green]sound[/]  {found} mode, by {name}")
    if refusal:
        console.print(f"[red]refused[/] {escape(refusal)}")
