"""SWE task sets: an issue in a repository, and tests that tell whether it is resolved.

Rows of SWE-bench (also Verified, Lite, Multilingual), SWE-Gym, SWE-rebench and R2E, from a file or
the Hugging Face hub (`swe_rows`), are evaluated by `swebench`.

The agent must not have the row's tests, its reference patch, or later commits of the repository.
None of it is in the task's workspace or instruction; runtimes keep no history beyond the commit
that a workspace begins with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from tugline.datasets import swe_rows
from tugline.datasets.base import INSTANCE, SPLIT, Solution, TaskSet, TaskTemplate
from tugline.datasets.rows import RowSource
from tugline.errors import ConfigError
from tugline.types import PluginSpec, Task, Workspace

IMAGES = {
    "swebench": "docker.io/swebench/sweb.eval.x86_64.{instance_1776}:latest",
    "swe-gym": "docker.io/xingyaoww/sweb.eval.x86_64.{instance_s}:latest",
}
"""Names of published images, by publisher."""
PROMPT = Path(__file__).with_name("swe_prompt.txt").read_text(encoding="utf-8")
_IMAGE_WORDS = ("instance_id", "instance_1776", "instance_s", "repo")
_REPO_WORDS = ("instance_id", "repo")
_PROMPT_WORDS = ("problem_statement", "hints_text", "repo", "path", "instance_id")
_PATCH = "solution.patch"
_LIMITS = {"init_s": 1200.0, "eval_s": 3660.0}
"""Images are large. The tests of a repository take long, and are run once more without the agent's
work if they give no result."""


@dataclass(kw_only=True, eq=False)
class SweTaskSet(RowSource, TaskSet):
    """`path` is a .jsonl, .json, .csv or .parquet file, `dataset` one of the Hugging Face hub.

    `images` is `swebench`, `swe-gym` or a name with {instance_id} in it; the default is that of
    the row, or depends on its repository. `repos` takes the files from a git repository in place
    of the image's own: a URL, or a path relative to that of the rows, with {repo} in it; without
    `images` none is needed then.
    `prompt` is the instruction, `folder` where the repository is for the agent. `test_command` and
    `log_parser` replace what rows say or leave out; `setup` are lines of bash before the tests.
    `partial`, `protected` and `network` are those of the evaluator.
    """

    images: str | None = None
    repos: str | None = None
    folder: Annotated[str, Meta(pattern="^/")] = "/testbed"
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
        _check_words("images", self._images or "", _IMAGE_WORDS)
        _check_words("repos", self.repos or "", _REPO_WORDS)
        _check_words("prompt", self.prompt, _PROMPT_WORDS)

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Make a task of each row."""
        for row, split in self._read_rows():
            image = self._select_image(row)
            yield template.make(
                row.instance,
                self._make_instruction(row),
                evaluator=self._make_evaluator(row),
                runtime=PluginSpec("container") if image else None,
                workspace=self._make_workspace(row, image),
                limits=_LIMITS,
                tags={"repo": row.repo} | ({SPLIT: split} if split else {}),
            )

    def solution(self, task: Task) -> Solution | None:
        """The reference patch; None where a row has none, such as those of R2E."""
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

    def _read_rows(self) -> Iterator[tuple[swe_rows.SweRow, str | None]]:
        for where, raw, split in self.rows():
            yield swe_rows.read_row(raw, where, self.test_command, self.log_parser), split

    def _make_instruction(self, row: swe_rows.SweRow) -> str:
        return self.prompt.format(
            problem_statement=row.problem.strip(),
            hints_text=row.hints.strip(),
            repo=row.repo,
            path=self.folder,
            instance_id=row.instance,
        )

    def _select_image(self, row: swe_rows.SweRow) -> str | None:
        if self._images is None and (row.image or self._repos):
            return None if self._repos else row.image
        published = "swe-gym" if row.repo.lower() in swe_rows.TEST_COMMANDS else "swebench"
        name = row.instance.lower()
        return (self._images or IMAGES[published]).format(
            instance_id=row.instance,
            instance_1776=name.replace("__", "_1776_"),
            instance_s=name.replace("__", "_s_"),
            repo=row.repo,
        )

    def _make_workspace(self, row: swe_rows.SweRow, image: str | None) -> Workspace:
        if self._repos is None:
            return Workspace(image=image, commit=row.commit or "HEAD", path=self.folder)
        repo = self._repos.format(instance_id=row.instance, repo=row.repo)
        return Workspace(image=image, repo=repo, commit=row.commit, path=self.folder)

    def _make_evaluator(self, row: swe_rows.SweRow) -> PluginSpec:
        script = row.eval_script or swe_rows.make_eval_script(row, self.folder, self.setup)
        options = {
            "instance": row.instance,
            "repo": row.repo,
            "version": str(row.version),
            "eval_script": script,
            "log_parser": row.log_parser,
            "eval_type": row.eval_type,
            "fail_to_pass": list(row.fail_to_pass),
            "pass_to_pass": list(row.pass_to_pass),
            "protected_files": [*swe_rows.list_files(row.test_patch).paths, *row.protected_files],
            "editable": list(swe_rows.list_files(row.solution).paths),
            "hides": list(row.hides),
            "partial": self.partial,
            "protected": list(self.protected),
            "network": self.network,
        }
        return PluginSpec("swebench", options)


def _check_words(option: str, text: str, choices: Sequence[str]) -> None:
    """Raises `ConfigError` for unknown words in braces."""
    try:
        text.format(**dict.fromkeys(choices, ""))
    except (ValueError, LookupError, AttributeError) as error:
        right = f"text with {', '.join(f'{{{word}}}' for word in choices)} in it"
        raise ConfigError(f"taskset 'swe': {option} is {text!r:.200}, must be {right}") from error


def _resolve(rows: str | None, repos: str) -> str:
    """Return a path relative to the folder of the rows; a URL unchanged."""
    local = rows is not None and "://" not in repos and ":" not in repos.partition("/")[0]
    return str(Path(rows or "").parent / repos) if local else repos
