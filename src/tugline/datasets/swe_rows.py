"""One row of a SWE task set, checked: SWE-bench, SWE-Gym, SWE-rebench and R2E name things apart.

Rows come from foreign files, so a wrong one is an error that names its place, its instance, the
field, the value and what would be right. Nothing is filled in by guessing: a row that does not say
how its tests are run, and is of no repository in `TEST_COMMANDS`, is an error too.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

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
"""How SWE-Gym, whose rows do not say it, tests its repositories, and who reads the output."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_R2E_TESTS = "/r2e_tests"
_R2E_COMMAND = (
    f"ln -sfn {_R2E_TESTS} r2e_tests; bash run_tests.sh 2>&1"
    # Its rows name a test without its file, and with dots.
    r" | sed -E -e 's/\x1b\[[0-9;]*m//g' -e 's/^(PASSED|FAILED|ERROR) +[^ ]*\.py::/\1 /'"
    " -e '/^(PASSED|FAILED|ERROR) /s/::/./g'"
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
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
    """What the agent begins with; None where only its image knows."""
    version: str = ""
    solution: str = ""
    """The reference patch."""
    test_patch: str = ""
    eval_script: str | None = None
    """How it is judged, complete; None: by `test_command`."""
    test_command: str = ""
    log_parser: str = ""
    """Name of a parser of the package `swebench`."""
    eval_type: str = "pass_and_fail"
    image: str | None = None
    own_command: bool = False
    """Whether the command names its tests itself."""
    protected_files: tuple[str, ...] = ()
    """Files of the repository that judge besides those of `test_patch`."""
    hides: tuple[str, ...] = ()
    """Folders of its image that the agent must not see."""


def read_row(
    raw: object, where: str, *, test_command: str | None = None, log_parser: str | None = None
) -> Row:
    """A row as it stands in a data set. Raises `ConfigError`.

    `test_command` and `log_parser` take the place of what the row says of them, or does not say.
    """
    if not isinstance(raw, Mapping):
        msg = f"{where}: {reprlib.repr(raw)} is no row; an object with fields is needed"
        raise ConfigError(msg)
    fields = _Fields(raw, where)
    if "expected_output_json" in raw:
        return _r2e(fields)
    repo = fields.text("repo")
    script = fields.text("eval_script", "") or None
    install = fields.mapping("install_config")
    known = TEST_COMMANDS.get(repo.lower(), ("", ""))
    command = test_command or fields.text("test_cmd", "") or _text(install, "test_cmd") or known[0]
    parser = log_parser or fields.text("log_parser", "") or _text(install, "log_parser") or known[1]
    if script is None and not command:
        fields.refuse("test_cmd", "what runs its tests; or give eval_script, or test_command")
    if not parser:
        fields.refuse("log_parser", "the name of a parser of swebench's")
    return Row(
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


def _r2e(fields: _Fields) -> Row:
    """Its tests lie in the image, beside the repository; its rows name how each must end."""
    repo, commit = fields.text("repo_name"), fields.text("commit_hash")
    told = fields.mapping("expected_output_json")
    plain = {_COLOUR.sub("", name).split(" - ")[0]: end for name, end in told.items()}
    passing = tuple(name for name, end in plain.items() if name and end == "PASSED")
    if not passing:
        fields.refuse("expected_output_json", "an object of test names with PASSED among them")
    problem = fields.text("problem_statement")
    issue = _ISSUE.search(problem)
    return Row(
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
    """A row's fields, each as what it must be."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        name = raw.get("instance_id") or raw.get("commit_hash")
        self._raw = raw
        self._where = f"{where}, {name}" if isinstance(name, str) and name else where

    def refuse(self, field: str, right: str) -> NoReturn:
        """Raises `ConfigError` for a field."""
        msg = f"{self._where}: {field} is {reprlib.repr(self._raw.get(field))}, must be {right}"
        if self._raw.get(field) is None:
            msg = f"{self._where}: {field} is missing; it must be {right}"
        raise ConfigError(msg)

    def text(self, field: str, default: str | None = None) -> str:
        """A text; not empty unless there is a default."""
        value = self._raw.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or (not value.strip() and default is None):
            self.refuse(field, "text")
        return value

    def diff(self, field: str) -> str:
        """A patch as git writes it, or nothing."""
        value = self.text(field, "")
        if value.strip() and not re.search(r"^(diff --git |--- )", value, re.MULTILINE):
            self.refuse(field, "a patch as `git diff` writes it")
        return value

    def one_of(self, field: str, known: tuple[str, ...]) -> str:
        """One of some words; the first where the row says nothing."""
        value = self.text(field, known[0])
        if value not in known:
            self.refuse(field, f"one of {', '.join(known)}")
        return value

    def names(self, field: str, *, needed: bool = False) -> tuple[str, ...]:
        """Names of tests: a list, or the JSON text of one."""
        value = self._decoded(field, [])
        right = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if not right or (needed and not value):
            self.refuse(field, "a list of names of tests, or the JSON text of one")
        return tuple(value)

    def mapping(self, field: str) -> dict[str, Any]:
        """An object, or the JSON text of one."""
        value = self._decoded(field, {})
        if not isinstance(value, dict):
            self.refuse(field, "an object, or the JSON text of one")
        return value

    def _decoded(self, field: str, default: object) -> Any:
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
