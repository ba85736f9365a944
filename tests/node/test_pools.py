"""Slots of the stages, and how much work a node asks for."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tugline.node.admission import Admission
from tugline.node.pools import Pool, Pools
from tugline.node.settings import NodeSettings
from tugline.types import Status


def make_pools(**settings: object) -> Pools:
    """Pools of a node with 4 slots."""
    return Pools(NodeSettings(slots=4, memory_floor_mb=0, **settings), Admission())


async def test_a_pool_serves_by_turn() -> None:
    """The lowest turn is next, whenever it came; cancelled waiters are skipped."""
    pool, order = Pool(1), []

    async def acquire(turn: tuple[int, int]) -> None:
        async with pool.acquire(turn):
            order.append(turn)

    async with pool.acquire((9, 9)):
        tasks = [asyncio.create_task(acquire(turn)) for turn in ((2, 0), (1, 1), (1, 0), (0, 5))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        assert (pool.busy, pool.waiting) == (1, 3)
    await asyncio.wait(tasks)
    assert order == [(1, 0), (1, 1), (2, 0)]
    assert (pool.busy, pool.waiting) == (0, 0)


async def test_a_slot_given_to_a_cancelled_waiter_is_not_lost() -> None:
    """The next waiter gets the slot of the cancelled one."""
    pool = Pool(1)
    got = asyncio.Event()

    async def acquire() -> None:
        async with pool.acquire((0, 0)):
            got.set()

    async with pool.acquire((0, 0)):
        first = asyncio.create_task(acquire())
        await asyncio.sleep(0)
        second = asyncio.create_task(acquire())
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(got.wait(), 20)
    await second
    assert pool.busy == 0


@pytest.mark.parametrize(
    ("init_s", "most", "target"),
    [(None, None, 1), (None, 0, 0), (1.0, None, 2), (50.0, None, 4), (50.0, 9, 6), (500.0, 9, 9)],
)
async def test_target_of_ready_sessions(
    init_s: float | None, most: int | None, target: int
) -> None:
    """The target is one until times are known, then slots * INIT / RUN and a margin, bounded."""
    node = make_pools(ready_max=most)
    if init_s is not None:
        node.mean_s[Status.INIT].add(init_s)
        node.mean_s[Status.RUN].add(100.0)
    assert node.target == target


@pytest.mark.parametrize(
    ("passed", "available_mb", "room"),
    [
        ([], 1e6, 3),
        ([None] * 3, 1e6, 0),
        ([Status.INIT] * 3, 1e6, 2),  # slots 4 + 1 ahead - 3
        ([Status.INIT] * 3, 0.0, 1),
        ([Status.RUN] * 8, 1e6, 0),  # slots 4 + 1 ahead + 2 in or before EVAL + 1 in BUILD
    ],
    ids=["empty", "INIT is full", "one ahead", "little memory", "a jam"],
)
def test_room_is_what_can_start_at_once(
    passed: list[Status | None], available_mb: float, room: int
) -> None:
    """Capacity is bounded by INIT slots, by free slots with little memory, and by a full stage."""
    limits = {"ready_max": 1, "max_evaluating": 1, "max_building": 1}
    settings = NodeSettings(slots=4, max_initializing=3, **limits)
    node = Pools(settings, Admission(), read_available_mb=lambda: available_mb)
    with contextlib.ExitStack() as stack:
        for n, stage in enumerate(passed):
            stack.enter_context(node.enter("a", n, None)).passed = stage
        assert node.count_room() == room
    assert not node.members


async def test_groups_are_numbered_in_order_of_arrival() -> None:
    """Late samples get their group's number; the last session drops the number."""
    node = make_pools()
    early, other, late = (node.enter(*whose, None) for whose in (("a", 0), ("b", 1), ("a", 1)))
    with early, other as second, late as third:
        assert (second.turn, third.turn) == ((1, 1), (0, 1))
    with node.enter("a", 0, None) as again:
        assert again.turn == (2, 0)


# --------------------------------------------------------------------------- busy processors
def read_sizes(pools: Pools) -> tuple[int, int]:
    """Slots of RUN and EVAL."""
    return pools.by_stage[Status.RUN].size, pools.by_stage[Status.EVAL].size


def test_evaluations_without_processors_lower_the_slots() -> None:
    """Slots fall to one per processor; evaluations that need not wait raise them again."""
    pools = Pools(NodeSettings(slots=10, memory_floor_mb=0), Admission(), processors=2)
    sizes = []
    for _ in range(8):
        pools.note_waits(9.0, 10.0)
        sizes.append(read_sizes(pools))
    assert sizes[0] == (8, 8)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == (2, 2)
    assert pools.count_room() == 3, "two, and one ahead"
    for _ in range(20):
        pools.note_waits(0.1, 10.0)
    assert read_sizes(pools) == (10, 10)


def test_slots_are_never_fewer_than_processors() -> None:
    """A node with fewer slots than processors keeps them all."""
    pools = Pools(NodeSettings(slots=2, memory_floor_mb=0), Admission(), processors=16)
    pools.note_waits(10.0, 10.0)
    assert read_sizes(pools) == (2, 2)


async def test_a_smaller_pool_gives_no_slot_until_enough_are_free() -> None:
    """A smaller pool first gets slots back; a larger one serves those that wait."""
    pool, running = Pool(3), []

    async def hold(number: int, end: asyncio.Event) -> None:
        async with pool.acquire((number, 0)):
            running.append(number)
            await end.wait()

    ends = [asyncio.Event() for _ in range(5)]
    tasks = [asyncio.create_task(hold(number, end)) for number, end in enumerate(ends)]
    await asyncio.sleep(0)
    pool.resize(1)
    for number in (0, 1):
        ends[number].set()
        await asyncio.wait({tasks[number]})
        await asyncio.sleep(0)
    assert (running, pool.busy, pool.waiting) == ([0, 1, 2], 1, 2)
    pool.resize(3)
    await asyncio.sleep(0)
    assert (running, pool.busy) == ([0, 1, 2, 3, 4], 3)
    for end in ends:
        end.set()
    await asyncio.wait(tasks)
    assert pool.busy == 0
