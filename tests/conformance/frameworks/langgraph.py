"""LangGraph: LangChain's agent, over Chat Completions, Responses or Anthropic Messages."""

from typing import Any

from framework_script import read, run
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


def make_model(url: str, key: str, api: str) -> Any:
    """The model of this API."""
    if api == "anthropic":
        return ChatAnthropic(model="m", base_url=url, api_key=key)
    responses = api == "openai_responses"
    return ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, use_responses_api=responses)


async def main(url: str, key: str, api: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    agent = create_agent(make_model(url, key, api), [tool(read)], system_prompt="You read.")
    start = {"messages": [{"role": "user", "content": "Mend it."}]}
    if not streamed:
        return (await agent.ainvoke(start))["messages"][-1].text
    parts, last = [], ""
    async for chunk, about in agent.astream(start, stream_mode="messages"):
        if about["langgraph_node"] == "model":
            if chunk.id != last:
                parts, last = [], chunk.id
            parts.append(chunk.text)
    return "".join(parts)


run(main)
