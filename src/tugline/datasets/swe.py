"""SWE task sets: an issue in a repository, and tests that check whether it is resolved.

Rows of SWE-bench (also Verified, Lite, Multilingual), SWE-Gym, SWE-rebench and R2E, from a file or
the Hugging Face hub, are evaluated by `swebench`. Rows are external data: an invalid row is an
error that names its location, instance, field, value and the expected value; nothing is guessed.
For a row without an evaluation script, one is generated (`make_eval_script`).

The agent must not have the row's tests, its reference patch, or later commits of the repository.
None of these is in the task's workspace or instruction; runtimes remove the history after the
workspace's commit.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from tugline.datasets.base import SPLIT, Solution, TaskSet, TaskTemplate
from tugline.datasets.rows import RowSource
from tugline.datasets.swe_rows import TEST_COMMANDS, SweRow, read_row
from tugline.errors import ConfigError
from tugline.types import INSTANCE, PluginSpec, Task, Workspace

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
