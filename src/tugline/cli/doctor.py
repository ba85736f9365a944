"""``tugline doctor``: check an engine, this machine's runtimes or a server.

With ``--engine`` it finds the modes that the engine supports and the flags to change, with
``--runtimes`` the usable runtimes and their weaknesses; without either it checks the server, its
nodes and their engines. Exit code 0 if all is healthy (with ``--engine``: the wanted mode), else 1.
"""

import sys
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tugline.cli.options import DEFAULT_SERVER, Json, Remote, print_json, print_report
from tugline.client.overview import examine
from tugline.errors import UsageError
from tugline.gateway.engine import CheckOutcome, EngineReport
from tugline.gateway.probe import probe
from tugline.plugins import find, list_names
from tugline.sandbox.base import Runtime
from tugline.types import Mode
from tugline.web.serve import raise_file_limit

_FILES = 16
"""Files that a node has open for an agent: connections, a recording, pipes of its sandbox."""
_COLOUR = {CheckOutcome.PASS: "green", CheckOutcome.FAIL: "red", CheckOutcome.UNKNOWN: "yellow"}


async def doctor(
    *,
    engine: str | None = None,
    model: str | None = None,
    mode: Mode | None = None,
    runtimes: bool = False,
    remote: Remote = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Check an engine's modes and flags, this machine's runtimes, or a server.

    Args:
        engine: Address, such as http://127.0.0.1:8000.
        model: Served name (default: the first).
        mode: Wanted mode (default: the best for training).
        runtimes: List the runtimes of this machine and their weaknesses.
    """
    if runtimes:
        _list_runtimes(as_json=as_json)
        return
    if engine is None:
        await _examine(remote, as_json=as_json)
        return
    report = await probe(check_address(engine), model)
    refusal = ""
    try:
        report.wire(mode)
    except UsageError as error:
        refusal = str(error)
    found = report.to_dict() | {"refused": refusal or None}
    print_report(found, lambda: _show(report, refusal), as_json=as_json)
    if refusal:
        sys.exit(1)


def check_address(url: str) -> str:
    """Check that ``--engine`` is a URL. Raises `UsageError`."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # an odd port, or half an IPv6 address
        sound = False
    if not sound:
        raise UsageError(f"--engine is {url!r}, must be http://HOST:PORT")
    return url


def _list_runtimes(*, as_json: bool) -> None:
    states: dict[str, dict[str, Any]] = {}
    for name in list_names("runtime"):
        runtime: Runtime = find("runtime", name)()
        reason = runtime.check_available()
        weaknesses = [] if reason else list(runtime.list_weaknesses())
        states[name] = {"unavailable": reason, "weaknesses": weaknesses}
    files = raise_file_limit()
    if files < 1000 * _FILES:
        low = f"{files} suffice for about {files // _FILES} agents: raise `ulimit -Hn`"
        states["open files"] = {"unavailable": None, "weaknesses": [low]}
    if as_json:
        print_json(states)
        return
    table = Table("runtime", "", "does not contain", box=None)
    for name, state in states.items():
        sign = "[red]unavailable[/]" if state["unavailable"] else "[green]usable[/]"
        table.add_row(name, sign, escape(state["unavailable"] or "\n".join(state["weaknesses"])))
    Console(highlight=False).print(table)


async def _examine(remote: Remote, *, as_json: bool) -> None:
    async with remote.connect() as client:
        checks = await examine(client)
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        table = Table("component", "", "detail", box=None)
        for check in checks:
            sign = "[green]healthy[/]" if check.healthy else "[red]unhealthy[/]"
            table.add_row(check.component, sign, escape(check.detail))
        Console(highlight=False).print(table)
    if not all(check.healthy for check in checks):
        sys.exit(1)


def _show(report: EngineReport, refusal: str) -> None:
    console = Console(highlight=False)
    engine = escape(f"{report.engine} {report.version}")
    console.print(f"[bold]{engine}[/] at {report.url}: {escape(str(report.model))}")
    table = Table("check", "", "detail")
    for check in report.checks:
        colour = _COLOUR[check.outcome]
        table.add_row(check.name, f"[{colour}]{check.outcome}[/]", escape(check.detail))
    console.print(table)
    for advice in report.advice:
        console.print(f"[yellow]change[/] {escape(advice)}")
    for name, route_mode in report.routes.items():
        console.print(f"[green]sound[/]  {route_mode} mode, by {name}")
    if refusal:
        console.print(f"[red]refused[/] {escape(refusal)}")
