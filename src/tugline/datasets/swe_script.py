"""The script that judges a row which brings none: test files put back, the tests run. Pure.

It has the shape of the scripts that SWE-bench's own rows bring, so that the package `swebench`
can grade what it prints. Nothing is installed: images of these task sets have it installed, and
judges have no network. What must run before the tests is the user's to say (`setup`).
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from tugline.datasets.swe_rows import Row

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then set +u; "
    "source /opt/miniconda3/bin/activate; conda activate testbed; set -u; fi"
)
"""Where SWE-bench's images keep what the repository needs."""
_NO_TESTS = (
    ".json",
    ".png",
    ".csv",
    ".txt",
    ".md",
    ".jpg",
    ".jpeg",
    ".pkl",
    ".yml",
    ".yaml",
    ".toml",
)
_SETUP = {"conan-io/conan": "export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"}
_HEADER = re.compile(r"^diff --git .* (b/.*|\"b/.*\")$", re.MULTILINE)
_MYPY_CASE = re.compile(r"^\+?\s*\[case ([^\]\s]+)\]", re.MULTILINE)


class Touched(NamedTuple):
    """The files of a patch."""

    before: tuple[str, ...]
    """Those that it changes, takes away or renames, by their old names."""
    after: tuple[str, ...]
    """Those that it changes or makes, by their new names."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All names."""
        return tuple(dict.fromkeys((*self.before, *self.after)))


def touched(diff: str) -> Touched:
    """The files that a patch of git's changes."""
    before, after = [], []
    parts = _HEADER.split(diff)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        path = _plain(name).removeprefix("b/")
        head = body.partition("\n@@")[0]
        renamed = re.search(r"^rename from (.*)$", head, re.MULTILINE)
        if "\nnew file mode" not in head:
            before.append(_plain(renamed[1]) if renamed else path)
        if "\ndeleted file mode" not in head:
            after.append(path)
    return Touched(tuple(before), tuple(after))


def _plain(name: str) -> str:
    """A name as it is: git quotes what is not ASCII."""
    if not name.startswith('"'):
        return name
    data = name[1:-1].encode().decode("unicode_escape").encode("latin-1", errors="replace")
    return data.decode(errors="replace")


def eval_script(row: Row, folder: str, setup: Sequence[str] = ()) -> str:
    """Bash that runs a row's tests in `folder`, between the marks that its log is read by."""
    files = touched(row.test_patch)
    back = f"git checkout {row.commit} -- {shlex.join(files.before)}" if files.before else ":"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        _CONDA,
        f"cd {shlex.quote(folder)}",
        f"git config --global --add safe.directory {shlex.quote(folder)}",
        *([_SETUP[row.repo]] if row.repo in _SETUP else []),
        *setup,
        back,
        *_laid(row.test_patch),
        f": '{START}'",
        _command(row, files),
        f": '{END}'",
        back,
    ]
    return "\n".join(lines) + "\n"


def _laid(patch: str) -> list[str]:
    if not patch.strip():
        return []
    end = f"EOF_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
    refused = "{ echo 'the test patch cannot be applied'; exit 1; }"
    return [f"git apply -v - <<'{end}' || {refused}", patch.rstrip("\n"), end]


def _command(row: Row, files: Touched) -> str:
    if row.own_command:
        return row.test_command
    cases = _MYPY_CASE.findall(row.test_patch) if row.repo == "python/mypy" else []
    if cases:
        return f"{row.test_command} -k {shlex.quote(' or '.join(cases))}"
    tests = (path for path in files.after if not path.endswith(_NO_TESTS))
    return f"{row.test_command} {shlex.join(tests)}".rstrip()
