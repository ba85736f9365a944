"""Render messages to token ids; parse token ids back to messages."""

import contextlib
import sys
from types import SimpleNamespace

if "openai" not in sys.modules:
    # `renderers` imports the OpenAI SDK, only for annotations of a client that is not used here: a
    # third of a node's start-up time, and 32 MB in every process.
    sys.modules["openai"] = SimpleNamespace(AsyncOpenAI=object)  # type: ignore[assignment]
    with contextlib.suppress(ImportError, ValueError):  # a newer version may need more of it
        import renderers  # noqa: F401
    del sys.modules["openai"]
