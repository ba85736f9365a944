from __future__ import annotations

import time

import pytest

from tugline.errors import BadSignature, UsageError
from tugline.signing import key_of, new_secret, sign, verify

SECRET = new_secret()


def test_signatures_follow_standard_webhooks() -> None:
    """The example of the Standard Webhooks libraries has the same signature."""
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_genuine_callback_is_verified() -> None:
    """Header names may be in any case; one right signature of several suffices."""
    now, body = int(time.time()), b"{}"
    right = sign(key_of(SECRET), "x_1", now, body)
    other = sign(key_of(new_secret()), "x_1", now, body)
    headers = {"Webhook-Id": "x_1", "WEBHOOK-TIMESTAMP": str(now)}
    assert verify(SECRET, headers | {"webhook-signature": f"{other} {right}"}, body) == "x_1"


@pytest.mark.parametrize(
    ("change", "body", "age_s"),
    [
        ({"webhook-id": "x_2"}, b"{}", 0),
        ({"webhook-timestamp": str(int(time.time()) - 100)}, b"{}", 0),
        ({"webhook-timestamp": "soon"}, b"{}", 0),
        ({"webhook-signature": "v1,AAAA"}, b"{}", 0),
        ({"webhook-signature": ""}, b"{}", 0),
        ({"webhook-signature": "v1,\udc80"}, b"{}", 0),
        ({}, b"[]", 0),
        ({}, b"{}", 400),
        ({}, b"{}", -400),
    ],
)
def test_changed_or_old_callbacks_are_refused(
    change: dict[str, str], body: bytes, age_s: int
) -> None:
    """Id, time, signature and body are protected; the time may be off by minutes only."""
    when = int(time.time()) - age_s
    headers = {"webhook-id": "x_1", "webhook-timestamp": str(when)}
    headers["webhook-signature"] = sign(key_of(SECRET), "x_1", when, b"{}")
    with pytest.raises(BadSignature):
        verify(SECRET, headers | change, body)


def test_a_callback_without_a_signature_is_refused() -> None:
    """The error names the missing header."""
    with pytest.raises(BadSignature, match="Missing"):
        verify(SECRET, {}, b"{}")


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_AAAA", "whsec_!", "bm8gcHJlZml4LCBzbyBub3Qgb25lIG9mIG91cnM="]
)
def test_invalid_secrets_are_refused(secret: str) -> None:
    """An empty or mistyped secret is an error."""
    with pytest.raises(UsageError, match="must be whsec_ followed by 24 to 64 bytes"):
        verify(secret, {}, b"")
