"""Encode records to bytes and decode them: only the new part of each call, in a zstd stream.

The prompt of a call is stored as a reference to the longest prefix shared with an earlier call,
plus the rest (I7), and so are the experts of its tokens; tools are stored when they change, an
image once. A section is one zstd stream
that is flushed after every record, so that repeated text costs almost nothing.

Decoded calls share memory as well: the ids of calls that extend each other are views of one buffer,
so a conversation of T turns takes O(tokens) of memory, not O(T x tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec.structs import replace

from tugline.chat.tokens import TokenSequence
from tugline.errors import CaptureError
from tugline.recording.experts import hash_rows
from tugline.recording.records import Header, RecordedEvent, RecordedResult
from tugline.types import Call, Experts, Message, Tool, encode, make_decoder, shared_prefix

_CANDIDATES = 8
"""Number of calls with which a prompt is compared."""
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, window_log=16, hash_log=13, chain_log=13
)
"""Parameters for low memory, 190 kB a session: a stream stays open as long as its session."""
_FLUSH = zstandard.COMPRESSOBJ_FLUSH_BLOCK
_NO_IDS = np.empty(0, np.int32)
_NO_HASHES = np.empty(0, np.int64)


class ImageRecord(msgspec.Struct, frozen=True, tag="image"):
    """An image's URL, stored once, before the first call that contains the image."""

    digest: str
    """SHA-256 of the URL in hex."""
    url: str


class CallRecord(msgspec.Struct, frozen=True, tag="call"):
    """A call reduced to its new part."""

    call: Call
    """The call without the prompt ids shared with `base` and without unchanged tools; the `url` of
    an image is its digest."""
    base: int
    """Number of the call whose ids (prompt, then answer) the prompt starts with; -1 for none."""
    keep: int
    """Number of ids shared with `base`."""
    same_tools: bool
    """Whether the tools are those of the previous call."""
    keep_experts: int = 0
    """Number of leading tokens with the same experts as in `base`, which `call` is without."""


Record = Header | CallRecord | ImageRecord | RecordedEvent | RecordedResult
_decode = make_decoder(Record).decode


# --------------------------------------------------------------------------- writing
class _Packed(NamedTuple):
    """What is kept of a call, with which later ones are compared."""

    tokens: TokenSequence
    """Ids of prompt, then answer."""
    hashes: npt.NDArray[np.int64]
    """Hash of the experts of each leading token."""


class Packer:
    """Encoder of the records of a section; keeps the ids and tools of the last calls."""

    def __init__(self) -> None:
        self._calls: dict[int, _Packed] = {}
        """The last calls, by number."""
        self._tools: tuple[Tool, ...] = ()
        self._images: set[str] = set()
        self._stream = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()

    def pack(self, *records: Record) -> list[bytes]:
        """Return the bytes that each record adds to the stream.

        All records are encoded before the first is compressed, so that a failure adds nothing.
        Raises `CaptureError` for a record that a reader could not decode.
        """
        encoded = list(map(_encode, records))
        return [self._stream.compress(data) + self._stream.flush(_FLUSH) for data in encoded]

    def pack_call(self, call: Call, tokens: TokenSequence | None = None) -> list[bytes]:
        """Encode a call, preceded by its images that are new.

        `tokens` are the ids of prompt and answer, if they share a buffer with other calls; then
        `call.prompt_ids` is ignored.
        """
        names = {image.url: image.digest for m in call.messages for image in m.images}
        new = [ImageRecord(name, url) for url, name in names.items() if name not in self._images]
        if tokens is None:
            tokens = TokenSequence(np.concatenate((call.prompt_ids, call.sampled_ids)))
        size = len(tokens) - len(call.sampled_ids)
        base, keep = self._find_base(call.parent, tokens, size)
        hashes = _hash_experts(call)
        keep_experts = shared_prefix(self._calls[base].hashes, hashes[:keep]) if keep else 0
        same_tools = self._tools == call.tools
        reduced = replace(
            call,
            messages=tuple(_replace_urls(message, names) for message in call.messages),
            tools=() if same_tools else call.tools,
            prompt_ids=tokens.to_array(len(tokens) - keep)[: size - keep],
            experts=None if call.experts is None else call.experts[keep_experts:],
        )
        packed = self.pack(*new, CallRecord(reduced, base, keep, same_tools, keep_experts))
        self._images.update(names.values())
        self._tools = call.tools
        if keep and keep == len(self._calls[base].tokens):
            del self._calls[base]
        self._calls[call.number] = _Packed(tokens, hashes)
        if len(self._calls) > _CANDIDATES:
            del self._calls[next(iter(self._calls))]
        return packed

    def _find_base(self, parent: int | None, tokens: TokenSequence, size: int) -> tuple[int, int]:
        """Return the call that shares most leading ids, or -1, and their number; parent first."""
        base, keep = -1, 0
        latest_first = reversed(self._calls.items())
        for number, known in sorted(latest_first, key=lambda known: known[0] != parent):
            shared = min(size, known.tokens.shared_prefix(tokens))
            if shared > keep:
                base, keep = number, shared
            if shared == len(known.tokens):
                break
        return base, keep


def _hash_experts(call: Call) -> npt.NDArray[np.int64]:
    return _NO_HASHES if call.experts is None else hash_rows(call.experts)


def _encode(record: Record) -> bytes:
    """Encode a record and decode it again: one that is not readable must not be acknowledged."""
    try:
        data = encode(record)
        _decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        msg = (
            f"a {type(record).__name__} cannot be recorded, because it could not be read back: "
            f"{error}"
        )
        raise CaptureError(msg) from error
    return data


def _replace_urls(message: Message, urls: Mapping[str, str]) -> Message:
    if not message.images:
        return message
    images = tuple(replace(image, url=urls[image.url]) for image in message.images)
    return replace(message, images=images)


# --------------------------------------------------------------------------- reading
_Values = npt.NDArray[Any]


@dataclass(slots=True)
class _TokenChain:
    """Ids, or experts, of the tokens of calls that extend each other."""

    base: tuple[_TokenChain, int] | None = None
    """The chain from which this one forks, and the number of shared tokens."""
    length: int = 0
    pieces: list[_Values] = field(default_factory=list)
    values: _Values = field(default_factory=lambda: _NO_IDS)
    """Those of all tokens; set by `join`."""

    def add(self, values: _Values) -> None:
        self.pieces.append(values)
        self.length += len(values)

    def join(self) -> None:
        start = [] if self.base is None else [self.base[0].values[: self.base[1]]]
        self.values = np.concatenate((*start, *self.pieces))
        self.values.flags.writeable = False


_End = tuple[_TokenChain, int]
"""A chain, and the number of its leading tokens that a call has."""


def _extend(chains: list[_TokenChain], base: _End | None, keep: int) -> _TokenChain:
    """Return the chain that begins with `keep` tokens of a call: its own, or a new one."""
    if not keep:
        base = None
    elif base is None or keep > base[1]:
        has = 0 if base is None else base[1]
        raise ValueError(f"a call begins with {keep} tokens of a call that has {has}")
    elif keep == base[0].length:
        return base[0]
    forked = _TokenChain(None if base is None else (base[0], keep), keep)
    chains.append(forked)
    return forked


class Unpacker:
    """Decoder of the output of `Packer`, section by section."""

    def __init__(self) -> None:
        self.images: dict[str, str] = {}
        """URLs by digest."""
        self._chains: list[_TokenChain] = []
        self._calls: list[tuple[Call, _End, _End | None]] = []
        """Calls with the ends of their ids and of their experts."""
        self.begin_section()

    def begin_section(self) -> None:
        """Reset the state: no record of a section refers to an earlier section."""
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self._ends: dict[int, _End] = {}
        self._expert_ends: dict[int, _End] = {}
        self._tools: tuple[Tool, ...] = ()

    def unpack(self, packed: bytes) -> Header | RecordedEvent | RecordedResult | None:
        """Decode a record; calls and images are collected, and None is returned for them.

        Raises `msgspec.DecodeError`, `zstandard.ZstdError`, `KeyError` or `ValueError` on an
        invalid record.
        """
        record: Record = _decode(self._stream.decompress(packed))
        if isinstance(record, CallRecord):
            self._add_call(record)
        elif isinstance(record, ImageRecord):
            self.images[record.digest] = record.url
        else:
            return record
        return None

    def calls(self) -> tuple[Call, ...]:
        """Return all calls so far, whose ids are read-only views of shared buffers."""
        for chain in self._chains:
            chain.join()
        calls = []
        for call, (chain, end), expert_end in self._calls:
            start = end - len(call.sampled_ids)
            experts = call.experts
            if experts is not None and expert_end is not None:
                rows = expert_end[0].values[: expert_end[1]]
                experts = rows.astype(experts.dtype, copy=False)
            ids = {"prompt_ids": chain.values[:start], "sampled_ids": chain.values[start:end]}
            calls.append(replace(call, experts=experts, **ids))
        return tuple(calls)

    def _add_call(self, record: CallRecord) -> None:
        call = record.call
        chain = _extend(self._chains, self._ends.get(record.base), record.keep)
        self._tools = self._tools if record.same_tools else call.tools
        chain.add(call.prompt_ids)
        chain.add(call.sampled_ids)
        call = replace(
            call,
            messages=tuple(_replace_urls(message, self.images) for message in call.messages),
            tools=self._tools,
        )
        self._ends[call.number] = chain, chain.length
        self._calls.append((call, self._ends[call.number], self._add_experts(record)))

    def _add_experts(self, record: CallRecord) -> _End | None:
        rows: Experts | None = record.call.experts
        if rows is None:
            return None
        base = self._expert_ends.get(record.base)
        chain = _extend(self._chains, base, record.keep_experts)
        chain.add(rows)
        end = self._expert_ends[record.call.number] = chain, chain.length
        return end
