"""A fake agent that makes real model calls: a conversation of a few turns, then a file.

Standard library only, so that hundreds of them start quickly. The instruction is JSON: `turns`, and
`pause_s` between them. Failed requests are repeated, as by an SDK.
"""

import http.client
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

TRIES = 8


def ask(messages: list[dict[str, str]]) -> str:
    """Request the model's answer to a conversation."""
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    url = urlsplit(base)
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    for attempt in range(TRIES):
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
        headers = {
            "authorization": f"Bearer {key}",
            "content-type": "application/json",
            "x-stainless-retry-count": str(attempt),
        }
        try:
            connection.request("POST", f"{url.path}/chat/completions", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status < 400:
                return json.loads(text)["choices"][0]["message"]["content"]
            if answer.status < 500 and answer.status != 429:
                sys.exit(f"refused: {answer.status} {text[:300]!r}")
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2 * 2**attempt if attempt < 4 else 3)
    sys.exit("the model did not answer")


def main() -> None:
    """Hold the conversation, then write its last answer to a file."""
    plan = json.loads(os.environ["TUGLINE_INSTRUCTION"])
    messages: list[dict[str, str]] = []
    for turn in range(plan["turns"]):
        messages.append({"role": "user", "content": f"turn {turn}: go on"})
        messages.append({"role": "assistant", "content": ask(messages)})
        time.sleep(plan["pause_s"])
    Path("answer.txt").write_text(messages[-1]["content"], encoding="utf-8")


if __name__ == "__main__":
    main()
