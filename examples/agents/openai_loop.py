"""A complete coding agent in one file, with the official OpenAI SDK and without Tugline.

    tugline demo --harness shell --command "python3 examples/agents/openai_loop.py"

trains a model with it. A task file selects it with

    harness: {name: shell, options: {command: "python3 examples/agents/openai_loop.py"}}

The SDK reads OPENAI_BASE_URL and OPENAI_API_KEY. The tools have the names, schemas and results of
pi's tools, so that a model trained with one of the two agents can work with the other.
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
    """Define a function tool; all `properties` are required."""
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
    """Return the text of a file."""
    return Path(path).read_text()


def bash(command: str, timeout: float = 60, **_: object) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=timeout, check=False
    )
    output = (done.stdout + done.stderr) or "(no output)"
    return output + (f"\n\nCommand exited with code {done.returncode}" if done.returncode else "")


def edit(path: str, edits: list[dict[str, str]], **_: object) -> str:
    """Replace texts, each of which must occur exactly once in the file."""
    text = Path(path).read_text()
    for number, change in enumerate(edits):
        count = text.count(change["oldText"])
        if count != 1:
            msg = f"edits[{number}]: oldText was found {count} times in {path}; it must be unique."
            raise ValueError(msg)
        text = text.replace(change["oldText"], change["newText"])
    Path(path).write_text(text)
    return f"Successfully replaced {len(edits)} block(s) in {path}."


def use(name: str, arguments: str) -> str:
    """Call a tool and return its result; the model also gets the errors of its calls."""
    try:
        return {"read": read, "bash": bash, "edit": edit}[name](**json.loads(arguments))
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Call the model and its tools until it answers without a tool call."""
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
