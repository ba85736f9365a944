"""Arrays of tokens, and the binary encoding of all data types.

Arrays are contiguous numpy buffers (``int32`` ids, ``float32`` logprobs), never Python lists.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, shape ``(n,)``, contiguous."""

Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities of sampled tokens, shape ``(n,)``."""

Mask = npt.NDArray[np.bool_]
"""True where a token is trained on, shape ``(n,)``."""

Experts = npt.NDArray[np.unsignedinteger[Any]]
"""Experts that a mixture-of-experts model computed tokens with, in the order of the router's top-k.

Shape ``(n, layers, top_k)``, of the smallest unsigned type that holds every number of an expert.
The layers are those with a router, or all of the model, with zeros where there is none, as engines
report them."""


class Kept(msgspec.Struct, frozen=True):
    """Ids that top-p, top-k or min-p left to choose from, for each of ``n`` positions.

    The set of position ``i`` is ``ids[offsets[i] : offsets[i + 1]]``, sorted. It is empty where
    nothing was sampled, where all ids were left, and where the set is not known.
    """

    offsets: Ids
    """Shape ``(n + 1,)``, from 0 to the length of `ids`."""
    ids: Ids

    @classmethod
    def of(cls, sets: Iterable[Sequence[int] | Ids]) -> Self:
        """Join sets of ids, one for each position."""
        arrays = [np.sort(np.asarray(ids, np.int32)) for ids in sets]
        sizes = [len(ids) for ids in arrays]
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
        return cls(offsets, np.concatenate([np.empty(0, np.int32), *arrays]))

    @classmethod
    def none(cls, count: int) -> Self:
        """Return empty sets of `count` positions."""
        return cls(np.zeros(count + 1, np.int32), np.empty(0, np.int32))

    def contains(self, ids: Ids) -> Mask:
        """Return whether each of ``n`` ids is in its own set, shape ``(n,)``."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        contained = np.zeros(len(self), np.bool_)
        contained[owner[self.ids == ids[owner]]] = True
        return contained

    def select(self, wanted: Mask) -> Self:
        """Return the sets of the positions in `wanted`, and empty sets for the others."""
        offsets = np.concatenate(([0], np.cumsum(self.sizes * wanted))).astype(np.int32)
        return type(self)(offsets, self.ids[np.repeat(wanted, self.sizes)])

    @property
    def sizes(self) -> Ids:
        """Number of ids of each set, shape ``(n,)``."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Ids]:
        return (self.ids[start:end] for start, end in pairwise(self.offsets.tolist()))

    def __getitem__(self, at: slice) -> Self:
        """Return the sets of consecutive positions."""
        start, stop, _ = at.indices(len(self))
        offsets = self.offsets[start : max(start, stop) + 1]
        return type(self)(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]])


def shared_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return the number of leading items that two arrays share.

    Views of the same memory are equal without a comparison.
    """
    n = min(len(a), len(b))
    if not n or _start_of(a) == _start_of(b):
        return n
    if a.shape[1:] != b.shape[1:]:
        return 0
    differs = a[:n] != b[:n]
    if differs.ndim > 1:
        differs = differs.reshape(n, -1).any(1)
    first = int(differs.argmax())
    return first if differs[first] else n


def _start_of(array: npt.NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    address: int = array.__array_interface__["data"][0]
    return address, array.strides


_CODES: dict[type[np.generic], bytes] = {np.int32: b"i", np.float32: b"f", np.bool_: b"?"}
_EXPERTS = struct.Struct("<cHH")
"""Type code, layers and top-k, before the bytes of an array of experts."""
_EXPERT_TYPES: dict[bytes, type[np.unsignedinteger[Any]]] = {b"B": np.uint8, b"H": np.uint16}
T = TypeVar("T")


def _to_wire(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.type in _CODES:
        dtype = value.dtype.type  # in native byte order, whatever that of `value`
        return _CODES[dtype] + np.ascontiguousarray(value, dtype).tobytes()
    if isinstance(value, np.ndarray) and value.ndim == 3:
        code = value.dtype.char.encode()
        if code in _EXPERT_TYPES:
            own = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            return _EXPERTS.pack(code, *value.shape[1:]) + own.tobytes()
    raise NotImplementedError(f"cannot encode a value of type {type(value).__name__}")


def _from_wire(kind: Any, value: object) -> object:
    # a ValueError here becomes a msgspec.ValidationError that names the field
    if kind is Experts:
        return _read_experts(value)
    dtype = get_args(get_args(kind)[1])[0]
    if not isinstance(value, bytes) or value[:1] != _CODES[dtype]:
        raise ValueError(f"expected an array of {dtype.__name__}")
    return np.frombuffer(value, dtype=dtype, offset=1)


def _read_experts(value: object) -> Experts:
    if not isinstance(value, bytes) or value[:1] not in _EXPERT_TYPES:
        raise ValueError("expected an array of experts")
    code, layers, top_k = _EXPERTS.unpack_from(value)
    flat = np.frombuffer(value, _EXPERT_TYPES[code], offset=_EXPERTS.size)
    return flat.reshape(-1, layers, top_k)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(value: msgspec.Struct) -> bytes:
    """Encode a struct as msgpack; arrays become raw little-endian buffers."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode the output of `encode`; arrays are read-only views. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)


def make_decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Make a decoder of the output of `encode`, which is faster than `decode` for unions."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_wire)
