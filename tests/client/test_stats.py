"""Statistics, through the client and through the command."""

from __future__ import annotations

import asyncio
import json

import pytest

from gapless.client import Client
from tests.client.standin import Standin
from tests.client.test_command import NOBODY, gapless, with_server


def test_device_time_is_summed_over_executors() -> None:
    async def body(server: Standin) -> None:
        async with Client(server.address, admin_address=server.address) as client:
            stats = await client.stats()
            watched = [each.bubble_counts[0] async for each in client.watch_stats()]
        assert stats.device_active_s == pytest.approx(1.4)
        assert stats.device_gaps_s == {
            "no_request": 0.5,
            "scheduler": 0.06,
            "border_and_upload": 0.03,
            "launch": 0.01,
        }
        assert (stats.bubble_bounds_us, stats.bubble_counts) == ((10, 100), (100, 0, 2))
        assert (stats.step_bounds_us, stats.step_token_counts) == ((7,), (30, 4))
        assert watched == [100, 200, 300]

    with_server(body)


def test_stats_are_since_start_or_since_the_snapshot_before() -> None:
    async def body(server: Standin) -> None:
        once = await gapless("stats", "--admin", server.address)
        assert (once.code, once.err) == (0, "")
        assert once.out.splitlines()[-2:] == [
            "device     70.00 % active; no request 25.00 %; "
            "bubbles: scheduler 3.00 %, border and upload 1.50 %, launch 0.50 %",
            "bubbles    p50 at most 10 µs, p99 more than 100 µs",
        ]
        watched = await gapless("stats", "--watch", GAPLESS_ADMIN=server.address)
        first, second, _ = watched.out.split("\n\n")
        assert f"{first}\n" == once.out
        assert second.splitlines()[-2:] == [
            "device     100.00 % active; no request 0.00 %; "
            "bubbles: scheduler 0.00 %, border and upload 0.00 %, launch 0.00 %",
            "bubbles    p50 at most 10 µs, p99 at most 10 µs",
        ]
        ran = await gapless("stats", "--watch", "--json", "--admin", server.address)
        lines = [json.loads(line) for line in ran.out.splitlines()]
        assert [line["bubble_counts"] for line in lines] == [[n, 0, 2] for n in (100, 200, 300)]
        assert lines[0]["device_gaps_s"]["no_request"] == 0.5

    with_server(body)


def test_stats_need_an_address() -> None:
    ran = asyncio.run(gapless("stats", GAPLESS_ADMIN=""))
    assert ran.code == 2
    ran = asyncio.run(gapless("stats", "--admin", NOBODY))
    assert ran.code == 3
    assert ran.err == (
        f"no admin service at {NOBODY}: start one with `gapless serve --admin-listen`\n"
    )
