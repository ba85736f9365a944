"""``tugline harness list | install | upgrade | check``: agent programs on this machine."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter
from rich.table import Column
from rich.text import Text

from tugline import log
from tugline.cli import harness_check
from tugline.cli.harness_check import CASES, Case, CheckResult, cases_of
from tugline.cli.options import Json, make_new_folder
from tugline.cli.output import make_table, print_report, print_text, show_progress
from tugline.errors import HarnessError, UsageError
from tugline.harnesses.install import install_dir, measure, read_manifest
from tugline.harnesses.preset import Preset
from tugline.plugins import find, list_names
from tugline.schema import decode, parse_json
from tugline.types import PluginSpec

harness = App(name="harness")

_DEVELOP = Group("Develop Tugline", sort_key=1)
Version = Annotated[str | None, Parameter(help="An exact version, instead of the pinned one.")]


class InventoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """Version of a harness, or a folder shared by harnesses (with `pinned` None)."""

    name: str
    version: str | None
    """Version; None for a program of the user."""
    pinned: bool | None
    """Whether this is the default version."""
    installed: bool
    bytes: int = 0
    sound: bool | None = None
    """Whether all files match the manifest; None if the harness is not installed."""


@harness.command(name="list")
def list_(*, as_json: Json = False) -> None:
    """List harnesses with their versions, and verify the checksums of installed ones."""
    with show_progress("reading installed harnesses"):
        items = asyncio.run(_list_items())
    changed = any(item.sound is False for item in items)
    if changed:
        advice = "remove its folder and install it again"
        print_text(f"a harness has changed since it was installed: {advice}", stderr=True)
    print_report({"harnesses": items}, lambda: _list(items), as_json=as_json, failed=changed)


def _list(items: Sequence[InventoryItem]) -> None:
    rows = (
        (
            item.name,
            item.version or "-",
            f"{item.bytes / 1e6:.0f} MB" if item.installed else "-",
            {None: "-", True: "ok", False: Text("changed", "red")}[item.sound],
            ", ".join(c.dialect for c in CASES if item.pinned and c.harness == item.name),
        )
        for item in items
    )
    dialects = Column("checked in", overflow="fold")
    print_text(make_table(("name", "version", "installed", "checksum", dialects), rows))


async def _list_items() -> list[InventoryItem]:
    """List all known harnesses, then all other installed versions and folders.

    Reads all files, at about half a gigabyte per second.
    """
    names = list_names("harness")
    items = [await _inspect(name, find("harness", name).version, pinned=True) for name in names]
    listed = {f"{item.name}-{item.version}" for item in items}
    for path in sorted(install_dir().glob("*-*")):
        if read_manifest(path) and path.name not in listed:
            name, _, version = path.name.partition("-")
            items.append(await _inspect(name, version, pinned=False if name in names else None))
    return items


async def _inspect(name: str, version: str | None, *, pinned: bool | None) -> InventoryItem:
    folder = install_dir() / f"{name}-{version}"
    manifest = read_manifest(folder)
    return InventoryItem(
        name=name,
        version=version,
        pinned=pinned,
        installed=manifest is not None,
        bytes=manifest.bytes if manifest else 0,
        sound=await _is_sound(folder),
    )


async def _is_sound(folder: Path) -> bool | None:
    manifest = read_manifest(folder)
    return await asyncio.to_thread(measure, folder) == manifest if manifest else None


@harness.command
def install(
    names: list[str] | None = None,
    /,
    *,
    every: Annotated[bool, Parameter("--all")] = False,
    version: Version = None,
) -> None:
    """Install harnesses in advance, and start each of them once.

    Args:
        names: Harnesses to install.
        every: Install every harness.
    """
    if every == bool(names):
        raise UsageError("give either the names of harnesses or --all")
    if version is not None and len(names or ()) != 1:
        raise UsageError(f"--version {version} requires the name of exactly one harness")
    known = [name for name in list_names("harness") if issubclass(find("harness", name), Preset)]
    for program in [_find_preset(name, version) for name in names or known]:
        _install(program)
        print(f"{program.name} {program.version} is installed")


@harness.command
def upgrade(name: str, /, *, version: Version = None) -> None:
    """Install the newest version (or --version) beside the pinned one, and start it once."""
    pinned = _find_preset(name)
    wanted = version or asyncio.run(pinned.package.find_newest())
    if wanted == pinned.version:
        print(f"{name} {wanted} is already the pinned version")
        return
    _install(_find_preset(name, wanted))
    print(
        f"{name} {wanted} is installed and starts. Tasks use {pinned.version} unless they set\n"
        f"  harness: {{name: {name}, options: {{version: {wanted}}}}}\n"
        f"To check it first: tugline harness check {name} --version {wanted}"
    )


def _install(program: Preset) -> None:
    """Install a preset. Raises `HarnessError`, also if installed files have changed."""
    folder = program.package.folder
    with show_progress(f"installing {program.name} {program.version}"):
        if asyncio.run(_is_sound(folder)) is False:
            msg = f"{program.name} {program.version} was modified: remove {folder} and reinstall it"
            raise HarnessError(msg)
        asyncio.run(program.install())


def _find_preset(name: str, version: str | None = None) -> Preset:
    """Return the preset `name`. Raises `UsageError` for a harness without files to install."""
    kind = find("harness", name)
    if not (isinstance(kind, type) and issubclass(kind, Preset)):
        msg = f"harness {name!r} runs the command in its options, so it cannot be installed"
        raise UsageError(msg)
    return kind(**({"version": version} if version else {}))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Own:
    """Options that check a harness that is not a preset."""

    tool: str | None = None
    """For your own harness: name of its tool that runs a shell command."""
    argument: str = "command"
    """Argument of --tool for the command."""
    arguments: str = "{}"
    """Other required arguments of --tool, as a JSON object."""
    options: str = "{}"
    """For your own harness: its options, as a JSON object."""

    def make_case(self, name: str) -> Case:
        """Return the case of the harness `name`. Raises `ConfigError`."""
        return Case(
            harness=name,
            tool=self.tool or "",
            argument=self.argument,
            arguments=_parse_object("--arguments", self.arguments),
            options=_parse_object("--options", self.options),
        )


def _parse_object(option: str, text: str) -> dict[str, Any]:
    return decode(parse_json(text, option), dict[str, Any], source=option)


PRESETS = Own()
"""Options that check presets."""


@harness.command
def check(
    name: str | None = None,
    /,
    *,
    every: Annotated[bool, Parameter("--all", group=_DEVELOP)] = False,
    version: Version = None,
    own: Own = PRESETS,
    runtime: str = "auto",
    keep: Path | None = None,
    as_json: Json = False,
) -> None:
    """Run a harness in a sandbox, against the gateway and a scripted model.

    Args:
        name: Harness to check: a preset, or your own as module:Class or an entry point.
        every: Check every preset.
        runtime: Runtime of the session.
        keep: Keep logs and recordings in this new folder.
    """
    if every == (name is not None):
        raise UsageError("give either the name of one harness or --all")
    cases = cases_of(name) if name is None or own.tool is None else (own.make_case(name),)
    if version is not None:
        _find_preset(cases[0].harness, version)
        cases = tuple(
            msgspec.structs.replace(case, options={**case.options, "version": version})
            for case in cases
        )
    if keep is not None:
        make_new_folder(keep)
    log.configure(level="error")
    results = asyncio.run(_check(cases, PluginSpec(runtime), keep))
    failed = any(result.failed for result in results)
    print_report({"results": results}, lambda: _show(results), as_json=as_json, failed=failed)


async def _check(
    cases: Sequence[Case], runtime: PluginSpec, keep: Path | None
) -> list[CheckResult]:
    results = []
    with show_progress("checking", "harnesses", len(cases)) as progress:
        for case in cases:
            progress.summary = f"now {case.harness} ({case.dialect})"
            results.append(await harness_check.check(case, runtime, keep))
            progress.advance()
        progress.summary = ""
    return results


def _show(results: Sequence[CheckResult]) -> None:
    for result in results:
        passed = sum(verdict == "pass" for verdict in result.checks.values())
        program = " ".join(filter(None, (result.harness, result.version)))
        print_text(
            f"{program} ({result.dialect or 'no call'}): {passed} of "
            f"{len(result.checks)} passed, {result.exact_turns} of {result.turns} turns exact",
            style="red" if result.failed else "green",
        )
        for name, verdict in result.checks.items():
            if verdict != "pass":
                print_text(f"  {name}: {verdict}")
