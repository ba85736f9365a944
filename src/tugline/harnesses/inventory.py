"""Installed harnesses and what they share, for ``tugline harness``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tugline.errors import HarnessError, UsageError
from tugline.harnesses.install import install_dir, measure, read_manifest
from tugline.harnesses.preset import Preset
from tugline.plugins import find, list_names


class InventoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """A harness in one version, or a folder that harnesses share (`pinned` is None then)."""

    name: str
    version: str | None
    """None where the program is the user's own."""
    pinned: bool | None
    """Whether it is the default version."""
    installed: bool
    bytes: int = 0
    sound: bool | None = None
    """Whether every file is as it was installed; None if it is not installed."""
    newest: str | None = None
    """The newest version in the registry; None if it was not asked or does not know."""


async def list_items(*, newest: bool = False) -> list[InventoryItem]:
    """Every known harness, then everything else that is installed.

    Reads all files, about half a gigabyte a second; `newest` asks the registries.
    """
    harnesses = [await _inspect_harness(name, newest=newest) for name in list_names("harness")]
    listed = {f"{item.name}-{item.version}" for item in harnesses}
    folders = sorted(path for path in install_dir().glob("*-*") if read_manifest(path))
    others = [await _inspect_folder(path.name) for path in folders if path.name not in listed]
    return harnesses + others


async def _inspect_harness(name: str, *, newest: bool) -> InventoryItem:
    try:
        harness = find("harness", name)()
    except TypeError:  # its program is an option without a default
        return InventoryItem(name=name, version=None, pinned=True, installed=False)
    if not isinstance(harness, Preset):
        return InventoryItem(name=name, version=harness.version, pinned=True, installed=False)
    item = await _inspect_folder(harness.package.folder.name)
    latest = await _find_newest(harness) if newest else None
    return msgspec.structs.replace(item, pinned=True, newest=latest)


async def _inspect_folder(folder: str) -> InventoryItem:
    name, _, version = folder.partition("-")
    manifest = read_manifest(install_dir() / folder)
    return InventoryItem(
        name=name,
        version=version,
        pinned=False if name in list_names("harness") else None,
        installed=manifest is not None,
        bytes=manifest.bytes if manifest else 0,
        sound=await _is_sound(install_dir() / folder),
    )


async def _is_sound(folder: Path) -> bool | None:
    manifest = read_manifest(folder)
    return await asyncio.to_thread(measure, folder) == manifest if manifest else None


async def install(program: Preset) -> None:
    """Install a preset. Raises `HarnessError`, also if it is installed and has changed."""
    folder = program.package.folder
    if await _is_sound(folder) is False:
        msg = (
            f"{program.name} {program.version} is not as it was installed; "
            f"remove {folder} and install it again"
        )
        raise HarnessError(msg)
    await program.install()


async def _find_newest(harness: Preset) -> str | None:
    try:
        return await harness.package.find_newest()
    except (HarnessError, UsageError):
        return None


def find_preset(name: str, version: str | None = None) -> Preset:
    """The preset called `name`. Raises `UsageError` for a harness that has nothing to install."""
    kind = find("harness", name)
    if not (isinstance(kind, type) and issubclass(kind, Preset)):
        msg = f"harness {name!r} is told by its options what to run; there is nothing to install"
        raise UsageError(msg)
    return kind(**({"version": version} if version else {}))


def list_presets() -> Sequence[str]:
    """Names of the harnesses that can be installed."""
    return [name for name in list_names("harness") if issubclass(find("harness", name), Preset)]
