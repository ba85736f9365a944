"""An agent for a very small model: one shell command per turn, whose output is sent back."""

import json
import os
import re
import subprocess
import urllib.request

TURNS = 3
SYSTEM = """\
You work in a Linux shell. Answer with one shell command and nothing else. For example:
User: Show what is in the file notes.txt.
Answer: cat notes.txt
User: Make the file run.sh executable.
Answer: chmod +x run.sh"""


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    headers = {
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "content-type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - the gateway
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def main() -> None:
    """Run the model's commands until one succeeds, at most three."""
    instruction = os.environ["TUGLINE_INSTRUCTION"]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for _ in range(TURNS):
        answer = ask(messages)
        block = re.search(r"```\w*\n(.*?)```", answer, re.DOTALL)
        command = (block[1] if block else answer.removeprefix("Answer:")).strip().strip("`")
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=10,
            text=True,
            check=False,
        )
        print(f"$ {command}\n{done.stdout}({done.returncode})", flush=True)
        if not done.returncode:
            return
        output = f"{done.stdout[-400:]}\nIt failed. Answer with another command."
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": output})


if __name__ == "__main__":
    main()
