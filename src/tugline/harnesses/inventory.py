"""What lies in the toolbox: for people who keep machines, not for sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tugline.errors import HarnessError, UsageError
from tugline.harnesses.installing import measure, sealed, toolbox
from tugline.harnesses.preset import Preset
from tugline.plugins import find, list_names


class InventoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """A harness in one version, or something that harnesses share (`pinned` is None then)."""

    name: str
    version: str | None
    """None where the program is the user's own."""
    pinned: bool | None
    """Whether it is the version that tasks get unless they name one."""
    installed: bool
    bytes: int = 0
    sound: bool | None = None
    """Whether every file is as it was installed; None if there are none."""
    newest: str | None = None
    """The newest version there is; None if nobody asked, or the registry does not tell."""


async def items(*, newest: bool = False) -> list[InventoryItem]:
    """Every harness that is known, then whatever else is in the toolbox.

    Reads all of it, half a gigabyte a second or so; `newest` asks the registries.
    """
    found = [await _of_harness(name, newest=newest) for name in list_names("harness")]
    there = {f"{item.name}-{item.version}" for item in found}
    folders = sorted(path for path in toolbox().glob("*-*") if sealed(path))
    others = [await _of_folder(path.name) for path in folders if path.name not in there]
    return found + others


async def _of_harness(name: str, *, newest: bool) -> InventoryItem:
    try:
        harness = find("harness", name)()
    except TypeError:  # it is told by its options what to run
        return InventoryItem(name=name, version=None, pinned=True, installed=False)
    if not isinstance(harness, Preset):
        return InventoryItem(name=name, version=harness.version, pinned=True, installed=False)
    item = await _of_folder(harness.package.folder.name)
    latest = await _newest(harness) if newest else None
    return msgspec.structs.replace(item, pinned=True, newest=latest)


async def _of_folder(folder: str) -> InventoryItem:
    name, _, version = folder.partition("-")
    seal = sealed(toolbox() / folder)
    return InventoryItem(
        name=name,
        version=version,
        pinned=False if name in list_names("harness") else None,
        installed=seal is not None,
        bytes=seal.bytes if seal else 0,
        sound=await _is_sound(toolbox() / folder),
    )


async def _is_sound(folder: Path) -> bool | None:
    seal = sealed(folder)
    return await asyncio.to_thread(measure, folder) == seal if seal else None


async def install(program: Preset) -> None:
    """Put it into the toolbox. Raises `HarnessError`, also if it is there and has changed."""
    folder = program.package.folder
    if await _is_sound(folder) is False:
        msg = (
            f"{program.name} {program.version} is not as it was installed; "
            f"remove {folder} and install it again"
        )
        raise HarnessError(msg)
    await program.install()


async def _newest(harness: Preset) -> str | None:
    try:
        return await harness.package.newest()
    except (HarnessError, UsageError):
        return None


def preset(name: str, version: str | None = None) -> Preset:
    """The preset called `name`. Raises `UsageError` for one whose program nobody can install."""
    made = find("harness", name)
    if not (isinstance(made, type) and issubclass(made, Preset)):
        msg = f"harness {name!r} is told by its options what to run; there is nothing to install"
        raise UsageError(msg)
    return made(**({"version": version} if version else {}))


def presets() -> Sequence[str]:
    """Names of those whose programs can be installed."""
    return [name for name in list_names("harness") if issubclass(find("harness", name), Preset)]
