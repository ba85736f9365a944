"""CrewAI, over Chat Completions."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from framework_script import read, run


async def main(url: str, key: str, _: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    llm = LLM(model="openai/m", base_url=f"{url}/v1", api_key=key, stream=streamed)
    agent = Agent(
        role="reader", goal="Read.", backstory="You read.", tools=[tool("read")(read)], llm=llm
    )
    task = Task(description="Mend it.", expected_output="A word", agent=agent)
    return str(await Crew(agents=[agent], tasks=[task]).kickoff_async())


run(main)
