"""What an agent does to a workspace with a base, for each way in which it can be seen."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandboxes import dig
from tugline.sandbox import overlay
from tugline.sandbox.files import write_files
from tugline.sandbox.overlay import OverlayWorkspace, unmount_all
from tugline.sandbox.patch import FileChange, Patch, PatchLimits

FILES = {"task.md": "do it\n", "pkg/given.py": "g = 1\n"}
"""Initial files over the base."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A workspace beside something secret; its name has signs of the list of options."""
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
    """Run a script where the layer is mounted on this machine, or skip."""
    layer.mount()
    if not layer.work.is_mount() or layer.own == layer.work:
        pytest.skip("no overlay may be mounted here")
    _run(script, layer.work)


def by_copy(layer: OverlayWorkspace, script: str) -> None:
    """Run it in a copy."""
    with pytest.MonkeyPatch.context() as refusing:
        refusing.setattr(overlay, "mount_overlay", lambda *_: "refused")
        layer.mount()
    assert not layer.work.is_mount()
    _run(script, layer.work)


def in_private(layer: OverlayWorkspace, script: str) -> None:
    """Run it in a mount namespace of its own, without privileges, or skip."""
    options = layer.mount_options(private=True)
    mount = 'mount -t overlay -o "$1" none "$2" && cd "$2" && exec sh -ec "$3"'
    argv = ["unshare", "-Urm", "sh", "-c", mount, "sh", options, str(layer.work), script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def _run(script: str, folder: Path) -> None:
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True)


Way = Callable[[OverlayWorkspace, str], None]
WAYS = [by_kernel, by_copy, in_private]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    """Each way in which a base can be seen."""
    found: Way = request.param
    return found


Make = Callable[..., OverlayWorkspace]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make layers over a base, which are gone at the end."""
    made: list[OverlayWorkspace] = []

    def make(base: Path | None, files: dict[str, str] | None = None) -> OverlayWorkspace:
        made.append(OverlayWorkspace(tmp_path / "b:o,x\\ d", base, files or {}))
        made[-1].make()
        return made[-1]

    yield make
    for layer in made:
        layer.unmount()
        assert not layer.work.is_mount()


@pytest.fixture
def layer(base: Path, make: Make) -> OverlayWorkspace:
    """One with initial files."""
    return make(base, FILES)


def test_nothing_done_is_an_empty_patch(layer: OverlayWorkspace, way: Way) -> None:
    """Initial files are no change; nor is what was only touched, copied up or written again."""
    way(layer, "touch a.py blob run.sh; chmod 600 a.py; cat a.py > t; cat t > a.py; rm t; ls -R .")
    assert layer.diff() == Patch()


def test_every_kind_of_change_is_found(layer: OverlayWorkspace, way: Way) -> None:
    """New, changed, removed, renamed, made executable, linked, binary: as a sandbox gets them."""
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


def test_folders_and_files_that_change_places_are_found(layer: OverlayWorkspace, way: Way) -> None:
    """A folder made anew, a file where a folder was, a folder where a file or a link was."""
    script = """
    rm -r docs; mkdir docs; echo 3 > docs/three.md; printf '1\\n' > docs/one.md
    rm -r pkg; echo file > pkg; rm a.py; mkdir a.py; echo in > a.py/in
    rm link; mkdir link; echo in > link/in; rm -rf .git
    """
    way(layer, script)
    assert layer.diff() == Patch(
        {
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


def test_what_is_left_out_is_said(make: Make, base: Path, way: Way) -> None:
    """Pipes, what is too large, strange names, also of what is gone, installed programs."""
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
    assert patch.files == {"gone": None}
    assert all(note.isprintable() for note in patch.notes)
    reasons = dict(note.split(": ", 1) for note in patch.notes)
    new = {"'\\udcff'", "'a\\nb'", "a.py", "blob", "node_modules", "pipe", "x\\y"}
    assert reasons.keys() == {"'g\\tone'", "g\\one", *new}
    assert reasons["g\\one"].startswith("a name with a backslash")


def test_a_large_file_in_a_folder_made_anew_is_unchanged(make: Make, base: Path, way: Way) -> None:
    """Larger than a change may be, but equal to the old one."""
    (base / "data").mkdir()
    (base / "data" / "blob").write_bytes(b"\0" * 2_000_000)
    layer = make(base)
    way(layer, "cp -p data/blob t; rm -r data; mkdir data; mv t data/blob")
    assert layer.diff() == Patch()


def test_links_of_the_base_are_not_followed(make: Make, base: Path, tmp_path: Path) -> None:
    """What the agent makes in place of a link is not compared with where the link leads."""
    (base / "out").symlink_to(tmp_path)
    layer = make(base)
    by_kernel(layer, "rm out; mkdir out; printf secret > out/secret")
    assert layer.diff() == Patch({"out": None, "out/secret": FileChange(b"secret")})
    assert (tmp_path / "secret").read_text() == "secret"


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_tree_deeper_than_any_path_is_noted(layer: OverlayWorkspace, way: Way) -> None:
    """Whatever the length at which paths end, and the rest of the work is taken along."""
    way(layer, "echo 2 > a.py")
    for folder in dig(layer.work, ("d" * length for length in range(205, 235))):
        for name in ("a", "b" * 60, "c" * 120, "e" * 180):
            os.close(os.open(name, os.O_CREAT, dir_fd=folder))
    patch = layer.diff(PatchLimits(files=5000))
    assert patch.files["a.py"] == FileChange(b"2\n")
    assert any("name too long" in note for note in patch.notes), patch.notes


def test_a_flood_is_not_taken_along_and_the_base_does_not_count(layer: OverlayWorkspace) -> None:
    """PatchLimits are on what was touched."""
    by_kernel(layer, "for n in 1 2 3 4 5 6; do echo $n > f$n; done")
    assert len(layer.diff(PatchLimits(seen_files=9)).files) == 6
    assert layer.diff(PatchLimits(files=5)).files == {}
    assert "all changes are left out" in layer.diff(PatchLimits(files=5)).notes[0]
    small = layer.diff(PatchLimits(total_bytes=4))
    assert list(small.files) == ["f1", "f2"]
    past = "past 4 bytes in all, change left out"
    assert small.notes == tuple(f"f{number}: {past}" for number in (3, 4, 5, 6))


def test_initial_files_lie_over_whatever_the_base_has(make: Make, base: Path) -> None:
    """Also where it has a folder or a file in their way; folders keep the base's mode."""
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


def test_an_initial_file_can_be_run_where_the_bases_can(make: Make, base: Path, way: Way) -> None:
    """As a sandbox that it is put into later would have it; that alone is no change."""
    layer = make(base, {"run.sh": "#!/bin/sh\nexit 0\n", "a.py": "x = 3\n"})
    way(layer, "./run.sh; test ! -x a.py; echo y > new")
    assert layer.diff() == Patch({"new": FileChange(b"y\n")})


def test_a_copy_tells_changes_that_keep_size_and_time(layer: OverlayWorkspace) -> None:
    """Both can be set to what they were; when a file was last touched cannot."""
    by_copy(
        layer,
        "touch -r a.py t; printf 'x = 2\\n' > a.py; touch -r t a.py; chmod 755 run.sh\n"
        "ln -s x u; touch -hr link u; ln -sfn b.py link; touch -hr u link; rm t u",
    )
    changed = {"a.py": FileChange(b"x = 2\n"), "link": FileChange(b"b.py", link=True)}
    assert layer.diff() == Patch(changed)


def test_without_a_base_it_is_a_plain_folder(make: Make) -> None:
    """Compared with what it began with; what is no file is noted, and a flood left out."""
    layer = make(None, FILES)
    layer.mount()
    assert layer.diff() == Patch()
    script = "rm task.md; mkdir -p new/deep __pycache__; touch new/deep/n __pycache__/a; mkfifo p"
    _run(script, layer.work)
    patch = layer.diff()
    assert patch.files == {"task.md": None, "new/deep/n": FileChange(b"")}
    assert [note.partition(":")[0] for note in patch.notes] == ["p"]
    assert layer.diff(PatchLimits(files=0)).files == {}


def test_a_patch_can_be_applied_in_order(make: Make, tmp_path: Path) -> None:
    """What is gone comes first, so that it takes nothing away that came in its place."""
    layer = make(None, {"a": "x"})
    _run("rm a; mkdir a; printf new > a/b", layer.work)
    then = tmp_path / "then"
    then.mkdir()
    write_files(then, {"a": "x"})
    write_files(then, layer.diff().files)
    assert (then / "a" / "b").read_text() == "new"


def test_what_a_killed_process_left_mounted_is_found(
    layer: OverlayWorkspace, tmp_path: Path
) -> None:
    """Also while a program still sits in it; a second look finds nothing."""
    by_kernel(layer, "true")
    sitting = subprocess.Popen(["sleep", "60"], cwd=layer.work)
    try:
        assert unmount_all(tmp_path / "b:o") == 0
        assert [unmount_all(layer.work.parent) for _ in range(2)] == [1, 0]
        assert not layer.work.is_mount()
    finally:
        sitting.kill()
        sitting.wait()
