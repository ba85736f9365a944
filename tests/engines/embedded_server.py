"""The embedded engine as a server of its own: ``python embedded_server.py FOLDER PORT``.

``POST /swap`` does what a trainer in the same process does with `Engine.swap`.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tugline.inference.engine import Engine
from tugline.inference.load import load
from tugline.inference.server import create_app
from tugline.web.serve import serve


async def main(folder: Path, port: int, make_routes: Callable[[Engine], list[Route]]) -> None:
    """Serve the model in `folder`, with more routes than the engine's own, until killed."""
    model, _, eos_ids = load(folder, dtype=torch.float32)
    window = model.config.max_position_embeddings
    async with Engine(model, eos_ids=eos_ids, max_model_len=window, threads=1) as engine:
        routes = [*make_routes(engine), Mount("/", create_app(engine, model_name="tiny"))]
        async with serve(Starlette(routes=routes), port=port):
            await asyncio.Event().wait()


def make_swap_route(engine: Engine) -> list[Route]:
    """The route of a trainer."""

    async def swap(request: Request) -> Response:
        asked = await request.json()
        fresh, _, _ = load(Path(asked["folder"]))
        await engine.swap(fresh.state_dict(), asked["version"], asked["running"])
        return JSONResponse({})

    return [Route("/swap", swap, methods=["POST"])]


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), make_swap_route))
