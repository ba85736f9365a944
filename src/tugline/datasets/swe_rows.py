"""Rows of SWE task sets, which SWE-bench, SWE-Gym, SWE-rebench and R2E write differently.

Rows are foreign data, so an invalid one is an error that names its place, instance, field, value
and what would be right. Nothing is guessed: a row without a test command, of a repository that is
not in `TEST_COMMANDS`, is an error too. A row without an evaluation script gets one
(`make_eval_script`).
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from tugline.errors import ConfigError

TEST_COMMANDS: dict[str, tuple[str, str]] = {
    "bokeh/bokeh": ("pytest -rA -n0", "parse_log_pytest"),
    "conan-io/conan": ("pytest -n0 -rA", "parse_log_pytest"),
    "dask/dask": ("pytest -n0 -rA --color=no", "parse_log_pytest"),
    "facebookresearch/hydra": ("pytest -rA --tb=long", "parse_log_pytest"),
    "getmoto/moto": ("pytest -n0 -rA", "parse_log_pytest"),
    "iterative/dvc": ("pytest -rA", "parse_log_pytest"),
    "modin-project/modin": ("pytest -n0 -rA", "parse_log_pytest"),
    "pandas-dev/pandas": ("pytest -rA --tb=long", "parse_log_pytest"),
    "project-monai/monai": ("pytest -rA", "parse_log_pytest"),
    "pydantic/pydantic": (
        "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
        "parse_log_pytest_v2",
    ),
    "python/mypy": ("pytest -n0 -rA", "parse_log_pytest"),
}
"""Test commands and log parsers of SWE-Gym's repositories, which its rows do not have."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_R2E_TESTS = "/r2e_tests"
_R2E_COMMAND = (
    f"ln -sfn {_R2E_TESTS} r2e_tests; bash run_tests.sh 2>&1"
    # Rows name a test without its file, and with dots.
    r" | sed -E -e 's/\x1b\[[0-9;]*m//g' -e 's/^(PASSED|FAILED|ERROR) +[^ ]*\.py::/\1 /'"
    " -e '/^(PASSED|FAILED|ERROR) /s/::/./g'"
)


class SweRow(msgspec.Struct, frozen=True, kw_only=True):
    """One problem in a repository."""

    instance: str
    repo: str
    problem: str
    fail_to_pass: tuple[str, ...]
    """Tests that only a solution passes."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass before and must pass after."""
    hints: str = ""
    commit: str | None = None
    """The commit that the agent begins with; None: that of the image."""
    version: str = ""
    solution: str = ""
    """The reference patch."""
    test_patch: str = ""
    eval_script: str | None = None
    """The complete evaluation script; None: made of `test_command`."""
    test_command: str = ""
    log_parser: str = ""
    """A parser of the package `swebench`."""
    eval_type: str = "pass_and_fail"
    image: str | None = None
    own_command: bool = False
    """Whether the command names the tests by itself."""
    protected_files: tuple[str, ...] = ()
    """Files of tests besides those of `test_patch`."""
    hides: tuple[str, ...] = ()
    """Folders of the image that the agent must not see."""


def read_row(
    raw: object, where: str, *, test_command: str | None = None, log_parser: str | None = None
) -> SweRow:
    """Read a row of a dataset. Raises `ConfigError`.

    `test_command` and `log_parser` replace those of the row.
    """
    if not isinstance(raw, Mapping):
        msg = f"{where}: {reprlib.repr(raw)} is not a row; it must be an object with fields"
        raise ConfigError(msg)
    fields = _Fields(raw, where)
    if "expected_output_json" in raw:
        return _read_r2e(fields)
    repo = fields.text("repo")
    script = fields.text("eval_script", "") or None
    install = fields.mapping("install_config")
    known = TEST_COMMANDS.get(repo.lower(), ("", ""))
    command = test_command or fields.text("test_cmd", "") or _text(install, "test_cmd") or known[0]
    parser = log_parser or fields.text("log_parser", "") or _text(install, "log_parser") or known[1]
    if script is None and not command:
        fields.refuse(
            "test_cmd", "the command that runs its tests; or give eval_script, or test_command"
        )
    if not parser:
        fields.refuse("log_parser", "the name of a parser of swebench's")
    return SweRow(
        instance=fields.text("instance_id"),
        repo=repo,
        commit=fields.text("base_commit"),
        problem=fields.text("problem_statement"),
        hints=fields.text("hints_text", ""),
        version=str(raw.get("version") or ""),
        solution=fields.diff("patch"),
        test_patch=fields.diff("test_patch"),
        fail_to_pass=fields.names("FAIL_TO_PASS", needed=True),
        pass_to_pass=fields.names("PASS_TO_PASS"),
        eval_script=None if test_command else script,
        test_command=command,
        log_parser=parser,
        eval_type=fields.one_of("eval_type", ("pass_and_fail", "fail_only")),
        image=next(
            (fields.text(k) for k in ("image", "docker_image", "image_name") if raw.get(k)), None
        ),
    )


def _read_r2e(fields: _Fields) -> SweRow:
    """Read a row of R2E, whose tests are in the image beside the repository."""
    repo, commit = fields.text("repo_name"), fields.text("commit_hash")
    expected = fields.mapping("expected_output_json")
    plain = {_COLOUR.sub("", name).split(" - ")[0]: end for name, end in expected.items()}
    passing = tuple(name for name, end in plain.items() if name and end == "PASSED")
    if not passing:
        fields.refuse("expected_output_json", "an object of test names with PASSED among them")
    problem = fields.text("problem_statement")
    issue = _ISSUE.search(problem)
    return SweRow(
        instance=f"{repo}__{commit[:12]}",
        repo=repo,
        problem=(issue[1] if issue else problem).strip(),
        fail_to_pass=passing,
        test_command=_R2E_COMMAND,
        own_command=True,
        log_parser="parse_log_pytest_v2",
        image=fields.text("docker_image"),
        protected_files=("run_tests.sh", "r2e_tests"),
        hides=(_R2E_TESTS,),
    )


class _Fields:
    """Typed access to the fields of a row."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        name = raw.get("instance_id") or raw.get("commit_hash")
        self._raw = raw
        self._where = f"{where}, {name}" if isinstance(name, str) and name else where

    def refuse(self, field: str, right: str) -> NoReturn:
        """Raise `ConfigError` for a field."""
        msg = f"{self._where}: {field} is {reprlib.repr(self._raw.get(field))}, must be {right}"
        if self._raw.get(field) is None:
            msg = f"{self._where}: {field} is missing; it must be {right}"
        raise ConfigError(msg)

    def text(self, field: str, default: str | None = None) -> str:
        """Return a text, which is not empty unless there is a default."""
        value = self._raw.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value.strip() and default is None):
            self.refuse(field, "text")
        return value

    def diff(self, field: str) -> str:
        """Return a patch as git writes it; empty if there is none."""
        value = self.text(field, "")
        if value.strip() and not re.search(r"^(diff --git |--- )", value, re.MULTILINE):
            self.refuse(field, "a patch as `git diff` writes it")
        return value

    def one_of(self, field: str, known: tuple[str, ...]) -> str:
        """Return one of `known`; the first if the field is missing."""
        value = self.text(field, known[0])
        if value not in known:
            self.refuse(field, f"one of {', '.join(known)}")
        return value

    def names(self, field: str, *, needed: bool = False) -> tuple[str, ...]:
        """Return names of tests from a list, or from the JSON text of one."""
        value = self._decode(field, [])
        right = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if not right or (needed and not value):
            self.refuse(field, "a list of names of tests, or the JSON text of one")
        return tuple(value)

    def mapping(self, field: str) -> dict[str, Any]:
        """Return an object, or decode the JSON text of one."""
        value = self._decode(field, {})
        if not isinstance(value, dict):
            self.refuse(field, "an object, or the JSON text of one")
        return value

    def _decode(self, field: str, default: object) -> Any:
        value = self._raw.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            return list(value) if isinstance(value, tuple) else value
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value


def _text(mapping: Mapping[str, Any], key: str) -> str:
    value = mapping.get(key)
    return value if isinstance(value, str) else ""


# --------------------------------------------------------------------------- the script
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then set +u; "
    "source /opt/miniconda3/bin/activate; conda activate testbed; set -u; fi"
)
"""Activates the environment of SWE-bench's images."""
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


class PatchedFiles(NamedTuple):
    """The files that a patch changes."""

    before: tuple[str, ...]
    """Changed, removed and renamed files, by their old names."""
    after: tuple[str, ...]
    """Changed and added files, by their new names."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All names."""
        return tuple(dict.fromkeys((*self.before, *self.after)))


def list_files(diff: str) -> PatchedFiles:
    """List the files that a patch as git writes it changes."""
    before, after = [], []
    parts = _HEADER.split(diff)[1:]
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        path = _unquote(name).removeprefix("b/")
        head = body.partition("\n@@")[0]
        renamed = re.search(r"^rename from (.*)$", head, re.MULTILINE)
        if "\nnew file mode" not in head:
            before.append(_unquote(renamed[1]) if renamed else path)
        if "\ndeleted file mode" not in head:
            after.append(path)
    return PatchedFiles(tuple(before), tuple(after))


def _unquote(name: str) -> str:
    """Undo git's quoting of names that are not ASCII."""
    if not name.startswith('"'):
        return name
    data = name[1:-1].encode().decode("unicode_escape").encode("latin-1", errors="replace")
    return data.decode(errors="replace")


def make_eval_script(row: SweRow, folder: str, setup: Sequence[str] = ()) -> str:
    """Return a Bash script that runs a row's tests in `folder`.

    It has the shape of the scripts in SWE-bench's own rows, so that the package `swebench` can
    grade its output: test files are restored, the test patch is applied, the tests run between two
    marks. Nothing is installed, because evaluators have no network; `setup` lines run first.
    """
    files = list_files(row.test_patch)
    restore = f"git checkout {row.commit} -- {shlex.join(files.before)}" if files.before else ":"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        _CONDA,
        f"cd {shlex.quote(folder)}",
        f"git config --global --add safe.directory {shlex.quote(folder)}",
        *([_SETUP[row.repo]] if row.repo in _SETUP else []),
        *setup,
        restore,
        *_apply_patch(row.test_patch),
        f": '{START}'",
        _make_command(row, files),
        f": '{END}'",
        restore,
    ]
    return "\n".join(lines) + "\n"


def _apply_patch(patch: str) -> list[str]:
    if not patch.strip():
        return []
    end = f"EOF_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
    refused = "{ echo 'the test patch cannot be applied'; exit 1; }"
    return [f"git apply -v - <<'{end}' || {refused}", patch.rstrip("\n"), end]


def _make_command(row: SweRow, files: PatchedFiles) -> str:
    if row.own_command:
        return row.test_command
    cases = _MYPY_CASE.findall(row.test_patch) if row.repo == "python/mypy" else []
    if cases:
        return f"{row.test_command} -k {shlex.quote(' or '.join(cases))}"
    tests = (path for path in files.after if not path.endswith(_NO_TESTS))
    return f"{row.test_command} {shlex.join(tests)}".rstrip()
