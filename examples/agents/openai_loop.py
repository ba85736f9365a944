"""A complete coding agent in one file, with the official OpenAI SDK; it knows nothing of Tugline.

    tugline demo --harness shell --command "python3 examples/agents/openai_loop.py"

trains a model under it; a task file names it with

    harness: {name: shell, options: {command: "python3 examples/agents/openai_loop.py"}}

The SDK finds the model through OPENAI_BASE_URL and OPENAI_API_KEY. The tools have the names,
schemas and answers of pi's, so that a model trained under one of the two can work in the other.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

MAX_TURNS = 20
SYSTEM = "You are an expert coding assistant. Use the tools to do what is asked. Be concise."
TEXT = {"type": "string"}


def tool(name: str, description: str, **properties: dict) -> dict:
    """A function tool all of whose `properties` are required."""
    schema = {"type": "object", "required": list(properties), "properties": properties}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


EDIT = {
    "type": "object",
    "required": ["oldText", "newText"],
    "properties": {"oldText": TEXT, "newText": TEXT},
}
TOOLS = [
    tool("read", "Read the contents of a file.", path=TEXT),
    tool("bash", "Execute a bash command in the current working directory.", command=TEXT),
    tool(
        "edit",
        "Edit a single file using exact text replacement. Every edits[].oldText must be unique.",
        path=TEXT,
        edits={"type": "array", "items": EDIT},
    ),
]


def read(path: str, **_: object) -> str:
    """The text of a file."""
    return Path(path).read_text()


def bash(command: str, timeout: float = 60, **_: object) -> str:
    """Output of a command."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=timeout, check=False
    )
    output = (done.stdout + done.stderr) or "(no output)"
    return output + (f"\n\nCommand exited with code {done.returncode}" if done.returncode else "")


def edit(path: str, edits: list[dict[str, str]], **_: object) -> str:
    """Replace texts, each of which must be in the file exactly once."""
    text = Path(path).read_text()
    for number, change in enumerate(edits):
        found = text.count(change["oldText"])
        if found != 1:
            msg = f"edits[{number}]: oldText was found {found} times in {path}; it must be unique."
            raise ValueError(msg)
        text = text.replace(change["oldText"], change["newText"])
    Path(path).write_text(text)
    return f"Successfully replaced {len(edits)} block(s) in {path}."


def use(name: str, arguments: str) -> str:
    """What a tool answers; the model gets to read its own mistakes."""
    try:
        return {"read": read, "bash": bash, "edit": edit}[name](**json.loads(arguments))
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Ask, use the tools that are called for, until the model answers without any."""
    client = OpenAI()
    messages: list = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": os.environ["TUGLINE_INSTRUCTION"]},
    ]
    for _turn in range(MAX_TURNS):
        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS, stream=True
        ):
            state.handle_chunk(chunk)
        answer = state.get_final_completion().choices[0].message
        messages.append(answer.model_dump(include={"role", "content", "tool_calls"}))
        if not answer.tool_calls:
            print(answer.content)
            return
        for call in answer.tool_calls:
            text = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


if __name__ == "__main__":
    main()
