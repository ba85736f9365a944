"""A tokenizer file as the rest of Tugline uses it, without importing transformers.

Satisfies the tokenizer protocol of the `renderers` library. Encoding never adds special tokens
and decoding never hides them: what a model sampled is shown as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from tugline.errors import ConfigError


class Tokenizer:
    """Ids to text and back, from a ``tokenizer.json``."""

    def __init__(self, backend: _Backend, name: str, *, eos: str = "<|im_end|>") -> None:
        self._backend = backend
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = backend.token_to_id(eos)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` from a file or a model folder."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(_Backend.from_file(str(file)), str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            msg = f"cannot read the tokenizer {file}: {error}"
            raise ConfigError(msg) from error

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` into `folder`."""
        self._backend.save(str(folder / "tokenizer.json"))

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; an incomplete character at the end decodes to U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """The id of one token, None if the vocabulary lacks it."""
        return self._backend.token_to_id(tokens)
