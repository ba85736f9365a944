"""Tokenizer over a ``tokenizer.json``, without importing transformers.

Satisfies the tokenizer protocol of the `renderers` library. Encoding never adds special tokens and
decoding never hides them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from tugline.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PROBE = ' a  b\n\n\t{"é": 界🙂}\u00a0c'
_SHORT = 48
"""Longest text, in characters, whose ids are cached."""
_CACHED = 2000


class TokenBytes(dict[int, bytes]):
    """The bytes of each id, looked up on first use; the text of several ids is their join."""

    def __init__(self, backend: _Backend) -> None:
        self._backend = backend
        self._byte_level = type(backend.decoder).__name__ == "ByteLevel"

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        if self._byte_level and all(char in _BYTES for char in token):
            data = bytes(_BYTES[char] for char in token)
        elif not self._byte_level and (byte := _BYTE.fullmatch(token)):
            data = bytes([int(byte[1], 16)])
        else:
            data = self._backend.decode([token_id], skip_special_tokens=False).encode()
        self[token_id] = data
        return data

    def is_exact(self) -> bool:
        """Whether joined bytes equal the decoded text, which is not so for every tokenizer."""
        ids = self._backend.encode(_PROBE, add_special_tokens=False).ids
        joined = b"".join([self[one] for one in ids]).decode(errors="replace")
        return joined == self._backend.decode(ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """Ids to text and back, from a ``tokenizer.json``."""

    def __init__(self, backend: _Backend, name: str, *, eos: str = "<|im_end|>") -> None:
        self._backend = backend
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = backend.token_to_id(eos)
        self._cache: dict[str, tuple[int, ...]] = {}
        """Ids of short texts: templates encode the same few again and again."""
        token_bytes = TokenBytes(backend)
        self.token_bytes: TokenBytes | None = token_bytes if token_bytes.is_exact() else None
        """Bytes by id, to decode ids as they come; None where they depend on their neighbours."""

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

    def to_json(self) -> str:
        """The content of its ``tokenizer.json``."""
        return self._backend.to_str()

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens written out in it become their ids."""
        if len(text) > _SHORT or add_special_tokens:
            # One text as a batch: without the offsets that `encode` makes, in two thirds the time.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = batch[0].ids
            return ids
        known = self._cache.get(text)
        if known is None:
            known = tuple(self._backend.encode(text, add_special_tokens=False).ids)
            if len(self._cache) < _CACHED:
                self._cache[text] = known
        return list(known)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`; an incomplete character at the end decodes to U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_bytes(self, token_ids: Sequence[int]) -> str:
        """The same as `decode`, faster where `token_bytes` is known."""
        token_bytes = self.token_bytes
        if token_bytes is None:
            return self.decode(token_ids)
        return b"".join([token_bytes[token] for token in token_ids]).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """The id of one token, None if the vocabulary lacks it."""
        return self._backend.token_to_id(tokens)
