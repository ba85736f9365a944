"""SWE rows as the public data sets have them: what becomes a task, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from swe_toy import make, tasks, written
from tugline import plugins
from tugline.datasets.base import TaskSet
from tugline.datasets.swe import END, START, SweTaskSet, list_files
from tugline.errors import ConfigError
from tugline.evaluators.swebench import SweBenchEvaluator
from tugline.schema import read_values
from tugline.types import PluginSpec

ROWS = read_values(Path(__file__).with_name("rows.yaml"))
GYM, BENCH, REBENCH, MYPY, R2E = (ROWS[name] for name in ("gym", "bench", "rebench", "mypy", "r2e"))
NO_COMMAND = {"test_command": "make test", "log_parser": "parse_log_pytest"}
"""What a data set lacks, said for all rows."""


def one(path: Path, row: object, **options: Any) -> Any:
    """The task of a row."""
    (task,) = tasks(SweTaskSet(path=written(path / "rows.jsonl", row), **options))
    return task


def test_a_row_of_swe_gym(tmp_path: Path) -> None:
    """Its image, its repository's test command, and a script that runs the right test files."""
    task = one(tmp_path, GYM)
    assert task.id == task.tags["instance"] == "getmoto__moto-5752"
    assert task.tags["repo"] == "getmoto/moto"
    assert (task.workspace.path, task.workspace.commit) == ("/testbed", GYM["base_commit"])
    assert task.runtime == PluginSpec("container")
    assert (task.limits.init_s, task.limits.eval_s) == (1200, 3660)
    assert "describe_parameters breaks" in task.instruction
    assert "/testbed" in task.instruction
    options = task.evaluator.options
    assert options["fail_to_pass"] == ["tests/test_a.py::test_new"]
    assert options["log_parser"] == "parse_log_pytest"
    script = options["eval_script"]
    back = "git checkout b2300f1eae1323e3e8bc45f97e530ce129dff12e -- "
    assert script.count(f"{back}tests/test_a.py tests/old.py tests/here.py\n") == 2
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("row", "options", "command"),
    [
        (GYM, {}, "pytest -n0 -rA tests/test_a.py tests/there.py"),
        (REBENCH, {}, "pytest -rA --tb=no tests/test_a.py tests/there.py"),
        (MYPY, {}, "pytest -n0 -rA -k 'testNew or testOther'"),
        (GYM | {"repo": "x/y"}, NO_COMMAND, "make test tests/test_a.py tests/there.py"),
    ],
    ids=["swe-gym", "swe-rebench", "cases of mypy", "options"],
)
def test_the_tests_are_run_by_the_right_command(
    tmp_path: Path, row: dict[str, Any], options: dict[str, str], command: str
) -> None:
    """The row's own, its repository's or the option's, with the test files or cases of the row."""
    script = one(tmp_path, row, **options).evaluator.options["eval_script"]
    assert script.split(f": '{START}'\n")[1].split(f": '{END}'\n")[0] == f"{command}\n"


@pytest.mark.parametrize(
    ("row", "options", "image", "repo"),
    [
        (GYM, {}, "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest", None),
        (BENCH, {}, "swebench/sweb.eval.x86_64.psf_1776_requests-1921:latest", None),
        (REBENCH, {}, "swerebench/sweb.eval.x86_64.a_1776_b-1", None),
        (
            GYM,
            {"images": "swebench"},
            "docker.io/swebench/sweb.eval.x86_64.getmoto_1776_moto-5752:latest",
            None,
        ),
        (GYM, {"images": "mine/{instance_id}:2"}, "mine/getmoto__moto-5752:2", None),
        (GYM, {"repos": "{repo}.git"}, None, "{folder}/getmoto/moto.git"),
        (
            GYM,
            {"repos": "https://example.org/{repo}", "images": "i"},
            "i",
            "https://example.org/getmoto/moto",
        ),
    ],
)
def test_files_come_from_an_image_or_a_repository(
    tmp_path: Path,
    row: dict[str, Any],
    options: dict[str, str],
    image: str | None,
    repo: str | None,
) -> None:
    """The image that the row names, a publisher's or one of one's own, or `repos` and none."""
    task = one(tmp_path, row, **options, folder="/code")
    space = task.workspace
    assert (space.image, space.repo) == (image, repo and repo.format(folder=tmp_path))
    assert (space.commit, space.path) == (GYM["base_commit"], "/code")
    assert task.runtime == PluginSpec("container" if image else "auto")


def test_what_judges_is_not_the_agents(tmp_path: Path) -> None:
    """It is told of none. Names of the test patch judge, those of the reference may change."""
    task = one(tmp_path, GYM)
    assert not task.files
    assert not [one for one in ("test_new", "setup.cfg", "look at ssm") if one in task.instruction]
    options = task.evaluator.options
    names = ["test_a.py", "old.py", "here.py", "data.json", "there.py"]
    assert options["protected_files"] == [f"tests/{name}" for name in names]
    assert options["editable"] == ["setup.cfg"]
    assert SweBenchEvaluator(**options)


def test_a_row_of_swe_bench_brings_its_script(tmp_path: Path) -> None:
    """Script and parser are the row's; lists may be JSON text."""
    options = one(tmp_path, BENCH).evaluator.options
    assert options["eval_script"] == BENCH["eval_script"]
    assert options["log_parser"] == "parse_log_pytest_options"
    assert options["pass_to_pass"] == ["t::b", "t::c"]


def test_a_row_of_r2e(tmp_path: Path) -> None:
    """Its tests lie in the image: they are hidden from the agent, and their runner judges."""
    task = one(tmp_path, R2E)
    options = task.evaluator.options
    assert task.id == "orange3__0123456789ab"
    assert task.workspace.image == "namanjain12/orange3_final:1"
    assert task.workspace.commit == "HEAD"
    assert options["fail_to_pass"] == ["TestA.test_one", "TestA.test_two"]
    assert options["hides"] == ["/r2e_tests"]
    assert "run_tests.sh" in options["protected_files"]
    assert "**Title** it breaks" in task.instruction
    assert "[ISSUE]" not in task.instruction
    assert SweBenchEvaluator(**options).hidden(task) == ("/r2e_tests",)


def test_names_of_r2e_are_read_from_pytests_summary(tmp_path: Path) -> None:
    """What its script prints has the names of its rows."""
    script = one(tmp_path, R2E).evaluator.options["eval_script"]
    command = script.split(f": '{START}'\n")[1].split("\n")[0]
    said = (
        "\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestA::test_one[a/b c]\x1b[0m\n"
        "FAILED r2e_tests/test_1.py::test_two - assert 1 == 2\n"
    )
    argv = ("bash", "-c", command.partition("| ")[2])
    done = subprocess.run(argv, input=said, capture_output=True, text=True, check=True)
    assert done.stdout == "PASSED TestA.test_one[a/b c]\nFAILED test_two - assert 1 == 2\n"


def test_the_reference_solution(tmp_path: Path) -> None:
    """A task's reference patch, applied by git; none where the row has none."""
    rows = make(tmp_path)
    taskset = SweTaskSet(path=str(tmp_path / "rows.jsonl"), repos="{repo}")
    found = tasks(taskset)
    solution = taskset.solution(found[1])
    assert solution is not None
    assert solution.home == {"solution.patch": rows[1]["patch"]}
    assert solution.argv[-1].endswith('apply -v "$HOME/solution.patch"')
    r2e = SweTaskSet(path=written(tmp_path / "r2e.jsonl", R2E))
    assert r2e.solution(tasks(r2e)[0]) is None


BAD = [
    ({"instance_id": 3}, r"rows\.jsonl, line 1: instance_id is 3, must be a string"),
    ({"base_commit": None}, r"line 1, getmoto__moto-5752: base_commit is missing"),
    ({"problem_statement": " "}, r"problem_statement is ' ', must be a string"),
    ({"FAIL_TO_PASS": []}, r"FAIL_TO_PASS is \[\], must be a list of length >= 1"),
    ({"FAIL_TO_PASS": "test_a"}, r"FAIL_TO_PASS is 'test_a', must be a list"),
    ({"PASS_TO_PASS": [1]}, r"PASS_TO_PASS\.0 is 1, must be a string"),
    ({"test_patch": "+ x"}, r"test_patch is '\+ x', must be a patch as `git diff` writes it"),
    ({"patch": 1}, r"patch is 1, must be a string"),
    ({"repo": "x/y"}, r"test_cmd is missing; give it, eval_script, or the option test_command"),
    ({"repo": "x/y", "test_cmd": "pytest"}, r"log_parser is missing; it must be the name of a"),
    ({"install_config": "["}, r"install_config is '\[', must be an object"),
    ({"eval_type": "all"}, r"eval_type is 'all', must be one of fail_only, pass_and_fail"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), BAD, ids=[next(reversed(w)) + str(n) for n, (w, _) in enumerate(BAD)]
)
def test_a_bad_row_is_told_by_its_place(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """File, line, instance, field, value and what would be right."""
    with pytest.raises(ConfigError, match=message):
        one(tmp_path, GYM | wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{issue}"}, r"prompt is '\{issue\}', must be text with \{problem_statement\}"),
        ({"images": "x/{id}"}, r"images is 'x/\{id\}', must be text with \{instance_id\}"),
        ({"repos": "{"}, r"repos is '.*\{', must be text with"),
        ({"folder": "testbed"}, r"folder is 'testbed', must be a string matching regex '\^/'"),
        ({"path": None}, "give either path or dataset"),
    ],
)
def test_a_bad_option_is_told(options: dict[str, Any], message: str) -> None:
    """Before any row is read."""
    with pytest.raises(ConfigError, match=message):
        plugins.make("taskset", PluginSpec("swe", {"path": "rows.jsonl", **options}), TaskSet)


def test_lines_may_run_before_the_tests(tmp_path: Path) -> None:
    """`setup` comes before the test files are restored."""
    script = one(tmp_path, GYM, setup=["make"]).evaluator.options["eval_script"]
    assert "\nmake\ngit checkout" in script


def test_a_patch_with_strange_names() -> None:
    """Quoted names, and lines of content that look like headers."""
    diff = (
        'diff --git "a/t \\303\\244.py" "b/t \\303\\244.py"\nnew file mode 100644\n--- /dev/null\n'
        '+++ "b/t.py"\n@@ -0,0 +1,2 @@\n+x\n+deleted file mode\n'
    )
    assert list_files(diff).before == ()
    assert list_files(diff).after == ("t \N{LATIN SMALL LETTER A WITH DIAERESIS}.py",)
    assert list_files("") == ((), ())


def test_the_toy_is_the_same_everywhere(tmp_path: Path) -> None:
    """Commits of the example repository depend on nothing of the machine."""
    rows = make(tmp_path)
    assert [row["base_commit"][:7] for row in rows] == ["d91a131", "c6019f3", "871deca"]
