"""LangGraph: LangChain's agent, over Chat Completions, Responses or Anthropic Messages."""

import asyncio
import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

URL, KEY, API, HOW = sys.argv[1:]
read_paths: list[str] = []


@tool
def read(path: str) -> str:
    """Read a file."""
    read_paths.append(path)
    return f"{path} is there"


def make_model() -> Any:
    """The model of this API."""
    if API == "anthropic":
        return ChatAnthropic(model="m", base_url=URL, api_key=KEY)
    responses = API == "openai_responses"
    return ChatOpenAI(model="m", base_url=f"{URL}/v1", api_key=KEY, use_responses_api=responses)


async def main() -> str:
    """What it says in the end."""
    agent = create_agent(make_model(), [read], system_prompt="You read.")
    start = {"messages": [{"role": "user", "content": "Mend it."}]}
    if HOW == "whole":
        return (await agent.ainvoke(start))["messages"][-1].text
    parts, last = [], ""
    async for chunk, about in agent.astream(start, stream_mode="messages"):
        if about["langgraph_node"] == "model":
            if chunk.id != last:
                parts, last = [], chunk.id
            parts.append(chunk.text)
    return "".join(parts)


print(json.dumps({"text": asyncio.run(main()), "read": read_paths}))
