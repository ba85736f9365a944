"""Patches stored beside recordings."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tugline.errors import CaptureError
from tugline.patch import FileChange, Patch, pack_patch, unpack_patch
from tugline.recording.folder import patch_name
from tugline.recording.patches import load_patch, save_patch

CHANGES = st.builds(FileChange, st.binary(), st.booleans(), st.booleans(), st.booleans())
PATCHES = st.builds(
    Patch, st.dictionaries(st.text(), st.none() | CHANGES), st.lists(st.text()).map(tuple)
)


@given(st.lists(PATCHES, min_size=1, max_size=5))
def test_a_patch_is_read_as_it_was_stored_and_equal_ones_are_one_file(patches: list[Patch]) -> None:
    """Any patch is read back by its digest, in its order; there is a file for each distinct one."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        digests = [save_patch(pack_patch(patch), folder) for patch in [*patches, *patches]]
        read = [unpack_patch(load_patch(folder / "s.1.rec", digest)) for digest in digests]
        assert [[*p.files.items()] for p in read] == [[*p.files.items()] for p in patches] * 2
        assert [p.notes for p in read] == [p.notes for p in patches] * 2
        assert {path.name for path in folder.iterdir()} == set(map(patch_name, digests))
        assert len(set(digests)) == len(set(map(pack_patch, patches)))


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_or_missing_patch_is_an_error_with_its_path(at: int, tmp_path: Path) -> None:
    """A flipped bit anywhere in the file is found, and so is another patch under the name."""
    patch = Patch({"a": FileChange(b"0123456789" * 9)})
    digest = save_patch(pack_patch(patch), tmp_path)
    path = tmp_path / patch_name(digest)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=path.name):
        load_patch(tmp_path / "s.1.rec", digest)
    (tmp_path / patch_name(save_patch(b"other", tmp_path))).replace(path)
    with pytest.raises(CaptureError, match="differs from its name"):
        load_patch(tmp_path / "s.1.rec", digest)
    path.unlink()
    with pytest.raises(CaptureError, match=path.name):
        load_patch(tmp_path / "s.1.rec", digest)


def test_bytes_of_no_patch_are_an_error() -> None:
    """Bytes with the right digest, but no patch in them, are refused."""
    with pytest.raises(CaptureError, match="cannot be decoded"):
        unpack_patch(b"\xc1")


def test_a_patch_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(CaptureError, match="cannot write patch"):
        save_patch(b"", tmp_path / "missing")
