"""Print what an interpreter may import: ``<kind>:<name>`` entries, each terminated by NUL.

Runs in a sandbox, by each of its interpreters of Python 3, in a fresh copy of a task's workdir;
the argument is a file with the paths of a patch. Kinds: ``root`` (folders of the workdir on the
search path), ``prefix`` (folders of interpreters in the workdir), ``module`` (importable names),
``asked`` (top-level names of new files of the patch, without those in the file `.inspect.names`
beside this one) and ``wanted``: those of them that pytest, its plug-ins or the standard library
import if they exist, such as ``org`` (in ``copy``).
"""

# ruff: noqa: PTH112, PTH118, PTH119, PTH120, PTH123, PTH208 - few modules are imported
import ast
import contextlib
import importlib
import os
import pkgutil
import re
import sys
import sysconfig
from typing import Any, Iterable, Iterator  # noqa: UP035 - also for Python 3.6

TOP = os.path.realpath(".")
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_MAX_DEPTH = 3
_OUTPUT = os.fdopen(os.dup(1), "w", errors="surrogateescape")
"""The standard output, which plug-ins are kept from."""


def write_entry(kind: str, name: str) -> None:
    """Print one entry."""
    _OUTPUT.write(f"{kind}:{name}\0")


def is_inside(path: str) -> bool:
    """Return whether a path is in the workdir."""
    return (os.path.realpath(path) + os.sep).startswith(TOP.rstrip(os.sep) + os.sep)


def list_modules(folder: str, prefix: str = "") -> "Iterator[str]":
    """Yield the names in a folder, with those in folders that may be namespace packages."""
    for entry in os.listdir(folder):
        name = prefix + entry.partition(".")[0]
        yield name
        inner = os.path.join(folder, entry)
        if entry[:2] != "__" and name.count(".") < _MAX_DEPTH and is_namespace(inner):
            yield from list_modules(inner, name + ".")


def is_namespace(folder: str) -> bool:
    """Return whether a folder may be a package without ``__init__``."""
    if not os.path.isdir(folder) or not os.path.basename(folder).isidentifier():
        return False
    return not any(entry.partition(".")[0] == "__init__" for entry in os.listdir(folder))


def find_new_names(paths: "Iterable[str]") -> "set[str]":
    """Return the names of folders and modules of the new files among `paths`."""
    new = [path for path in paths if path and not os.path.lexists(path)]
    names = {part.partition(".")[0] for path in new for part in path.split("/")}
    return {name for name in names if name.isidentifier() and name not in sys.modules}


class Recorder:
    """Finder that finds nothing, and records the top-level names that are looked for."""

    def __init__(self) -> None:
        self.names = set()  # type: set[str]

    def find_spec(self, name: str, path: object = None, _: object = None) -> None:
        """Record a name."""
        if path is None:
            self.names.add(name)


def load_runner() -> None:
    """Import pytest with its plug-ins, as far as they are installed."""
    with contextlib.suppress(BaseException):
        package = importlib.import_module("_pytest")
        importlib.import_module("pytest")
        for module in pkgutil.iter_modules(package.__path__):
            with contextlib.suppress(BaseException):
                importlib.import_module(f"_pytest.{module.name}")
    if not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        for point in list_plugins():
            with contextlib.suppress(BaseException):
                point.load()


def list_plugins() -> "list[Any]":
    """Return the entry points of pytest's plug-ins."""
    name = "importlib.metadata" if sys.version_info >= (3, 8) else "importlib_metadata"
    try:
        metadata = importlib.import_module(name)
    except ImportError:
        return []
    points = [point for each in metadata.distributions() for point in each.entry_points]
    return [point for point in points if point.group == "pytest11"]


def list_sources() -> "Iterator[str]":
    """Yield the paths of the sources of all loaded modules and of the standard library."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and path.endswith(".py") and not is_inside(path):
            yield path
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in _SKIPPED]
        yield from (os.path.join(folder, name) for name in files if name.endswith(".py"))


def find_imported(names: "set[str]") -> "set[str]":
    """Return those of `names` that a source of `list_sources` imports."""
    words = "|".join(map(re.escape, sorted(names))).encode()
    parts = [name.encode() for name in names]
    line = re.compile(rb"(?m)(?:^|[:;])[ \t]*(?:import|from)\b[^\n]*\b(?:" + words + rb")\b")
    found = set()  # type: set[str]
    for path in set(list_sources()):
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            with open(path, "rb") as file:
                source = file.read()
            if not any(word in source for word in parts) or line.search(source) is None:
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    found.add((node.module or "").partition(".")[0])
    return found & names


def list_places() -> None:
    """Print where the interpreter imports from, and its own folders in the workdir."""
    for folder in filter(None, sys.path):
        if is_inside(folder) and "site-packages" not in folder:
            write_entry("root", os.path.relpath(os.path.realpath(folder), TOP))
        elif os.path.isdir(folder):
            for name in list_modules(folder):
                write_entry("module", name)
    for folder in {sys.prefix, sysconfig.get_path("stdlib")}:
        if os.sep != TOP and is_inside(folder) and os.path.realpath(folder) != TOP:
            write_entry("prefix", os.path.relpath(os.path.realpath(folder), TOP))


def main(paths_file: str) -> None:
    """Print all entries."""
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path or ".") != here]
    list_places()
    sys.path.insert(0, TOP)
    with open(paths_file, "rb") as file:
        names = find_new_names(os.fsdecode(file.read()).split("\0"))
    with open(os.path.join(here, ".inspect.names"), "rb") as file:
        names -= set(os.fsdecode(file.read()).split("\0"))
    if not names:
        return
    for name in sorted(names):
        write_entry("asked", name)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    recorder = Recorder()
    sys.meta_path.insert(0, recorder)
    load_runner()
    wanted = {name.partition(".")[0] for name in recorder.names} & names
    for name in sorted(wanted | find_imported(names)):
        write_entry("wanted", name)


if __name__ == "__main__":
    main(sys.argv[1])
    _OUTPUT.close()
