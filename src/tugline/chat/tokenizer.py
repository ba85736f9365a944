"""Tokenizer of a ``tokenizer.json``, without transformers, and streaming detokenizer.

`Tokenizer` satisfies the tokenizer protocol of the `renderers` library. By default, encoding adds
no special tokens and decoding keeps them.

`Detokenizer` emits text as soon as it is certain and never retracts it. It holds back an incomplete
character, white space that may be trailing, and text that may start a stop string. Each segment
begins on a new line, without white space at its ends.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from pathlib import Path

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as _Backend

from tugline.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PROBE = ' a  b\n\n\t{"é": 界🙂}\u00a0c'
_UNKNOWN = "\ufdd0"
"""A character that no model has in its vocabulary."""
_SHORT = 48
"""Longest text, in characters, whose ids are cached."""
_CACHED = 2000
_MARK = re.compile(r"[^\w\s](\S*[^\w\s])?")
"""Text that begins and ends with punctuation, without white space, such as ``<tool_call>``."""
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenBytes(dict[int, bytes]):
    """Bytes by id, looked up on first use; joined, they are the bytes of a text."""

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
        """Whether joined bytes equal the decoded text, which does not hold for every tokenizer."""
        ids = self._backend.encode(_PROBE, add_special_tokens=False).ids
        joined = b"".join([self[token_id] for token_id in ids]).decode(errors="replace")
        return joined == self._backend.decode(ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """Map characters of byte-level vocabularies to bytes; unprintable ones start at U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class Tokenizer:
    """Encoder and decoder of token ids, from a ``tokenizer.json``."""

    def __init__(self, backend: _Backend, name: str, *, eos: str = "<|im_end|>") -> None:
        self._backend = backend
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = backend.token_to_id(eos)
        self._encode_short = lru_cache(_CACHED)(self._encode)
        """Cached encoder of short texts, because templates encode the same few repeatedly."""
        token_bytes = TokenBytes(backend)
        self.token_bytes: TokenBytes | None = token_bytes if token_bytes.is_exact() else None
        """Bytes by id, for streaming; None if an id's text depends on adjacent ids."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json`` from a file or a model folder."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            return cls(_Backend.from_file(str(file)), str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ConfigError(f"cannot read the tokenizer {file}: {error}") from error

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` into `folder`."""
        self._backend.save(str(folder / "tokenizer.json"))

    def to_json(self) -> str:
        """Return the content of the ``tokenizer.json``."""
        return self._backend.to_str()

    @property
    def size(self) -> int:
        """Number of ids, special tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens(self) -> list[str]:
        """Texts that are always encoded as one id, such as special tokens."""
        return [token.content for token in self._backend.get_added_tokens_decoder().values()]

    @property
    def control_tokens(self) -> set[str]:
        """Added tokens that are special, or look like marks; the others are words of the model."""
        return {
            token.content
            for token in self._backend.get_added_tokens_decoder().values()
            if token.content and (token.special or _MARK.fullmatch(token.content))
        }.difference(map("<0x{:02X}>".format, range(256)))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode `text`; special tokens written in it become their ids."""
        if len(text) > _SHORT or add_special_tokens:
            # A batch of one skips the offsets that `encode` computes, in two thirds of the time.
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = batch[0].ids
            return ids
        return list(self._encode_short(text))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def require_mark(self, tokens: AbstractSet[str], mark: str) -> Callable[[str], list[int]]:
        """Return an encoder for which the added `tokens` are text, except after `mark`."""
        model = self._backend.model
        backend = _Backend(model)
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        known = {}
        added = []
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            content = mark + token.content if token.content in tokens else token.content
            known[content] = token_id
            flags = {flag: getattr(token, flag) for flag in _TOKEN_FLAGS}
            added.append(AddedToken(content, **flags))
        backend.add_tokens(added)

        unknown = {part.value for part in model.tokenize(_UNKNOWN)}

        def split(token: str, token_id: int) -> list[int]:
            """Return the id of an encoded token, or ids of its parts if text must not form it."""
            if token not in tokens or token in unknown or len(token) == 1:
                return [known.get(token, token_id)]
            parts = [part for text in (token[:1], token[1:]) for part in model.tokenize(text)]
            return [token_id for part in parts for token_id in split(part.value, part.id)]

        def encode(text: str) -> list[int]:
            encoded = backend.encode(text, add_special_tokens=False)
            pairs = zip(encoded.tokens, encoded.ids, strict=True)
            return [token_id for pair in pairs for token_id in split(*pair)]

        return encode

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode `token_ids`; an incomplete character at the end decodes to U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_bytes(self, token_ids: Sequence[int]) -> str:
        """Decode like `decode`, faster if `token_bytes` is known."""
        token_bytes = self.token_bytes
        if token_bytes is None:
            return self.decode(token_ids)
        return b"".join(map(token_bytes.__getitem__, token_ids)).decode("utf-8", "replace")

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """Return the id of one token; None if the vocabulary lacks it."""
        return self._backend.token_to_id(tokens)


# --------------------------------------------------------------------------- incremental
class Detokenizer(msgspec.Struct, gc=False):
    """Decoder of an answer's text or reasoning. Methods return the text that became certain."""

    token_bytes: Mapping[int, bytes]
    stops: tuple[str, ...] = ()
    guard: str = ""
    """Text that belongs to a special token if that token follows."""
    verbatim: bool = False
    """Whether white space at the ends of segments is kept."""
    emitted: list[str] = []
    matched_stop: str | None = None
    _bytes: bytes = b""
    """Bytes of an incomplete character."""
    _undecided: str = ""
    """Text that may belong to a stop string, the guard or the preface."""
    _space: str = ""
    """White space that may be trailing."""
    _preface: str = ""
    _at_start: bool = True
    _watched: tuple[str, ...] = ()
    """Stop strings and the guard, whose beginnings are held back."""
    _longest: int = 0
    """Length of the longest watched string, less one."""

    def __post_init__(self) -> None:
        self._watched = (*self.stops, self.guard + "\0") if self.guard else self.stops
        self._longest = max(map(len, self._watched), default=1) - 1

    def feed(self, ids: list[int]) -> str:
        """Decode `ids` as the continuation of the segment."""
        if self.matched_stop is not None:
            return ""
        known = self.token_bytes
        data = known[ids[0]] if len(ids) == 1 else b"".join(map(known.__getitem__, ids))
        if self._bytes:
            data = self._bytes + data
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return self.feed_text(text)

    def feed_text(self, text: str) -> str:
        """Add decoded text as the continuation of the segment."""
        if self.matched_stop is not None:
            return ""
        if self._preface:
            text = self._strip_preface(text)
        if self._watched:
            text = self._hold_back(text)
        return self._emit(text) if text else ""

    def write(self, text: str) -> str:
        """Add a whole, certain segment."""
        ready = self._emit(text)
        self._at_start = True
        return ready

    def finish_text(self) -> str:
        """End the segment; its trailing white space is dropped."""
        text, _ = utf_8_decode(self._bytes, "replace", True)
        text = self._undecided + text
        self._preface = ""
        ready = self._emit(text) if text and self.matched_stop is None else ""
        self._bytes = b""
        self._undecided = ""
        self._at_start = True
        return ready

    def skip(self, preface: str) -> None:
        """Do not emit `preface` if the next segment begins with it."""
        self._preface = preface

    def take_guarded(self) -> str:
        """Remove and return the held-back guard, which belongs to a special token."""
        text = self._undecided
        self._undecided = ""
        return text

    def _emit(self, text: str) -> str:
        if self.verbatim:
            self.emitted.append(text)
            return text
        if self._at_start:
            text = text.lstrip()
            if not text:
                return ""
            self._at_start = False
            self._space = "\n" if self.emitted else ""
        text = self._space + text
        ready = text.rstrip()
        self._space = text[len(ready) :]
        if ready:
            self.emitted.append(ready)
        return ready

    def _strip_preface(self, text: str) -> str:
        text = self._undecided + text
        self._undecided = ""
        if text.startswith(self._preface):
            text = text.removeprefix(self._preface)
            self._preface = ""
        elif self._preface.startswith(text):
            self._undecided = text
            text = ""
        else:
            self._preface = ""
        return text

    def _hold_back(self, text: str) -> str:
        """Return the text that cannot belong to a stop string or the guard; keep the rest."""
        text = self._undecided + text
        match = min(((text.find(stop), stop) for stop in self.stops if stop in text), default=None)
        if match is not None:
            at, self.matched_stop = match
            self._undecided = ""
            return text[:at]
        pending = 0
        for length in range(min(len(text), self._longest), 0, -1):
            if any(word.startswith(text[-length:]) for word in self._watched):
                pending = length
                break
        self._undecided = text[len(text) - pending :]
        return text[: len(text) - pending]
