"""What configures pytest: sections of its files, and the plug-ins that options name."""

import configparser
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from tugline.patch import FileChange
from tugline.schema import read_values

_PATTERNS = read_values(Path(__file__).with_name("patterns.toml"))
PYTEST_CONFIGS: Mapping[str, str] = _PATTERNS["pytest_configs"]
"""Names of files in the workdir, and the section that makes each a configuration of pytest."""
_PLUGIN = re.compile(r"(?:^|[\s\"'=\[,])-p[\s\"',=]*(?!no:)([A-Za-z_][\w.]*)")
_ADDED = re.compile(r"PYTEST_PLUGINS[\"']?\s*[=:,]\s*[\"']?([\w.,]+)")


def find_plugins(command: str, settings: Iterable[str]) -> set[str]:
    """Return the modules that ``-p`` and PYTEST_PLUGINS name in a command and in settings."""
    runs = (part for part in re.split(r"[;&|\n]", command) if re.search(r"py\.?test|ADDOPTS", part))
    names = {name for text in (*runs, *settings) for name in _PLUGIN.findall(text)}
    return names.union(*(match.split(",") for match in _ADDED.findall(command))) - {""}


def list_plugin_files(plugin: str) -> Iterator[str]:
    """Yield the paths, relative to an import root, that are loaded for a plug-in."""
    parts = plugin.split(".")
    for count in range(1, len(parts) + 1):
        yield f"{'/'.join(parts[:count])}/__init__.py"
    yield f"{'/'.join(parts)}.py"


def configures_pytest(path: PurePosixPath, change: FileChange | None, before: str | None) -> bool:
    """Return whether a change adds, removes or edits settings of pytest; `before` is the old text.

    Other parts of a shared file, such as ``pyproject.toml``, may change.
    """
    if path.name == "conftest.py":
        return True
    if path.name not in PYTEST_CONFIGS:
        return False
    if not PYTEST_CONFIGS[path.name] or (change is not None and change.link):
        return True
    return _read_settings(path, before or "") != _read_settings(
        path, (change and change.text) or ""
    )


def _read_settings(path: PurePosixPath, text: str) -> object:
    """Return pytest's part of a file; all of it if it cannot be parsed but may have such a part."""
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text).get("tool", {}).get("pytest")
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        section = PYTEST_CONFIGS[path.name].strip("[]")
        return dict(parser[section]) if parser.has_section(section) else None
    except (tomllib.TOMLDecodeError, configparser.Error, AttributeError):
        return text if PYTEST_CONFIGS[path.name] in text else None
