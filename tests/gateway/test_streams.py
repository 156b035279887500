"""Token logs against a naive model: each token once, in order, whatever comes when."""

from __future__ import annotations

import asyncio
import time
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.gateway.streams import WAKES_PER_TURN, Stream, Streams
from gapless.protos.messages import (
    Cancel,
    CancelCause,
    Failed,
    Finished,
    FinishReason,
    GatewayWord,
    PrefillStarted,
    Stopping,
    Submit,
    Timing,
    Update,
)
from gapless.protos.reasons import Reason
from gapless.protos.sampling import Sampling

NOW_S = 1000.0


def opened(streams: Streams, tokens_max: int = 1000, flush_interval_s: float = 0.0) -> Stream:
    handle = streams.draw_handle()
    stopping = Stopping(tokens_max)
    submit = Submit(handle, f"r{handle}", "t", b"\0\0\0\0", Sampling(), stopping, 0.0)
    return streams.open(submit, flush_interval_s)


def update(pairs: list[tuple[int, int]], *events: PrefillStarted | Finished | Failed) -> Update:
    handles = array("q", [handle for handle, _ in pairs]).tobytes()
    tokens = array("i", [token for _, token in pairs]).tobytes()
    return Update(handles, tokens, events)


def finished(stream: Stream, count: int) -> Finished:
    return Finished(stream.handle, FinishReason.MAX_NEW_TOKENS, count, 0, 0, Timing())


BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**31 - 1)), max_size=8), max_size=12
)


@settings(deadline=None)
@given(batches=BATCHES, take_max=st.integers(1, 5))
def test_every_token_arrives_once_and_in_order(
    batches: list[list[tuple[int, int]]], take_max: int
) -> None:
    """Handles 1 to 3 are live; 0 and 4 are of streams that ended or never were."""

    async def scenario() -> None:
        streams = Streams(lambda word: None, slow_consumer_s=30.0)
        logs = {stream.handle: stream for stream in (opened(streams) for _ in range(3))}
        got: dict[int, list[int]] = {handle: [] for handle in logs}

        async def read(stream: Stream) -> None:
            while not (stream.ended and stream.taken == len(stream.tokens)):
                await stream.wait_due()
                got[stream.handle].extend(stream.take(take_max))

        readers = [asyncio.create_task(read(stream)) for stream in logs.values()]
        for index, batch in enumerate(batches):
            streams.apply(update(batch), NOW_S)
            if index % 2:
                await asyncio.sleep(0)
        sent = [pair for batch in batches for pair in batch]
        for stream in logs.values():
            streams.apply(update([], finished(stream, len(stream.tokens))), NOW_S)
        await asyncio.gather(*readers)
        for handle, tokens in got.items():
            assert tokens == [token for to, token in sent if to == handle]

    asyncio.run(scenario())


def test_burst_wakes_a_stream_once() -> None:
    async def scenario() -> None:
        streams = Streams(lambda word: None, slow_consumer_s=30.0)
        stream = opened(streams)
        rounds: list[int] = []

        async def read() -> None:
            await stream.wait_prefilling()
            while not stream.ended:
                await stream.wait_due()
                rounds.append(len(stream.take(100)))

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        streams.apply(update([], PrefillStarted(stream.handle, 0.0)), NOW_S)
        streams.apply(update([(stream.handle, 7)] * 5), NOW_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        streams.apply(update([(stream.handle, 7)] * 3), NOW_S)
        streams.apply(update([(stream.handle, 7)] * 2, finished(stream, 10)), NOW_S)
        await reader
        assert rounds == [5, 5]

    asyncio.run(scenario())


def test_first_token_goes_first_and_the_others_in_turns() -> None:
    """What a step brings is written over many turns of the loop, so that no turn takes long."""

    async def scenario() -> None:
        streams = Streams(lambda word: None, slow_consumer_s=30.0)
        old = [opened(streams) for _ in range(5 * WAKES_PER_TURN)]
        streams.apply(update([(stream.handle, 1) for stream in old]), NOW_S)
        woken: list[Stream] = []

        async def read(stream: Stream) -> None:
            while True:
                await stream.wait_due()
                stream.take(100)
                woken.append(stream)

        readers = [asyncio.create_task(read(stream)) for stream in old]
        await asyncio.sleep(0)
        new = opened(streams)
        readers.append(asyncio.create_task(read(new)))
        await asyncio.sleep(0)
        woken.clear()
        streams.apply(update([(stream.handle, 2) for stream in (*old, new)]), NOW_S)
        counts = []
        while len(woken) <= len(old):
            before = len(woken)
            await asyncio.sleep(0)
            counts.append(len(woken) - before)
        assert woken == [new, *old]
        assert max(counts) <= WAKES_PER_TURN
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    asyncio.run(scenario())


def test_tokens_wait_for_the_first_update_after_the_flush_interval() -> None:
    async def scenario() -> None:
        streams = Streams(lambda word: None, slow_consumer_s=30.0)
        stream = opened(streams, flush_interval_s=1000.0)
        begin_s = time.monotonic()
        rounds: list[tuple[int, int]] = []

        async def read() -> None:
            while not stream.ended:
                await stream.wait_due()
                rounds.append((number, len(stream.take(100))))

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for number in range(6):
            streams.apply(update([(stream.handle, 7)]), begin_s + 400.0 * number)
            for _ in range(3):
                await asyncio.sleep(0)
        assert rounds == [(0, 1), (3, 3)]
        streams.apply(update([], finished(stream, 6)), begin_s)
        await reader
        assert rounds[2:] == [(5, 2)]

    asyncio.run(scenario())


def test_a_timer_that_runs_out_before_its_streams_turn_wakes_nobody() -> None:
    async def scenario() -> None:
        streams = Streams(lambda word: None, slow_consumer_s=30.0)
        others = [opened(streams) for _ in range(2 * WAKES_PER_TURN - 1)]
        stream = opened(streams, flush_interval_s=1.0)
        now_s = time.monotonic()
        rounds: list[int] = []

        async def read(each: Stream) -> None:
            while not each.ended:
                await each.wait_due()
                tokens = each.take(100)
                if each is stream:
                    rounds.append(len(tokens))
                if each is stream and len(rounds) == 2:  # while that is sent, one comes too soon
                    streams.apply(update([(int(stream.handle), 7)]), now_s + 1000.5)

        readers = [asyncio.create_task(read(each)) for each in (*others, stream)]
        everyone = [(int(each.handle), 7) for each in (*others, stream)]
        streams.apply(update(everyone), now_s - 9.0)
        for _ in range(3):
            await asyncio.sleep(0)
        streams.apply(update([(stream.handle, 7)]), now_s - 8.5)  # its timer has run out
        streams.apply(update(everyone), now_s + 1000.0)
        for _ in range(9):
            await asyncio.sleep(0)
        assert rounds == [1, 2]
        for each in (*others, stream):
            streams.apply(update([], finished(each, len(each.tokens))), now_s)
        await asyncio.gather(*readers)
        assert rounds == [1, 2, 1]

    asyncio.run(scenario())


def test_closing_tells_the_scheduler_only_of_what_lives() -> None:
    async def scenario() -> None:
        words: list[GatewayWord] = []
        streams = Streams(words.append, slow_consumer_s=30.0)
        lives, ended, failed = (opened(streams) for _ in range(3))
        streams.apply(update([], finished(ended, 0)), NOW_S)
        streams.apply(update([], Failed(failed.handle, Reason.QUEUE_FULL, "full")), NOW_S)
        assert failed.refused is not None
        words.clear()
        for stream in (lives, ended, failed, lives):
            streams.close(stream, CancelCause.CLIENT)
        assert words == [Cancel((lives.handle,), CancelCause.CLIENT)]
        assert len(streams) == 0
        streams.apply(update([(lives.handle, 1)], finished(lives, 1)), NOW_S)
        await streams.wait_idle()

    asyncio.run(scenario())
