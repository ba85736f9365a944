"""Simon Willison's `llm`, over Chat Completions."""

import asyncio

from framework_script import read, run
from llm.default_plugins.openai_models import Chat


async def main(url: str, key: str, _: str, *, streamed: bool) -> str:
    """Run the agent; return its last answer."""
    model = Chat("m", key=key, model_name="m", api_base=f"{url}/v1", supports_tools=True)
    chain = model.conversation().chain(
        "Mend it.", system="You read.", tools=[read], stream=streamed
    )
    return await asyncio.to_thread(lambda: [answer.text() for answer in chain.responses()][-1])


run(main)
