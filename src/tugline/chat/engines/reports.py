"""Experts and kept sets in the replies of engines.

A report that cannot be read never ends an answer: its tokens are delivered, with experts of the
shape (0, 0, 0), which `tugline.recording.experts.check_experts` refuses, and without sets.
"""

import base64
import io
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from tugline.chat.engines.base import ReportedExperts
from tugline.types import Experts
from tugline.types.task import INT32

_MIN_REPEATS = 10
"""Least number of repeats expected by chance, for the shape of experts to be certain."""
_FEW = 0.05
"""Share of these that a layer may have, so that a fault in a few tokens leaves the shape."""
_UNREADABLE: Experts = np.empty((0, 0, 0), np.uint8)
_Sets = list[list[Annotated[int, Meta(ge=0, le=INT32)]]]


def encode_experts(rows: Experts) -> str:
    """Encode experts as the base64 text of an ``.npy`` file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, rows, version=(1, 0))
    return base64.b64encode(file.getbuffer()).decode()


def read_experts(value: object, start: int = 0) -> ReportedExperts | None:
    """Read what `encode_experts` and vLLM write; None if `value` is None."""
    if value is None:
        return None
    try:
        return ReportedExperts(start, _narrow(_read_npy(_read_base64(value))))
    except Exception:  # noqa: BLE001 - a broken header raises errors of several modules
        return ReportedExperts(start, _UNREADABLE)


def read_flat_experts(value: object, shape: tuple[int, int] | None) -> ReportedExperts | None:
    """Read the base64 text of int32 values, as SGLang writes them; None if `value` is None.

    `shape` has the layers and the experts of a token in each; without it, the shape of the rows is
    (1, 1, values).
    """
    if value is None:
        return None
    try:
        flat = np.frombuffer(_read_base64(value), "<i4")
        rows = flat.reshape(-1, *shape) if shape is not None else flat.reshape(1, 1, -1)
        return ReportedExperts(0, _narrow(rows))
    except (ValueError, TypeError):
        return ReportedExperts(0, _UNREADABLE)


def read_kept(value: object) -> list[list[int]]:
    """Read the sets of kept ids; without any if `value` is None or invalid."""
    try:
        return msgspec.convert(value or [], _Sets)
    except msgspec.ValidationError:
        return []


def infer_shape(rows: npt.NDArray[Any]) -> tuple[int, int] | None:
    """Infer layers and top-k from the values of many tokens, shape ``(n, values)``.

    No layer uses an expert twice for a token, while different layers do so by chance: top-k is the
    largest divisor whose groups hardly ever repeat a value. None if this could itself be chance.
    """
    n, values = rows.shape
    if not rows.size:
        return None
    counts = np.unique(rows, return_counts=True)[1]
    chance = float(np.square(counts / rows.size).sum())
    for top_k in range(values, 1, -1):
        if values % top_k:
            continue
        ordered = np.sort(rows.reshape(-1, top_k), axis=1)
        repeats = (ordered[:, 1:] == ordered[:, :-1]).sum()
        expected = n * values * (top_k - 1) / 2 * chance
        if repeats < _FEW * expected:
            return (values // top_k, top_k) if expected > _MIN_REPEATS else None
    return values, 1


def _read_base64(value: object) -> bytes:
    return base64.b64decode(msgspec.convert(value, str), validate=True)


def _read_npy(data: bytes) -> npt.NDArray[Any]:
    """Read an ``.npy`` file as a view, so that a wrong shape in its header allocates nothing."""
    file = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(file)
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    shape, fortran, dtype = read_header[major](file)
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def _narrow(rows: npt.NDArray[Any]) -> Experts:
    """Convert integers to the smallest unsigned type; other values stay as they are."""
    if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.number):
        return _UNREADABLE
    known = rows.dtype in {np.dtype(np.uint8), np.dtype(np.uint16)}
    if known or not np.issubdtype(rows.dtype, np.integer) or not rows.size or rows.min() < 0:
        return rows
    highest = int(rows.max())
    return rows if highest > np.iinfo(np.uint16).max else rows.astype(np.min_scalar_type(highest))
