"""Signatures of callbacks, as specified by https://www.standardwebhooks.com.

A secret is ``whsec_`` followed by base64. HMAC-SHA256 signs ``id.timestamp.body``, so neither the
body nor the id can be changed, and an old callback can be replayed for at most five minutes. Any
library for Standard Webhooks can verify a signature.
"""

import base64
import binascii
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime

from standardwebhooks import Webhook, WebhookVerificationError

from tugline.errors import BadSignature, UsageError

PREFIX = "whsec_"


def new_secret() -> str:
    """Return a random secret."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """Decode a secret to its key. Raises `UsageError`."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(PREFIX) or not 24 <= len(key) <= 64:
        raise UsageError(
            f"the callback secret must be {PREFIX} followed by 24 to 64 bytes in base64"
        )
    return key


def sign(key: bytes, id: str, timestamp: int, body: bytes) -> str:  # noqa: A002 - its name in the standard
    """Return the value of ``webhook-signature``; `timestamp` in Unix seconds."""
    return Webhook(key).sign(id, datetime.fromtimestamp(timestamp, UTC), body.decode())


def verify(secret: str, headers: Mapping[str, str], body: bytes) -> str:
    """Verify a callback and return its id, which stays the same if it is sent again.

    `body` is the received body, byte for byte. Raises `BadSignature`.
    """
    webhook = Webhook(key_of(secret))
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        webhook.verify(body, lower, json_parse=False)
    except (WebhookVerificationError, ValueError) as error:  # ValueError for malformed values
        raise BadSignature(f"the callback is not genuine: {error}") from error
    return lower["webhook-id"]
