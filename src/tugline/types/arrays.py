"""Token arrays, and the binary encoding of every noun.

Arrays are contiguous numpy buffers (``int32`` ids, ``float32`` logprobs), never Python lists.
"""

from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, shape ``(n,)``, contiguous."""

Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities of sampled tokens, shape ``(n,)``."""

Mask = npt.NDArray[np.bool_]
"""True where a token is trained on, shape ``(n,)``."""


def shared_prefix(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Return how many leading items two arrays have in common.

    Arrays that are views of the same memory are not compared.
    """
    n = min(len(a), len(b))
    if not n or _start_of(a) == _start_of(b):
        return n
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _start_of(array: npt.NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    address: int = array.__array_interface__["data"][0]
    return address, array.strides


_CODES: dict[type[np.generic], bytes] = {np.int32: b"i", np.float32: b"f", np.bool_: b"?"}
T = TypeVar("T")


def _to_wire(value: object) -> object:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.type in _CODES:
        dtype = value.dtype.type  # native, whatever order the bytes of `value` have
        return _CODES[dtype] + np.ascontiguousarray(value, dtype).tobytes()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _from_wire(kind: Any, value: object) -> object:
    # a ValueError here becomes a msgspec.ValidationError that names the field
    dtype = get_args(get_args(kind)[1])[0]
    if not isinstance(value, bytes) or value[:1] != _CODES[dtype]:
        raise ValueError(f"expected an array of {dtype.__name__}")
    return np.frombuffer(value, dtype=dtype, offset=1)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(value: msgspec.Struct) -> bytes:
    """Encode a noun as msgpack; arrays become raw little-endian buffers."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode what `encode` wrote; arrays are read-only views. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_wire)
