"""``tugline harness list | install | check``: which agents there are, and whether they work here.

A check runs the real program against the real gateway and a scripted model, in a network without
internet, and says for each requirement whether it holds, or why not and whose fault that is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from tugline.conformance.cells import Cell, cells_of
from tugline.conformance.matrix import check as check_cell
from tugline.conformance.matrix import reached
from tugline.conformance.worker import Result
from tugline.errors import UsageError
from tugline.plugins import find, known

harness = typer.Typer(help="The agent programs that can be run.", no_args_is_help=True)
_SIGNS = {"pass": "[green]pass[/]", "cli:": "[yellow]cli[/]", "fail:": "[red]fail[/]", "-": ""}


@harness.command("list")
def list_() -> None:
    """Name every harness, its version and the dialects it is checked in."""
    table = Table("name", "version", "checked in", box=None)
    for name in known("harness"):
        dialects = [cell.dialect for cell in cells_of(None) if cell.harness == name]
        version = find("harness", name)().version if dialects else None
        table.add_row(name, version or "-", ", ".join(dialects) or "-")
    Console().print(table)


@harness.command()
def install(name: str) -> None:
    """Install the pinned version of a harness into the cache."""
    try:
        program = find("harness", name)()
    except TypeError as error:
        msg = f"harness {name!r} is told by its options what to run; there is nothing to install"
        raise UsageError(msg) from error
    asyncio.run(program.install())
    typer.echo(f"{name} {program.version} is installed")


@harness.command()
def check(
    name: Annotated[str | None, typer.Argument(help="Harness to check.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Check every harness.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Let this engine answer, such as http://127.0.0.1:8000.")
    ] = None,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also a first token after 70 s, two minutes a cell.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep logs, requests and answers in this new folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
) -> None:
    """Run a harness against the gateway and a scripted model, without internet."""
    if every == (name is not None):
        msg = "give the name of one harness, or --all"
        raise UsageError(msg)
    cells = cells_of(name)
    if keep is not None:
        _make(keep)
    results = asyncio.run(_check(cells, engine, keep=keep, slow=slow))
    if as_json:
        typer.echo(msgspec.json.encode({"results": results}))
    else:
        _show(results)
    if any(one.startswith("fail") for result in results for one in result.checks.values()):
        raise typer.Exit(1)


def _make(keep: Path) -> None:
    try:
        keep.mkdir(parents=True)
    except OSError as error:
        msg = f"cannot make {keep}: {error.strerror}; choose another --keep"
        raise UsageError(msg) from error


async def _check(
    cells: Sequence[Cell], url: str | None, *, keep: Path | None, slow: bool
) -> list[Result]:
    console = Console(stderr=True, highlight=False)
    results = []
    async with reached(url) as engine:
        for number, cell in enumerate(cells):
            began = time.monotonic()
            with console.status(f"{number + 1}/{len(cells)} {cell.harness} ({cell.dialect})"):
                results.append(await check_cell(cell, keep=keep, slow=slow, engine=engine))
            _say(console, results[-1], time.monotonic() - began)
    return results


def _say(console: Console, result: Result, seconds: float) -> None:
    passed = sum(one == "pass" for one in result.checks.values())
    console.print(
        f"{result.harness} {result.version} ({result.dialect}): {passed} of {len(result.checks)} "
        f"passed, {result.exact_turns} of {result.turns} turns exact, {seconds:.0f} s",
        soft_wrap=True,
    )


def _show(results: Sequence[Result]) -> None:
    console = Console()
    names = list(dict.fromkeys(name for result in results for name in result.checks))
    table = Table("", *(name.replace("_", "\n") for name in names))
    for result in results:
        signs = [_SIGNS[result.checks.get(name, "-").split()[0]] for name in names]
        table.add_row(f"{result.harness}\n{result.dialect}", *signs)
    console.print(table)
    for result in results:
        for name, verdict in result.checks.items():
            if verdict != "pass":
                who = f"{result.harness} ({result.dialect})"
                line = f"{who}, {name}: {verdict}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
