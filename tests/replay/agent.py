"""A minimal agent: ask, run the called commands in a shell, until an answer calls no tool."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run a command.", "parameters": COMMAND}
messages = [
    {"role": "system", "content": f"You work in {os.getcwd()}."},  # noqa: PTH109 - may be a symlink
    {"role": "user", "content": os.environ["TUGLINE_INSTRUCTION"]},
]
while True:
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    request = urllib.request.Request(  # noqa: S310 - the gateway's address
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        answer = json.load(reply)["choices"][0]["message"]
    messages.append(answer)
    if not answer.get("tool_calls"):
        break
    for call in answer["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr or "(no output)"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
