"""LangGraph: LangChain's agent, over Chat Completions, Responses or Anthropic Messages."""

import asyncio
from typing import Any

from framework_script import API, HOW, KEY, URL, read, report
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def make_model() -> Any:
    """The model of this API."""
    if API == "anthropic":
        return ChatAnthropic(model="m", base_url=URL, api_key=KEY)
    responses = API == "openai_responses"
    return ChatOpenAI(model="m", base_url=f"{URL}/v1", api_key=KEY, use_responses_api=responses)


async def main() -> str:
    """Run the agent; return its last answer."""
    agent = create_agent(make_model(), [tool(read)], system_prompt="You read.")
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


report(asyncio.run(main()))
