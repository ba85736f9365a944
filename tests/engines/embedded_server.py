"""The embedded engine as a server of its own: ``python embedded_server.py FOLDER PORT``.

``POST /swap`` does what a trainer in the same process does with `Engine.swap`.
"""

import asyncio
import sys
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from tugline.inference.engine import Engine
from tugline.inference.load import load
from tugline.inference.server import create_app
from tugline.web.serve import serve

WINDOW = 8192


async def main(folder: Path, port: int) -> None:
    """Serve until killed."""
    model, _, eos_ids = load(folder)
    async with Engine(model, eos_ids=eos_ids, max_model_len=WINDOW, threads=1) as engine:

        async def swap(request: Request) -> Response:
            asked = await request.json()
            fresh, _, _ = load(Path(asked["folder"]))
            await engine.swap(fresh.state_dict(), asked["version"], asked["running"])
            return JSONResponse({})

        own = Route("/swap", swap, methods=["POST"])
        app = Starlette(routes=[own, Mount("/", create_app(engine, model_name="tiny"))])
        async with serve(app, port=port):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
