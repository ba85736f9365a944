"""Signatures of callbacks, as https://www.standardwebhooks.com has them; for sender and receiver.

A secret reads ``whsec_`` and base64. What is signed is ``id.timestamp.body`` with HMAC-SHA256, so
neither the body nor the id can be changed, and an old callback cannot be played again for long.
Any library for Standard Webhooks verifies it, too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping

from tugline.errors import BadSignature, UsageError

PREFIX = "whsec_"
TOLERANCE_S = 300.0
"""How far the clocks of sender and receiver may be apart, the way of the callback included."""
_BYTES = 32


def new_secret() -> str:
    """A random secret."""
    return PREFIX + base64.b64encode(secrets.token_bytes(_BYTES)).decode()


def key_of(secret: str) -> bytes:
    """The key that a secret stands for. Raises `UsageError`."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not 24 <= len(key) <= 64:
        msg = f"a callback secret must be {PREFIX} and 24 to 64 bytes in base64"
        raise UsageError(msg)
    return key


def sign(key: bytes, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002 - its name there
    """The value of ``webhook-signature``."""
    digest = hmac.digest(key, f"{id}.{timestamp}.".encode(errors="replace") + body, hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


def verify(secret: str, headers: Mapping[str, str], body: bytes) -> str:
    """The id of a genuine callback, by which to know it if it comes again.

    `body` is what was received, byte for byte. Raises `BadSignature`.
    """
    key = key_of(secret)
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        id_, timestamp = lower["webhook-id"], int(lower["webhook-timestamp"])
        signatures = lower["webhook-signature"].split()
    except (KeyError, ValueError):
        msg = "webhook-id, webhook-timestamp or webhook-signature is missing or no number"
        raise BadSignature(msg) from None
    if abs(time.time() - timestamp) > TOLERANCE_S:
        msg = f"the callback was signed at {timestamp}, more than {TOLERANCE_S:.0f} s from now"
        raise BadSignature(msg)
    right = sign(key, id_, timestamp, body).encode()
    if not any(hmac.compare_digest(right, one.encode(errors="replace")) for one in signatures):
        msg = "no signature fits: another secret, or the body is not what was sent"
        raise BadSignature(msg)
    return id_
