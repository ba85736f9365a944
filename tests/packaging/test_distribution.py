"""The distribution: built, installed into an empty environment, and used outside the checkout."""

from __future__ import annotations

import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from support.commands import run_program
from tugline.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def run(*arguments: object, cwd: Path) -> str:
    """Run a program to its end, without the environment's Python settings; its output."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = run_program(*arguments, cwd=cwd, env=env, timeout=500)
    assert done.returncode == 0, f"{arguments}: {done.stdout} {done.stderr}"
    return done.stdout


def list_tracked(*under: str) -> set[str]:
    """Tracked files of the repository."""
    names = run("git", "-C", ROOT, "ls-files", "-z", *under, cwd=ROOT)
    return {name for name in names.split("\0") if name and (ROOT / name).is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_built_files_work_in_a_bare_environment(tmp_path: Path) -> None:
    """A wheel built from the sdist has every file of the package, and every command starts."""
    builder, user, dist = tmp_path / "builder", tmp_path / "user", tmp_path / "dist"
    for folder in (builder, user):
        venv.EnvBuilder(with_pip=True).create(folder)
    python = builder / "bin/python"
    install = ("-m", "pip", "install", "-q", "--no-compile")
    run(python, *install, "hatchling", cwd=tmp_path)
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", dist, cwd=ROOT)
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    unpacked = tmp_path / "source" / f"tugline-{VERSION}"
    assert {"LICENSE", "README.md", "CHANGELOG.md"} <= {each.name for each in unpacked.iterdir()}
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", dist, cwd=unpacked)
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {name.removeprefix("src/") for name in list_tracked("src")}

    run(user / "bin/python", *install, wheel, cwd=tmp_path)
    tugline = user / "bin/tugline"
    assert run(tugline, "--version", cwd=tmp_path) == f"tugline {VERSION}\n"
    code = "import tugline; print(tugline.__version__, tugline.__file__)"
    version, file = run(user / "bin/python", "-c", code, cwd=tmp_path).split()
    assert (version, Path(file).is_relative_to(user)) == (VERSION, True)
    run(tugline, "task", "init", cwd=tmp_path)
    assert "well-formed tasks: 1" in run(tugline, "task", "check", "task.yaml", cwd=tmp_path)
    for command in COMMANDS:
        assert "Usage: tugline" in run(tugline, command, "--help", cwd=tmp_path)


def test_project_metadata_is_consistent() -> None:
    """pyproject.toml and CITATION.cff have one version and licence; ids of forms are unique."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (VERSION, "Apache-2.0")
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.glob("*.yml")]
    ids = [[part["id"] for part in form["body"]] for form in forms if "body" in form]
    assert len(ids) == 2
    assert all(len(each) == len(set(each)) for each in ids)
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    assert release["jobs"]["publish"]["needs"] == "try"
    assert release["jobs"]["try"]["needs"] == "build"
