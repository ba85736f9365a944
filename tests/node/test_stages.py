from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from tugline.node import stages as module
from tugline.node.admission import Admission, Engines, Pressure, pressure
from tugline.node.settings import NodeSettings
from tugline.node.stages import NodeSlots, Pool, Stages
from tugline.types import Status
from tugline.web.serve import serve


def stages(**settings: object) -> Stages:
    """Pools of a node with 4 slots."""
    return Stages(NodeSettings(slots=4, memory_floor_mb=0, **settings), Admission())


async def test_a_pool_goes_by_turn() -> None:
    """Who came first is not who goes first, and a place that nobody wants is free again."""
    pool, order = Pool(1), []

    async def one(turn: tuple[int, int]) -> None:
        async with pool.place(turn):
            order.append(turn)

    async with pool.place((9, 9)):
        tasks = [asyncio.create_task(one(turn)) for turn in ((2, 0), (1, 1), (1, 0), (0, 5))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        assert (pool.busy, pool.waiting) == (1, 3)
    await asyncio.wait(tasks)
    assert order == [(1, 0), (1, 1), (2, 0)]
    assert (pool.busy, pool.waiting) == (0, 0)


async def test_a_place_given_to_somebody_who_leaves_goes_to_the_next() -> None:
    """Cancelled in the moment in which the place came: it is not lost."""
    pool = Pool(1)
    got = asyncio.Event()

    async def one() -> None:
        async with pool.place((0, 0)):
            got.set()

    async with pool.place((0, 0)):
        first = asyncio.create_task(one())
        await asyncio.sleep(0)
        second = asyncio.create_task(one())
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(got.wait(), 1)
    await second
    assert pool.busy == 0


@pytest.mark.parametrize(
    ("init", "run", "most", "target"),
    [
        (None, None, None, 1),
        (None, None, 0, 0),
        (1.0, 100.0, None, 2),
        (50.0, 100.0, None, 4),
        (50.0, 100.0, 9, 6),
        (500.0, 100.0, 9, 9),
    ],
)
async def test_how_many_are_made_ready_ahead(
    init: float | None, run: float | None, most: int | None, target: int
) -> None:
    """One until times are known, then slots x INIT / RUN and a margin, up to the bound."""
    node = stages(ready_max=most)
    if init is not None and run is not None:
        node.times[Status.INIT].add(init)
        node.times[Status.RUN].add(run)
    assert node.target == target


async def test_room_is_what_can_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as INIT takes; with little memory no more than slots are free; behind a jam none."""
    node = stages(inits=3, ready_max=1, evals=1, builds=1)
    assert node.room() == 3
    with contextlib.ExitStack() as stack:
        led = [stack.enter_context(node.course("a", n, None)) for n in range(3)]
        assert node.room() == 0
        for one in led:
            one.past(Status.INIT)
        assert node.room() == 2  # slots 4 + 1 ahead - 3
        monkeypatch.setattr(module, "available_mb", lambda: 0.0)
        low = Stages(NodeSettings(slots=4, ready_max=1), Admission())
        assert low.room() == 4
        for one in led:
            one.past(Status.RUN)
        more = [stack.enter_context(node.course("b", n, None)) for n in range(5)]
        for one in more:
            one.past(Status.RUN)
        assert node.held == 8
        assert node.room() == 0  # slots 4 + 1 ahead + 2 in or before EVAL + 1 in BUILD
    assert (node.held, node.early, node.cold) == (0, 0, 0)


async def test_groups_are_numbered_as_they_come() -> None:
    """And forgotten when their last session is gone."""
    node = stages()
    with node.course("a", 0, None) as first, node.course("b", 1, None) as other:
        assert (_turn(first), _turn(other)) == ((0, 0), (1, 1))
        with node.course("a", 1, None) as second:
            assert _turn(second) == (0, 1)
    assert not node._groups


def _turn(led: NodeSlots) -> tuple[int, int]:
    return led._turn


# --------------------------------------------------------------------------- admission
@pytest.mark.parametrize(
    ("page", "seen"),
    [
        (
            """
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
""",
            Pressure(7, 0.25),
        ),
        (
            "# HELP sglang:num_queue_reqs x\nsglang:num_queue_reqs 2\nsglang:token_usage 0.9\n",
            Pressure(2, 0.9),
        ),
        ('tugline:num_requests_waiting{model_name="m"} 1\n', Pressure(1, 0)),
        ("nothing 1\n", None),
    ],
)
def test_what_engines_say(page: str, seen: Pressure | None) -> None:
    """All data-parallel engines of vLLM, SGLang, the embedded one; others say nothing."""
    assert pressure(page) == seen


class Tells:
    """Engines that say what a test wants."""

    def __init__(self, *pressures: Pressure) -> None:
        self.pressures: Sequence[Pressure] = pressures
        self.asked = 0

    async def __call__(self) -> Sequence[Pressure]:
        """Count, and say it."""
        self.asked += 1
        return self.pressures


async def enter(gate: Admission) -> None:
    """Begin, and end at once."""
    async with gate.admitted():
        pass


async def admitted(gate: Admission, count: int, within_s: float) -> int:
    """How many of so many come through in time."""
    tasks = [asyncio.create_task(enter(gate)) for _ in range(count)]
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    return len(done)


@pytest.mark.parametrize(
    ("engines", "passed"),
    [
        ([Pressure(0, 0.0)], 9),
        ([Pressure(0, 0.5)], 5),
        ([Pressure(9, 0.5)], 0),
        ([Pressure(0, 0.99)], 0),
        ([Pressure(3, 0.5)], 2),
        ([Pressure(9, 0.0), Pressure(0, 0.0)], 9),
        ([Pressure(9, 0.5), Pressure(0, 0.94)], 1),
        ([Pressure(9, 0.5), Pressure(0, 0.97)], 0),
        ([], 9),
    ],
)
async def test_who_may_begin(engines: list[Pressure], passed: int) -> None:
    """As many as fit the queue and the KV memory of any engine; all, if none tells."""
    tells = Tells(*engines)
    gate = Admission(tells, waiting=4)
    gate.inside = 6
    assert await admitted(gate, 9, 0.1) == passed
    assert (tells.asked, gate.inside) == (1, 6)


async def test_the_gate_opens_again() -> None:
    """Those that wait are let in after the next look, and the time they waited is known."""
    tells = Tells(Pressure(9, 0.0))
    gate = Admission(tells, waiting=4, every_s=0.05)
    task = asyncio.create_task(enter(gate))
    await asyncio.sleep(0.1)
    assert gate.held == 1
    tells.pressures = [Pressure(0, 0.0)]
    await asyncio.wait_for(task, 1)
    assert gate.held == 0
    assert gate.held_s > 0.05


async def test_engines_are_asked_over_http() -> None:
    """Their metrics pages; one that is gone is left out."""

    async def app(scope: dict, receive: object, send: object) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()  # type: ignore[operator]
                await send({"type": f"lifespan.{stage}.complete"})  # type: ignore[operator]
            return
        found = scope["path"] == "/metrics"
        await send({"type": "http.response.start", "status": 200 if found else 404})  # type: ignore[operator]
        body = b"vllm:num_requests_waiting 5\n" if found else b""
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    async with serve(app) as url:
        look = Engines([f"{url}/", "http://127.0.0.1:9", f"{url}/elsewhere"])
        assert await look() == [Pressure(5, 0.0)]
