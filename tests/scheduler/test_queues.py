"""Queues and clocks against sorted lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.scheduler.admission import sequence_of
from gapless.scheduler.queues import Clock, LazyHeap, Timers, WaitingQueue
from tests.scheduler.words import GATEWAY, config, submit

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 9)),
        st.tuples(st.just("discard"), st.integers(0, 400)),
        st.tuples(st.just("pop"), st.just(0)),
    ),
    max_size=400,
)


@given(OPERATIONS)
def test_a_lazy_heap_is_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    heap: LazyHeap[float, str] = LazyHeap()
    model: list[tuple[float, int]] = []
    for ticket, (name, value) in enumerate(operations):
        if name == "push":
            heap.push(float(value), ticket, f"item {ticket}")
            model.append((float(value), ticket))
        elif name == "discard":
            heap.discard(value)
            model = [each for each in model if each[1] != value]
        elif model:
            key, first = min(model)
            assert heap.first() == (key, first, f"item {first}")
            heap.discard(first)
            model.remove((key, first))
        assert len(heap) == len(model)
        assert list(heap) == [f"item {ticket}" for _, ticket in model]
    assert (heap.first() is None) == (not model)


def test_entries_that_left_do_not_pile_up() -> None:
    heap: LazyHeap[float, int] = LazyHeap()
    for ticket in range(10_000):
        heap.push(1.0, ticket, ticket)
        heap.discard(ticket)
    assert len(heap._entries) < 200


def test_an_item_that_comes_back_does_not_pile_up() -> None:
    heap: LazyHeap[float, int] = LazyHeap()
    heap.push(0.0, -1, -1)
    for _ in range(10_000):
        heap.push(1.0, 5, 5)
        heap.discard(5)
    assert len(heap._entries) < 200


def test_the_queue_goes_by_priority_then_arrival() -> None:
    queue = WaitingQueue()
    priorities = (0, -1, 3, 0, 3)
    for arrival, priority in enumerate(priorities):
        word = submit(arrival, prompt_tokens=2, priority=priority)
        queue.push(sequence_of(word, config(), GATEWAY, arrival, now=0.0))
    assert queue.tokens == 10
    order = []
    while (sequence := queue.first()) is not None:
        queue.remove(sequence)
        order.append(sequence.arrival)
    assert order == [2, 4, 0, 3, 1]
    assert queue.tokens == len(queue) == 0


def test_clocks_run_out_in_order_and_stop_with_their_sequence() -> None:
    timers = Timers()
    first, second = (sequence_of(submit(each), config(), GATEWAY, each, now=0.0) for each in (1, 2))
    timers.start(3.0, first, Clock.DEADLINE)
    timers.start(1.0, first, Clock.QUEUE_TIMEOUT)
    timers.start(2.0, second, Clock.TIME_LIMIT)
    assert timers.next_due() == 1.0
    assert timers.pop_due(0.5) is None
    assert timers.pop_due(2.5) == (first, Clock.QUEUE_TIMEOUT)
    assert timers.pop_due(2.5) == (second, Clock.TIME_LIMIT)
    assert timers.pop_due(2.5) is None
    timers.stop_all(first)
    assert timers.next_due() is None
    assert not first.timers
    assert not second.timers
