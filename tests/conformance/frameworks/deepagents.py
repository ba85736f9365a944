"""deepagents: LangGraph's agent with planning, files and sub-agents, over Chat Completions."""

from deepagents import create_deep_agent
from framework_script import read, run
from langchain_openai import ChatOpenAI


async def main(url: str, key: str, _: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, streaming=streamed)
    agent = create_deep_agent(model=model, tools=[read], system_prompt="You read.")
    start = {"messages": [{"role": "user", "content": "Mend it."}]}
    return (await agent.ainvoke(start))["messages"][-1].text


run(main)
