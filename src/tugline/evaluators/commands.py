"""Files that the programs of an evaluator's command read because of their names.

A build tool or a test runner prefers some names over others, or reads several. What a command runs
decides as much as a test does.
"""

import contextlib
import functools
import itertools
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath

from tugline.schema import read_values

_SUFFIXES = ("js", "cjs", "mjs", "ts", "cts", "mts", "json", "jsonc", "yaml", "yml", "toml")
_TOOLS: Mapping[str, Sequence[Sequence[str]]] = read_values(
    Path(__file__).with_name("patterns.toml")
)["tools"]


def find_siblings(path: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield the files that a tool would read with a path, or no more because of it."""
    for folder in (path, *path.parents[:-1]):
        for name in _list_siblings(folder.name):
            if name != path.name:
                yield folder.with_name(name)


@functools.lru_cache(maxsize=4096)
def _list_siblings(name: str) -> tuple[str, ...]:
    """Return the names of files of the same tool, which may find names in any case."""
    siblings: list[str] = []
    for names in _TOOLS["all"]:
        if any(fnmatchcase(name.lower(), each.lower()) for each in names):
            siblings += names
    for names in _TOOLS["first"]:
        lower = [each.lower() for each in names]
        if name.lower() in lower:
            siblings += names[names.index(name) if name in names else 0 :]
    suffixes = [(each, each.endswith(".*")) for each in dict.fromkeys(siblings)]
    return tuple(
        f"{each[:-1]}{suffix}" if several else each
        for each, several in suffixes
        for suffix in (_SUFFIXES if several else _SUFFIXES[:1])
    )


_RUNNERS = re.compile(
    r"(\S*/)?((ba|da|k|z)?sh|\.|source|python[\d.]*|py\.?test|node|deno|bun|bunx|npx|tsx|ts-node|ruby"
    r"|perl|php|lua|Rscript|julia|java|g?make|just|task|prove|bats|tox|nox|jest|vitest|mocha|ava|tap"
    r"|rspec|phpunit|cmake|ctest|meson|ninja|coverage)"
)
"""Programs that run the files in their arguments."""
_PREFIX = re.compile(
    r"!|\{|\w+=.*|-.*|\d+\w?|exec|env|time|timeout|nice|sudo|if|then|else|do|while"
)
_OPERATOR = re.compile(r"[();&|\n]+")


@functools.lru_cache(maxsize=256)
def find_named(command: tuple[str, ...], workdir: PurePath | None) -> frozenset[str]:
    """Return the paths that a command may run, also after a change of the folder."""
    arguments: list[str] = []
    folders = [""]
    for run in _split_commands(command):
        folders += [name for option, name in itertools.pairwise(run) if option in {"cd", "-C"}]
        start = next((n for n, word in enumerate(run) if not _PREFIX.fullmatch(word)), len(run))
        runner = next((n for n, word in enumerate(run) if _RUNNERS.fullmatch(word)), len(run))
        arguments += run[start : start + 1] + run[runner + 1 :]
    arguments += [word.partition("=")[2] for word in arguments]
    paths = (posixpath.normpath(posixpath.join(up, word)) for up in folders for word in arguments)
    return frozenset(path.removeprefix(f"{workdir}/") for path in paths)


def _split_commands(command: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments of each command in a list of arguments, also of texts for a shell."""
    yield list(command)
    for option, text in itertools.pairwise(command):
        if option in {"-c", "-ec", "-lc"}:
            lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
            lexer.whitespace = " \t\r"
            lexer.whitespace_split = True
            lexer.commenters = ""
            arguments: list[str] = []
            with contextlib.suppress(ValueError):  # a quote that is not closed
                arguments.extend(lexer)
            for operator, group in itertools.groupby(
                arguments, lambda w: bool(_OPERATOR.fullmatch(w))
            ):
                if not operator:
                    yield from _split_commands(list(group))
