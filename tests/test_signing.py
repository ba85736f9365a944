from __future__ import annotations

import time

import pytest

from tugline.errors import BadSignature, UsageError
from tugline.signing import key_of, new_secret, sign, verify

SECRET = new_secret()


def test_a_signature_is_that_of_the_standard() -> None:
    """The example that the Standard Webhooks libraries are tested with."""
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_genuine_callback_is_known_by_its_id() -> None:
    """Header names in any case, several signatures while a secret is being replaced."""
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
def test_a_callback_that_was_changed_or_is_old_is_refused(
    change: dict[str, str], body: bytes, age_s: int
) -> None:
    """Neither id, time, signature nor body can be another, and none is good for much later."""
    when = int(time.time()) - age_s
    headers = {"webhook-id": "x_1", "webhook-timestamp": str(when)}
    headers["webhook-signature"] = sign(key_of(SECRET), "x_1", when, b"{}")
    with pytest.raises(BadSignature):
        verify(SECRET, headers | change, body)


def test_a_callback_without_a_signature_is_refused() -> None:
    """The error says which header is missing."""
    with pytest.raises(BadSignature, match="Missing"):
        verify(SECRET, {}, b"{}")


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_AAAA", "whsec_!", "bm8gcHJlZml4LCBzbyBub3Qgb25lIG9mIG91cnM="]
)
def test_a_secret_must_be_one(secret: str) -> None:
    """An empty or mistyped secret is an error, not an open door."""
    with pytest.raises(UsageError, match="must be whsec_ and 24 to 64 bytes"):
        verify(secret, {}, b"")
