"""Loading complete and incomplete model folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.tiny_model import EOS, prompt, tiny, truth
from support.commands import run_python
from support.tokenizer import make_tokenizer
from tugline.errors import UsageError
from tugline.inference.load import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder."""
    model = tiny()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(tmp_path)
    make_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_complete_folder_is_loaded(folder: Path) -> None:
    """The loaded model has the weights, tokenizer and end ids of the folder."""
    model, tokens, eos = load(folder)
    ids = prompt(10)
    assert (truth(model, ids, ids) == truth(tiny(), ids, ids)).all()
    assert eos == {EOS, tokens.eos_token_id}
    assert not model.training


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors", ""])
def test_incomplete_folders_are_refused(folder: Path, missing: str) -> None:
    """The error is one line that names the folder and, if it exists, the missing file."""
    if missing:
        (folder / missing).unlink()
    else:
        folder /= "nowhere"
    with pytest.raises(UsageError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert (missing or "is not a folder; give a model folder") in message
    assert "\n" not in message


def test_a_missing_package_is_reported_with_its_extra(tmp_path: Path) -> None:
    """The error names the extra to install."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\nfrom tugline.inference.load import load\n"
        f"load(Path({str(tmp_path)!r}))"
    )
    assert "pip install 'tugline[train]'" in run_python(code).stderr.splitlines()[-1]
