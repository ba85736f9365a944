"""The embedded engine as a process that is trained: ``trained_engine.py FOLDER PORT``.

It has the routes through which a trainer changes and checks the weights of vLLM, and like vLLM it
starts with those in its folder, whatever was published before.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import Qwen3ForCausalLM

from engines.embedded_server import main
from tugline.inference.engine import Engine
from tugline.inference.server import prompt_logprobs
from tugline.types import Ids


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
        model = Qwen3ForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        version = int((await request.json())["new_version"])
        await self._engine.swap(model.state_dict(), version, "keep")
        return JSONResponse({"success": True})

    async def complete(self, request: Request) -> Response:
        """Log probabilities of a prompt of token ids."""
        ids = json.loads(await request.body())["prompt"]
        array: Ids = np.array(ids, np.int32)
        scored = prompt_logprobs(ids, await self._engine.score(array, 1.0))
        return JSONResponse({"choices": [{"prompt_logprobs": scored}]})


def make_routes(engine: Engine) -> list[Route]:
    """Those of vLLM, which hide the engine's own."""
    own = Routes(engine)
    return [
        Route("/v1/models", own.models),
        Route("/weight_info", own.weight_info),
        Route("/collective_rpc", own.reload, methods=["POST"]),
        Route("/pause", own.accept, methods=["POST"]),
        Route("/resume", own.accept, methods=["POST"]),
        Route("/reset_prefix_cache", own.accept, methods=["POST"]),
        Route("/update_weight_version", own.set_version, methods=["POST"]),
        Route("/v1/completions", own.complete, methods=["POST"]),
    ]


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2]), make_routes))
