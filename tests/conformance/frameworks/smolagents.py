"""smolagents: the agent that calls tools, over Chat Completions."""

import json
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

URL, KEY, API, HOW = sys.argv[1:]
read_paths: list[str] = []


@tool
def read(path: str) -> str:
    """Read a file.

    Args:
        path: Where it is.
    """
    read_paths.append(path)
    return f"{path} is there"


model = OpenAIModel("m", api_base=f"{URL}/v1", api_key=KEY)
agent = ToolCallingAgent(
    [read], model, stream_outputs=HOW == "streamed", verbosity_level=LogLevel.OFF
)
text = str(agent.run("Mend it."))
print("\n" + json.dumps({"text": text, "read": read_paths}))
