"""The embedded engine as a server of its own: ``embedded_server.py FOLDER PORT [vllm]``.

A trainer changes its weights by the routes of vLLM, and like vLLM it starts with those in its
folder, whatever was published before. With ``vllm`` it claims to be vLLM, so that prompts are
scored by vLLM's route.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from transformers import AutoModelForCausalLM

from tugline.inference.engine import Engine
from tugline.inference.load import load
from tugline.inference.server import create_app, prompt_logprobs
from tugline.web.serve import serve


class Routes:
    """vLLM's routes for weights, and for log probabilities of a prompt."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._folder = ""

    async def models(self, _request: Request) -> Response:
        """One model, as vLLM lists it."""
        card = {"id": "tiny", "owned_by": "vllm", "max_model_len": self._engine.max_model_len}
        return JSONResponse({"data": [card]})

    async def weight_info(self, _request: Request) -> Response:
        """Version of the weights."""
        return JSONResponse({"weight_version": str(self._engine.version)})

    async def reload(self, request: Request) -> Response:
        """``reload_weights``; they are used once they have a version."""
        self._folder = (await request.json())["kwargs"]["weights_path"]
        return JSONResponse({})

    async def accept(self, _request: Request) -> Response:
        """Answer what a swap does by itself: the pause, and ``reset_prefix_cache``."""
        return JSONResponse({})

    async def set_version(self, request: Request) -> Response:
        """Use the weights that were loaded."""
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        version = int((await request.json())["new_version"])
        await self._engine.swap(model.state_dict(), version, "keep")
        return JSONResponse({"success": True})

    async def complete(self, request: Request) -> Response:
        """Log probabilities of a prompt of token ids."""
        ids = (await request.json())["prompt"]
        logprobs = await self._engine.score(np.array(ids, np.int32), 1.0)
        scored = prompt_logprobs(ids, logprobs)
        return JSONResponse({"choices": [{"prompt_logprobs": scored}]})


async def main(folder: str, port: str, owner: str = "tugline") -> None:
    """Serve the model in `folder` until killed; these routes hide the engine's own."""
    model, _, eos_ids = load(Path(folder), dtype=torch.float32)
    window = model.config.max_position_embeddings
    async with Engine(model, eos_ids=eos_ids, max_model_len=window, threads=1) as engine:
        own = Routes(engine)
        posted = dict.fromkeys(("/pause", "/resume", "/reset_prefix_cache"), own.accept)
        posted |= {"/collective_rpc": own.reload, "/update_weight_version": own.set_version}
        routes = [Route("/weight_info", own.weight_info)]
        if owner == "vllm":
            routes.append(Route("/v1/models", own.models))
            posted["/v1/completions"] = own.complete
        routes += [Route(path, answer, methods=["POST"]) for path, answer in posted.items()]
        app = Starlette(routes=[*routes, Mount("/", create_app(engine, model_name="tiny"))])
        async with serve(app, port=int(port)):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
