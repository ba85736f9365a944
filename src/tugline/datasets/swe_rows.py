"""Rows of SWE task sets as they are published, and what they say in one form.

Rows of SWE-bench (also Verified, Lite, Multilingual), SWE-Gym, SWE-rebench and R2E. They are
external data: an invalid row is an error that names its location, instance, field, value and the
expected value; nothing is guessed.
"""

import contextlib
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tugline.errors import ConfigError
from tugline.schema import decode, read_values

T = TypeVar("T", bound=msgspec.Struct)

TEST_COMMANDS: dict[str, tuple[str, str]] = read_values(Path(__file__).with_name("swe_gym.toml"))
"""Test commands and log parsers by repository for SWE-Gym, whose rows have neither."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_R2E_TESTS = "/r2e_tests"
_R2E_COMMAND = (
    f"ln -sfn {_R2E_TESTS} r2e_tests; bash run_tests.sh 2>&1"
    # Rows name tests without their file, and with dots.
    r" | sed -E -e 's/\x1b\[[0-9;]*m//g' -e 's/^(PASSED|FAILED|ERROR) +[^ ]*\.py::/\1 /'"
    " -e '/^(PASSED|FAILED|ERROR) /s/::/./g'"
)
Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


class SweRow(msgspec.Struct, frozen=True, kw_only=True):
    """A problem in a repository; fields are named as in SWE-bench's rows."""

    instance: Text = msgspec.field(name="instance_id")
    repo: Text
    problem: Text = msgspec.field(name="problem_statement")
    fail_to_pass: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = msgspec.field(
        name="FAIL_TO_PASS"
    )
    """Tests that only a solution passes."""
    pass_to_pass: tuple[str, ...] = msgspec.field(name="PASS_TO_PASS", default=())
    """Tests that pass before the solution and must pass after it."""
    hints: str = msgspec.field(name="hints_text", default="")
    commit: Text | None = msgspec.field(name="base_commit", default=None)
    """Commit that the agent starts from; None: that of the image."""
    version: str | float = ""
    solution: str = msgspec.field(name="patch", default="")
    """The reference patch."""
    test_patch: str = ""
    eval_script: str = ""
    """Complete evaluation script; empty: generated from `test_command`."""
    test_command: str = msgspec.field(name="test_cmd", default="")
    log_parser: str = ""
    """Name of a parser of the package `swebench`."""
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    image: str = ""
    own_command: bool = False
    """Whether the command selects the tests itself; else test files are appended."""
    protected_files: tuple[str, ...] = ()
    """Test files in addition to those of `test_patch`."""
    hides: tuple[str, ...] = ()
    """Folders of the image that the agent must not see."""


_AS_JSON = ("FAIL_TO_PASS", "PASS_TO_PASS", "install_config", "expected_output_json")
"""Fields that may be JSON text, because some tables cannot hold lists or objects."""


class _BenchRow(SweRow, frozen=True, kw_only=True):
    """Further fields of SWE-bench, SWE-Gym and SWE-rebench."""

    commit: Text = msgspec.field(name="base_commit")
    install_config: dict[str, Any] = {}
    docker_image: str = ""
    image_name: str = ""

    def __post_init__(self) -> None:
        for name, diff in (("patch", self.solution), ("test_patch", self.test_patch)):
            if diff.strip() and not re.search(r"^(diff --git |--- )", diff, re.MULTILINE):
                msg = f"{name} is {diff!r:.200}, must be a patch in the format of `git diff`"
                raise ConfigError(msg, name)


class _R2eRow(msgspec.Struct, kw_only=True):
    """Fields of R2E; its tests are in the image, outside the repository."""

    repo_name: Text
    commit_hash: Text
    problem_statement: Text
    docker_image: Text
    expected_output_json: dict[str, str]


def read_row(
    raw: Mapping[str, Any], where: str, test_command: str | None, log_parser: str | None
) -> SweRow:
    """Read a row of a dataset. Raises `ConfigError`.

    `test_command` and `log_parser` replace those of the row.
    """
    name = raw.get("instance_id") or raw.get("commit_hash")
    where = f"{where}, {name}" if isinstance(name, str) and name else where
    if "expected_output_json" in raw:
        return _convert_r2e(_decode(raw, _R2eRow, where), where)
    row = _decode(raw, _BenchRow, where)
    install = row.install_config
    known = TEST_COMMANDS.get(row.repo.lower(), ("", ""))
    command = test_command or row.test_command or install.get("test_cmd") or known[0]
    parser = log_parser or row.log_parser or install.get("log_parser") or known[1]
    if not (row.eval_script or command):
        msg = f"{where}: test_cmd is missing; set it, eval_script, or the option test_command"
        raise ConfigError(msg)
    if not parser:
        msg = f"{where}: log_parser is missing; it must name a parser of the package swebench"
        raise ConfigError(msg)
    return msgspec.structs.replace(
        row,
        eval_script="" if test_command else row.eval_script,
        test_command=command,
        log_parser=parser,
        image=row.image or row.docker_image or row.image_name,
    )


def _convert_r2e(row: _R2eRow, where: str) -> SweRow:
    expected = row.expected_output_json
    plain = {_COLOUR.sub("", name).split(" - ")[0]: end for name, end in expected.items()}
    passing = tuple(name for name, end in plain.items() if name and end == "PASSED")
    if not passing:
        msg = (
            f"{where}: expected_output_json is {reprlib.repr(expected)}, must contain PASSED tests"
        )
        raise ConfigError(msg)
    issue = _ISSUE.search(row.problem_statement)
    return SweRow(
        instance=f"{row.repo_name}__{row.commit_hash[:12]}",
        repo=row.repo_name,
        problem=(issue[1] if issue else row.problem_statement).strip(),
        fail_to_pass=passing,
        test_command=_R2E_COMMAND,
        own_command=True,
        log_parser="parse_log_pytest_v2",
        image=row.docker_image,
        protected_files=("run_tests.sh", "r2e_tests"),
        hides=(_R2E_TESTS,),
    )


def _decode(raw: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Decode the known fields that have a value. Raises `ConfigError`."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    values = {name: raw[name] for name in raw if name in known and raw[name] is not None}
    for name in values.keys() & _AS_JSON:
        if isinstance(values[name], str):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                values[name] = msgspec.json.decode(values[name])
    return decode(values, kind, source=where)
