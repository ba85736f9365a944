"""``tugline harness list | install | upgrade | check``: which agents there are, and work here.

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

from tugline.cli.doctor import engine_at
from tugline.conformance.cells import Case, cells_of
from tugline.conformance.matrix import check as check_cell
from tugline.conformance.matrix import reached
from tugline.conformance.worker import Result
from tugline.errors import UsageError
from tugline.harnesses import inventory
from tugline.harnesses.inventory import InventoryItem, find_preset, list_items, list_presets
from tugline.harnesses.preset import Preset

harness = typer.Typer(help="The agent programs that can be run.", no_args_is_help=True)
_SIGNS = {"pass": "[green]pass[/]", "cli:": "[yellow]cli[/]", "fail:": "[red]fail[/]", "-": ""}


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Version = Annotated[str | None, typer.Option(help="An exact version, instead of the pinned one.")]


@harness.command("list")
def list_(
    *,
    newest: Annotated[
        bool, typer.Option("--newest", help="Ask npm and PyPI for the newest versions.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Name every harness and its version, what is installed of it and whether that is sound."""
    with Console(stderr=True).status("reading what is installed"):
        found = asyncio.run(list_items(newest=newest))
    if as_json:
        typer.echo(msgspec.json.encode({"harnesses": found}))
    else:
        _list(found)
    if any(item.sound is False for item in found):
        typer.echo("what has changed is not as it was installed: remove its folder", err=True)
        raise typer.Exit(1)


def _list(found: Sequence[InventoryItem]) -> None:
    table = Table("name", "version", "installed", "checksum", "newest", box=None)
    table.add_column("checked in", overflow="fold")
    for item in found:
        dialects = [cell.dialect for cell in cells_of(None) if cell.harness == item.name]
        table.add_row(
            item.name,
            item.version or "-",
            f"{item.bytes / 1e6:.0f} MB" if item.installed else "-",
            {None: "-", True: "ok", False: "[red]changed[/]"}[item.sound],
            item.newest or "-",
            ", ".join(dialects) if item.pinned else "",
        )
    Console().print(table)


@harness.command()
def install(
    names: Annotated[list[str] | None, typer.Argument(help="Harnesses to install.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Install every harness.")] = False,
    version: Version = None,
) -> None:
    """Put harnesses into the toolbox ahead of time, and start each of them once."""
    if every == bool(names):
        msg = "give the names of harnesses, or --all"
        raise UsageError(msg)
    if version is not None and len(names or ()) != 1:
        msg = f"--version {version} is for one harness; give its name alone"
        raise UsageError(msg)
    for program in [find_preset(name, version) for name in names or list_presets()]:
        _install(program)
        typer.echo(f"{program.name} {program.version} is installed")


@harness.command()
def upgrade(name: str, *, version: Version = None) -> None:
    """Install the newest version (or --version) beside the pinned one, and start it once."""
    pinned = find_preset(name)
    wanted = version or asyncio.run(pinned.package.find_newest())
    if wanted == pinned.version:
        typer.echo(f"{name} {wanted} is what tasks get already")
        return
    _install(find_preset(name, wanted))
    typer.echo(
        f"{name} {wanted} is installed and starts. Tasks get {pinned.version} unless they say\n"
        f"  harness: {{name: {name}, options: {{version: {wanted}}}}}\n"
        f"See first whether it works: tugline harness check {name} --version {wanted}"
    )


def _install(program: Preset) -> None:
    with Console(stderr=True).status(f"installing {program.name} {program.version}"):
        asyncio.run(inventory.install(program))


@harness.command()
def check(  # noqa: PLR0913 - options of the command line
    name: Annotated[str | None, typer.Argument(help="Harness to check.")] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Check every harness.")] = False,
    version: Version = None,
    engine: Annotated[
        str | None, typer.Option(help="Let this engine answer, such as http://127.0.0.1:8000.")
    ] = None,
    slow: Annotated[
        bool, typer.Option("--slow", help="Also a first token after 70 s, two minutes a cell.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep logs, requests and answers in this new folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a harness against the gateway and a scripted model, without internet."""
    if every == (name is not None):
        msg = "give the name of one harness, or --all"
        raise UsageError(msg)
    cells = cells_of(name)
    if engine is not None:
        engine_at(engine)
    if version is not None:
        find_preset(cells[0].harness, version)
        cells = tuple(
            msgspec.structs.replace(cell, options={**cell.options, "version": version})
            for cell in cells
        )
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
    cells: Sequence[Case], url: str | None, *, keep: Path | None, slow: bool
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
