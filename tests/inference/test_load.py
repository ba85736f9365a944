"""Model folders, whole and broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inference.tiny_model import EOS, prompt, tiny, truth
from tiny import tokenizer
from tugline.errors import UsageError
from tugline.inference.load import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder."""
    model = tiny()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(tmp_path)
    tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folder_gives_model_tokenizer_and_end_ids(folder: Path) -> None:
    """The loaded model says what the saved one said."""
    model, words, eos = load(folder)
    ids = prompt(10)
    assert (truth(model, ids, ids) == truth(tiny(), ids, ids)).all()
    assert eos == {EOS, words.eos_token_id}
    assert not model.training


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors", ""])
def test_an_incomplete_folder_is_named_in_one_line(folder: Path, missing: str) -> None:
    """The error names the folder and what it lacks, which may be all of it."""
    if missing:
        (folder / missing).unlink()
    else:
        folder /= "nowhere"
    with pytest.raises(UsageError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert (missing or "no model folder") in message
    assert "\n" not in message


def test_without_torch_the_extra_is_named(tmp_path: Path) -> None:
    """The error says what to install."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\nfrom tugline.inference.load import load\n"
        f"load(Path({str(tmp_path)!r}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert "pip install 'tugline[train]'" in result.stderr.splitlines()[-1]
