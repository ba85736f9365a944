"""Changes to a workspace with a base, for each kind of mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.commands import run_program
from support.sandbox import dig
from tugline.patch import FileChange, Patch
from tugline.sandbox import overlay
from tugline.sandbox.files import write_files
from tugline.sandbox.overlay import OverlayWorkspace, unmount_all
from tugline.sandbox.patch import PatchLimits

FILES = {"task.md": "do it\n", "pkg/given.py": "g = 1\n"}
"""Initial files over the base."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A workspace beside a secret; its name has separators of mount options."""
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "b:a,s\\e d"
    for path, text in {
        "a.py": "x = 1\n",
        "pkg/b.py": "y = 2\n",
        "pkg/given.py": "old = 0\n",
        "docs/one.md": "1\n",
        "docs/deep/two.md": "2\n",
        ".git/HEAD": "ref\n",
        "run.sh": "#!/bin/sh\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("a.py")
    (root / "blob").write_bytes(b"\0" * 2_000_000)
    return root


def by_kernel(layer: OverlayWorkspace, script: str) -> None:
    """Run a script in an overlay of this machine's kernel, or skip."""
    layer.mount()
    if not layer.work.is_mount() or layer.own == layer.work:
        pytest.skip("no overlay can be mounted here")
    _run(script, layer.work)


def by_copy(layer: OverlayWorkspace, script: str) -> None:
    """Run a script in a copy."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overlay, "mount_overlay", lambda *_: "refused")
        layer.mount()
    assert not layer.work.is_mount()
    _run(script, layer.work)


def in_private(layer: OverlayWorkspace, script: str) -> None:
    """Run a script in an unprivileged mount namespace, or skip."""
    options = layer.mount_options(private=True)
    mount = 'mount -t overlay -o "$1" none "$2" && cd "$2" && exec sh -ec "$3"'
    done = run_program("unshare", "-Urm", "sh", "-c", mount, "sh", options, layer.work, script)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _run(script: str, folder: Path) -> None:
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True)


Way = Callable[[OverlayWorkspace, str], None]
WAYS = [by_kernel, by_copy, in_private]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Each kind of mount."""
    return request.param


Make = Callable[..., OverlayWorkspace]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make layers over a base, which are unmounted at the end."""
    layers: list[OverlayWorkspace] = []

    def make(base: Path | None, files: dict[str, str] | None = None) -> OverlayWorkspace:
        layers.append(OverlayWorkspace(tmp_path / "b:o,x\\ d", base, files or {}))
        layers[-1].make()
        return layers[-1]

    yield make
    for layer in layers:
        layer.unmount()
        assert not layer.work.is_mount()


@pytest.fixture
def layer(base: Path, make: Make) -> OverlayWorkspace:
    """A layer with initial files."""
    return make(base, FILES)


def test_no_change_is_an_empty_patch(layer: OverlayWorkspace, way: Way) -> None:
    """Neither initial files nor files that were touched or rewritten count."""
    way(layer, "touch a.py blob run.sh; chmod 600 a.py; cat a.py > t; cat t > a.py; rm t; ls -R .")
    assert layer.diff() == Patch()


def test_every_kind_of_change_is_found(layer: OverlayWorkspace, way: Way) -> None:
    """Files that are new, changed, removed, renamed, executable, linked or binary are found."""
    script = """
    printf 'x = 2\\n' > a.py; rm pkg/b.py task.md; mv docs/deep docs/moved; chmod +x pkg/given.py
    ln -s /etc/passwd out; ln -s .. outdir; ln -sf pkg link; printf '\\0\\377' > bin
    mkdir -p new/er; printf n > new/er/n; ln new/er/n new/hard; chmod -x run.sh
    mkdir __pycache__; touch __pycache__/a.pyc; echo ref2 > .git/HEAD
    """
    way(layer, script)
    assert layer.diff() == Patch(
        {
            "a.py": FileChange(b"x = 2\n"),
            "pkg/b.py": None,
            "task.md": None,
            "docs/deep": None,
            "docs/deep/two.md": None,
            "docs/moved/two.md": FileChange(b"2\n"),
            "pkg/given.py": FileChange(b"g = 1\n", executable=True),
            "out": FileChange(b"/etc/passwd", link=True),
            "outdir": FileChange(b"..", link=True),
            "link": FileChange(b"pkg", link=True),
            "bin": FileChange(b"\0\xff"),
            "new/er/n": FileChange(b"n"),
            "new/hard": FileChange(b"n"),
            "run.sh": FileChange(b"#!/bin/sh\n"),
        }
    )


def test_replaced_folders_and_files_are_found(layer: OverlayWorkspace, way: Way) -> None:
    """A file in place of a folder, or the reverse, and a recreated folder are found."""
    script = """
    rm -r docs; mkdir docs; echo 3 > docs/three.md; printf '1\\n' > docs/one.md
    rm -r pkg; echo file > pkg; rm a.py; mkdir a.py; echo in > a.py/in
    rm link; mkdir link; echo in > link/in; rm -rf .git
    """
    way(layer, script)
    assert layer.diff() == Patch(
        {
            "docs/deep": None,
            "docs/deep/two.md": None,
            "docs/three.md": FileChange(b"3\n"),
            "pkg/b.py": None,
            "pkg/given.py": None,
            "pkg": FileChange(b"file\n"),
            "a.py": None,
            "a.py/in": FileChange(b"in\n"),
            "link": None,
            "link/in": FileChange(b"in\n"),
        }
    )


def test_omitted_changes_are_noted(make: Make, base: Path, way: Way) -> None:
    """Pipes, large files, invalid names and installed packages are in notes, with the reason."""
    for name in ("g\tone", "g\\one", "gone"):
        (base / name).touch()
    layer = make(base)
    script = """
    rm -- g*one a.py; mkfifo a.py; mkfifo pipe; head -c 3000000 /dev/zero > blob
    touch "$(printf 'a\\nb')" "$(printf '\\377')" 'x\\y'; mkdir node_modules; cd node_modules
    for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do touch $n; done
    """
    way(layer, script)
    patch = layer.diff(PatchLimits(seen_files=20))
    empty = FileChange(b"")
    gone = {"g\tone": None, "g\\one": None, "gone": None}
    assert patch.files == {**gone, "a\nb": empty, "x\\y": empty}
    assert all(note.isprintable() for note in patch.notes)
    reasons = dict(note.split(": ", 1) for note in patch.notes)
    assert reasons.keys() == {"'\\udcff'", "a.py", "blob", "node_modules", "pipe"}
    assert reasons["'\\udcff'"].startswith("the name is not UTF-8")


def test_an_unchanged_large_file_in_a_new_folder(make: Make, base: Path, way: Way) -> None:
    """A file larger than a change may be is no change if it equals that of the base."""
    (base / "data").mkdir()
    (base / "data" / "blob").write_bytes(b"\0" * 2_000_000)
    layer = make(base)
    way(layer, "cp -p data/blob t; rm -r data; mkdir data; mv t data/blob")
    assert layer.diff() == Patch()


def test_links_of_the_base_are_not_followed(make: Make, base: Path, tmp_path: Path) -> None:
    """A folder in place of a link is not compared with the link's target."""
    (base / "out").symlink_to(tmp_path)
    layer = make(base)
    by_kernel(layer, "rm out; mkdir out; printf secret > out/secret")
    assert layer.diff() == Patch({"out": None, "out/secret": FileChange(b"secret")})
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_very_deep_tree_is_noted(layer: OverlayWorkspace, way: Way) -> None:
    """Files beyond the longest path are noted for folder names of any length; others are kept."""
    way(layer, "echo 2 > a.py")
    for folder in dig(layer.work, ("d" * length for length in range(205, 235))):
        for name in ("a", "b" * 60, "c" * 120, "e" * 180):
            os.close(os.open(name, os.O_CREAT, dir_fd=folder))
    patch = layer.diff(PatchLimits(files=5000))
    assert patch.files["a.py"] == FileChange(b"2\n")
    assert any("name too long" in note for note in patch.notes), patch.notes


def test_limits_of_patches(layer: OverlayWorkspace) -> None:
    """The limits apply to changed files only, not to the base."""
    by_kernel(layer, "for n in 1 2 3 4 5 6; do echo $n > f$n; done")
    assert len(layer.diff(PatchLimits(seen_files=9)).files) == 6
    assert layer.diff(PatchLimits(files=5)).files == {}
    assert "all changes are left out" in layer.diff(PatchLimits(files=5)).notes[0]
    small = layer.diff(PatchLimits(total_bytes=4))
    assert list(small.files) == ["f1", "f2"]
    past = "change left out: the patch would exceed 4 bytes"
    assert small.notes == tuple(f"f{number}: {past}" for number in (3, 4, 5, 6))


def test_initial_files_replace_those_of_the_base(make: Make, base: Path) -> None:
    """Files replace a folder or a file above them, too; folders keep their mode."""
    (base / "docs").chmod(0o750)
    files = {"docs/one.md": "mine\n", "a.py/x": "below a file\n", "pkg": "over a folder\n"}
    layer = make(base, files)
    check = 'test "$(cat docs/one.md a.py/x pkg docs/deep/two.md | tr "\\n" .)" = '
    by_kernel(layer, check + '"mine.below a file.over a folder.2."')
    assert (layer.work / "docs").stat().st_mode & 0o777 == 0o750
    assert layer.diff() == Patch()
    _run("rm -r a.py; rm pkg; echo new > a.py", layer.work)
    changed = {"a.py/x": None, "pkg": None, "a.py": FileChange(b"new\n")}
    assert layer.diff() == Patch(changed)


def test_initial_files_keep_the_executable_bit(make: Make, base: Path, way: Way) -> None:
    """A file that is executable in the base stays so, which is no change."""
    layer = make(base, {"run.sh": "#!/bin/sh\nexit 0\n", "a.py": "x = 3\n"})
    way(layer, "./run.sh; test ! -x a.py; echo y > new")
    assert layer.diff() == Patch({"new": FileChange(b"y\n")})


def test_changes_that_keep_size_and_time_are_found(layer: OverlayWorkspace) -> None:
    """The time of the last status change shows such changes in a copy."""
    by_copy(
        layer,
        "touch -r a.py t; printf 'x = 2\\n' > a.py; touch -r t a.py; chmod 755 run.sh\n"
        "ln -s x u; touch -hr link u; ln -sfn b.py link; touch -hr u link; rm t u",
    )
    changed = {"a.py": FileChange(b"x = 2\n"), "link": FileChange(b"b.py", link=True)}
    assert layer.diff() == Patch(changed)


def test_changes_are_found_without_a_base(make: Make) -> None:
    """Changes are relative to the initial files; special files are noted, limits apply."""
    layer = make(None, FILES)
    layer.mount()
    assert layer.diff() == Patch()
    script = "rm task.md; mkdir -p new/deep __pycache__; touch new/deep/n __pycache__/a; mkfifo p"
    _run(script, layer.work)
    patch = layer.diff()
    assert patch.files == {"task.md": None, "new/deep/n": FileChange(b"")}
    assert [note.partition(":")[0] for note in patch.notes] == ["p"]
    assert layer.diff(PatchLimits(files=0)).files == {}


def test_patches_apply_in_order(make: Make, tmp_path: Path) -> None:
    """Removals come first, so that they cannot remove new files."""
    layer = make(None, {"a": "x"})
    _run("rm a; mkdir a; printf new > a/b", layer.work)
    target = tmp_path / "target"
    target.mkdir()
    write_files(target, {"a": "x"})
    write_files(target, layer.diff().files)
    assert (target / "a" / "b").read_text() == "new"


def test_mounts_of_killed_processes_are_removed(layer: OverlayWorkspace, tmp_path: Path) -> None:
    """A program that works in a mount does not keep it; a second call finds no mount."""
    by_kernel(layer, "true")
    program = subprocess.Popen(["sleep", "60"], cwd=layer.work)
    try:
        assert unmount_all(tmp_path / "b:o") == 0
        assert [unmount_all(layer.work.parent) for _ in range(2)] == [1, 0]
        assert not layer.work.is_mount()
    finally:
        program.kill()
        program.wait()
