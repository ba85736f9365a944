"""SWE task sets: an issue in a repository, and tests that check whether it is resolved.

Rows of SWE-bench (also Verified, Lite, Multilingual), SWE-Gym, SWE-rebench and R2E, from a file or
the Hugging Face hub, are evaluated by `swebench`. Rows are external data: an invalid row is an
error that names its location, instance, field, value and the expected value; nothing is guessed.
For a row without an evaluation script, one is generated (`make_eval_script`).

The agent must not have the row's tests, its reference patch, or later commits of the repository.
None of these is in the task's workspace or instruction; runtimes remove the history after the
workspace's commit.
"""

import contextlib
import hashlib
import re
import reprlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from tugline.datasets.base import INSTANCE, SPLIT, Solution, TaskSet, TaskTemplate
from tugline.datasets.rows import RowSource
from tugline.errors import ConfigError
from tugline.schema import decode, read_values
from tugline.types import PluginSpec, Task, Workspace

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
        msg = f"{where}: expected_output_json is {reprlib.repr(expected)}, must have PASSED tests"
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


# --------------------------------------------------------------------------- the script
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_SCRIPT = Path(__file__).with_name("swe_eval.sh").read_text(encoding="utf-8")
_NO_TESTS = (
    ".json", ".yml", ".yaml", ".toml", ".csv", ".pkl", ".txt", ".md", ".png", ".jpg", ".jpeg",
)  # fmt: skip
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
    """List the files that a patch in git's format changes."""
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

    It has the structure of the scripts in SWE-bench's rows, so that the package `swebench` can
    grade its output: test files are restored, the test patch is applied, the tests run between two
    marker lines. Nothing is installed, because evaluators have no network; `setup` lines run first.
    """
    files = list_files(row.test_patch)
    restore = f"git checkout {row.commit} -- {shlex.join(files.before)}" if files.before else ":"
    own = [_SETUP[row.repo]] if row.repo in _SETUP else []
    return _SCRIPT.format(
        folder=shlex.quote(folder),
        setup="".join(f"{line}\n" for line in (*own, *setup)),
        restore=restore,
        patch=_apply_patch(row.test_patch),
        command=_make_command(row, files),
    )


def _apply_patch(patch: str) -> str:
    if not patch.strip():
        return ""
    text = patch.rstrip("\n")
    delimiter = f"EOF_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
    on_failure = "{ echo 'the test patch cannot be applied'; exit 1; }"
    return f"git apply -v - <<'{delimiter}' || {on_failure}\n{text}\n{delimiter}\n"


def _make_command(row: SweRow, files: PatchedFiles) -> str:
    if row.own_command:
        return row.test_command
    cases = _MYPY_CASE.findall(row.test_patch) if row.repo == "python/mypy" else []
    if cases:
        return f"{row.test_command} -k {shlex.quote(' or '.join(cases))}"
    tests = (path for path in files.after if not path.endswith(_NO_TESTS))
    return f"{row.test_command} {shlex.join(tests)}".rstrip()


# --------------------------------------------------------------------------- the task set
IMAGES = {
    "swebench": "docker.io/swebench/sweb.eval.x86_64.{instance_1776}:latest",
    "swe-gym": "docker.io/xingyaoww/sweb.eval.x86_64.{instance_s}:latest",
}
"""Names of published images, by publisher."""
PROMPT = Path(__file__).with_name("swe_prompt.txt").read_text(encoding="utf-8")
_IMAGE_PLACEHOLDERS = ("instance_id", "instance_1776", "instance_s", "repo")
_REPO_PLACEHOLDERS = ("instance_id", "repo")
_PROMPT_PLACEHOLDERS = ("problem_statement", "hints_text", "repo", "path", "instance_id")
_PATCH = "solution.patch"
_LIMITS = {"init_s": 1200.0, "eval_s": 3660.0}
"""Default limits. Images are large; tests take long and may run again without the agent's work."""


@dataclass(kw_only=True, eq=False)
class SweTaskSet(RowSource, TaskSet):
    """Task set of rows from `path` (.jsonl, .json, .csv, .parquet) or the hub's `dataset`.

    `images` is `swebench`, `swe-gym` or an image name with {instance_id} in it; default: the row's
    image, or a published one by repository. `repos` takes the files from a git repository instead
    of the image: a URL, or a path relative to the folder of the rows, with {repo} in it; without
    `images`, no image is used then. `prompt` is the instruction, `folder` the repository's path in
    the sandbox. `test_command` and `log_parser` replace those of the rows; `setup` are lines of
    Bash that run before the tests. `partial`, `protected` and `network` are evaluator options.
    """

    images: str | None = None
    repos: str | None = None
    folder: Annotated[str, msgspec.Meta(pattern="^/")] = "/testbed"
    prompt: str = PROMPT
    test_command: str | None = None
    log_parser: str | None = None
    setup: Sequence[str] = ()
    partial: bool = False
    protected: Sequence[str] = ()
    network: bool = False

    def __post_init__(self) -> None:
        self.check("swe")
        self._images = IMAGES.get(self.images, self.images) if self.images else None
        self._repos = _resolve(self.path, self.repos) if self.repos is not None else None
        _check_placeholders("images", self._images or "", _IMAGE_PLACEHOLDERS)
        _check_placeholders("repos", self.repos or "", _REPO_PLACEHOLDERS)
        _check_placeholders("prompt", self.prompt, _PROMPT_PLACEHOLDERS)

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Make a task from each row."""
        for row, split in self._read_rows():
            values = self._find_values(row)
            workspace = self._make_workspace(row, values)
            yield template.make(
                row.instance,
                self.prompt.format(**values),
                evaluator=self._make_evaluator(row),
                runtime=PluginSpec("container") if workspace.image else None,
                workspace=workspace,
                limits=_LIMITS,
                tags={"repo": row.repo} | ({SPLIT: split} if split else {}),
            )

    def solution(self, task: Task) -> Solution | None:
        """Return the reference patch; None if the row has none, as in R2E."""
        patch = self._solutions.get(task.tags.get(INSTANCE, ""))
        if not patch:
            return None
        apply = f'git -c safe.directory=* apply -v "$HOME/{_PATCH}"'
        return Solution(
            home={_PATCH: patch if patch.endswith("\n") else f"{patch}\n"}, argv=("sh", "-c", apply)
        )

    @cached_property
    def _solutions(self) -> dict[str, str]:
        """Reference patches by instance."""
        return {row.instance: row.solution for row, _ in self._read_rows()}

    def _read_rows(self) -> Iterator[tuple[SweRow, str | None]]:
        for where, raw, split in self.rows():
            yield read_row(raw, where, self.test_command, self.log_parser), split

    def _find_values(self, row: SweRow) -> dict[str, str]:
        """Return the values of placeholders."""
        name = row.instance.lower()
        return {
            "instance_id": row.instance,
            "instance_1776": name.replace("__", "_1776_"),
            "instance_s": name.replace("__", "_s_"),
            "repo": row.repo,
            "path": self.folder,
            "problem_statement": row.problem.strip(),
            "hints_text": row.hints.strip(),
        }

    def _make_workspace(self, row: SweRow, values: Mapping[str, str]) -> Workspace:
        image = self._select_image(row, values)
        repo = self._repos.format(**values) if self._repos else None
        commit = row.commit or (None if repo else "HEAD")
        return Workspace(image=image, repo=repo, commit=commit, path=self.folder)

    def _select_image(self, row: SweRow, values: Mapping[str, str]) -> str | None:
        if self._images is None and (row.image or self._repos):
            return None if self._repos else row.image
        published = "swe-gym" if row.repo.lower() in TEST_COMMANDS else "swebench"
        return (self._images or IMAGES[published]).format(**values)

    def _make_evaluator(self, row: SweRow) -> PluginSpec:
        script = row.eval_script or make_eval_script(row, self.folder, self.setup)
        options = {
            "instance": row.instance,
            "repo": row.repo,
            "version": str(row.version),
            "eval_script": script,
            "log_parser": row.log_parser,
            "eval_type": row.eval_type,
            "fail_to_pass": list(row.fail_to_pass),
            "pass_to_pass": list(row.pass_to_pass),
            "protected_files": [*list_files(row.test_patch).paths, *row.protected_files],
            "editable": list(list_files(row.solution).paths),
            "hides": list(row.hides),
            "partial": self.partial,
            "protected": list(self.protected),
            "network": self.network,
        }
        return PluginSpec("swebench", options)


def _check_placeholders(option: str, text: str, choices: Sequence[str]) -> None:
    """Check that a text has only known placeholders. Raises `ConfigError`."""
    try:
        text.format(**dict.fromkeys(choices, ""))
    except (ValueError, LookupError, AttributeError) as error:
        valid = f"a text that contains {', '.join(f'{{{word}}}' for word in choices)}"
        raise ConfigError(f"taskset 'swe': {option} is {text!r:.200}, must be {valid}") from error


def _resolve(rows: str | None, repos: str) -> str:
    """Resolve a path relative to the folder of the rows; return a URL unchanged."""
    local = rows is not None and "://" not in repos and ":" not in repos.partition("/")[0]
    return str(Path(rows or "").parent / repos) if local else repos
