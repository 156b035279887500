"""The supervisor's decisions, without a process."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.client.supervision import (
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    ChildExited,
    ChildReady,
    DeadlinePassed,
    Effect,
    Ended,
    Input,
    Kill,
    Plan,
    Say,
    Serving,
    SessionEnded,
    SetDeadline,
    Start,
    State,
    StopRequested,
    Supervision,
    Terminate,
    describe,
)

NAMES = ("scheduler", "executor", "gateway-0", "gateway-1")
PLAN = Plan(
    start=(("scheduler",), ("executor", "gateway-0", "gateway-1")),
    stop=(("gateway-0", "gateway-1"), ("scheduler",), ("executor",)),
    doing=dict.fromkeys(NAMES, "starting"),
    start_timeout_s=30.0,
    stop_timeout_s=60.0,
)


def acts(effects: list[Effect]) -> list[Effect]:
    """The effects without the words and the clock."""
    return [effect for effect in effects if not isinstance(effect, Say | SetDeadline)]


def said(effects: list[Effect]) -> str:
    return "\n".join(effect.text for effect in effects if isinstance(effect, Say))


def deadline(effects: list[Effect]) -> int:
    (number,) = [effect.number for effect in effects if isinstance(effect, SetDeadline)]
    return number


def serving() -> Supervision:
    core = Supervision(PLAN)
    core.begin(0.0)
    for name in NAMES:
        core.step(ChildReady(name, f"ready of {name}"), 1.0)
    assert core.state is State.SERVING
    return core


def test_starts_in_order_and_says_how_long_it_took() -> None:
    core = Supervision(PLAN)
    assert acts(core.begin(0.0)) == [Start("scheduler")]
    effects = core.step(ChildReady("scheduler", "ready"), 0.5)
    assert acts(effects) == [Start("executor"), Start("gateway-0"), Start("gateway-1")]
    assert "scheduler: ready after 0.5 s" in said(effects)
    assert acts(core.step(ChildReady("gateway-1", "ready b"), 1.0)) == []
    assert acts(core.step(ChildReady("gateway-1", "ready again"), 1.0)) == []
    assert acts(core.step(ChildReady("executor", "ready"), 2.0)) == []
    assert acts(core.step(ChildReady("gateway-0", "ready a"), 3.7)) == [
        Serving(
            {"scheduler": "ready", "executor": "ready", "gateway-0": "ready a"}
            | {"gateway-1": "ready b"}
        )
    ]


def test_stops_in_order_each_stage_after_the_one_before() -> None:
    core = serving()
    effects = core.step(StopRequested("SIGTERM"), 5.0)
    assert acts(effects) == [Terminate("gateway-0"), Terminate("gateway-1")]
    assert acts(core.step(ChildExited("gateway-0", 0), 6.0)) == []
    assert acts(core.step(ChildExited("gateway-1", 0), 6.0)) == [Terminate("scheduler")]
    assert acts(core.step(ChildExited("scheduler", 0), 6.0)) == [Terminate("executor")]
    assert acts(core.step(ChildExited("executor", 0), 6.0)) == [Ended(EXIT_OK)]


def test_the_end_of_the_session_stops_once() -> None:
    core = serving()
    assert acts(core.step(SessionEnded(), 5.0)) == [Terminate("gateway-0"), Terminate("gateway-1")]
    assert core.step(SessionEnded(), 5.0) == []
    assert core.state is State.STOPPING


def test_a_second_request_kills_what_still_runs() -> None:
    core = serving()
    core.step(StopRequested("SIGINT"), 5.0)
    core.step(ChildExited("gateway-0", 0), 5.0)
    effects = core.step(StopRequested("SIGINT"), 5.0)
    assert acts(effects) == [Kill("executor"), Kill("gateway-1"), Kill("scheduler")]
    assert core.step(StopRequested("SIGINT"), 5.0) == []
    for name in ("gateway-1", "scheduler"):
        assert core.step(ChildExited(name, -9), 5.0) == []
    assert core.step(ChildExited("executor", -9), 5.0) == [Ended(EXIT_FORCED)]


def test_a_dead_child_is_named_and_all_others_are_stopped() -> None:
    core = serving()
    effects = core.step(ChildExited("executor", -9), 5.0)
    assert said(effects) == "executor was killed by SIGKILL"
    assert acts(effects) == [Terminate("gateway-0"), Terminate("gateway-1")]
    effects = core.step(ChildExited("scheduler", 3), 5.0)
    assert "scheduler ended with exit status 3" in said(effects)
    core.step(ChildExited("gateway-0", 0), 5.0)
    assert core.step(ChildExited("gateway-1", 0), 5.0) == [Ended(EXIT_CHILD_DIED)]


def test_a_child_that_dies_while_starting_ends_the_start() -> None:
    core = Supervision(PLAN)
    core.begin(0.0)
    effects = core.step(ChildExited("scheduler", 2), 1.0)
    assert effects == [Say("scheduler ended with exit status 2"), Ended(EXIT_CHILD_DIED)]


def test_an_end_without_being_asked_is_a_death_even_with_status_0() -> None:
    core = serving()
    core.step(ChildExited("executor", 0), 5.0)
    assert core.state is State.STOPPING


def test_ready_never_comes() -> None:
    core = Supervision(PLAN)
    core.begin(0.0)
    number = deadline(core.step(ChildReady("scheduler", "ready"), 1.0))
    core.step(ChildReady("gateway-0", "ready"), 1.0)
    assert core.step(DeadlinePassed(number - 1), 30.0) == []
    effects = core.step(DeadlinePassed(number), 31.0)
    assert said(effects) == "executor, gateway-1: not ready after 30 s"
    assert acts(effects) == [Terminate("gateway-0"), Terminate("gateway-1")]
    # Those that were not ready may end by SIGTERM itself; that is no second death.
    assert said(core.step(ChildExited("gateway-1", -signal.SIGTERM), 31.0)) == ""
    assert said(core.step(ChildExited("gateway-0", -signal.SIGTERM), 31.0)) != ""
    core.step(ChildExited("scheduler", 0), 31.0)
    assert core.step(ChildExited("executor", -15), 31.0) == [Ended(EXIT_CHILD_DIED)]


def test_a_deadline_of_the_start_means_nothing_while_serving() -> None:
    core = Supervision(PLAN)
    core.begin(0.0)
    number = deadline(core.step(ChildReady("scheduler", "ready"), 1.0))
    for name in NAMES[1:]:
        core.step(ChildReady(name, "ready"), 1.0)
    assert core.step(DeadlinePassed(number), 31.0) == []
    assert core.state is State.SERVING


def test_one_that_does_not_stop_is_killed_and_the_order_kept() -> None:
    core = serving()
    number = deadline(core.step(StopRequested("SIGTERM"), 5.0))
    core.step(ChildExited("gateway-1", 0), 6.0)
    assert acts(core.step(DeadlinePassed(number), 65.0)) == [Kill("gateway-0")]
    effects = core.step(ChildExited("gateway-0", -9), 65.0)
    assert acts(effects) == [Terminate("scheduler")]
    core.step(ChildExited("scheduler", 0), 65.0)
    assert core.step(ChildExited("executor", 0), 65.0) == [Ended(EXIT_CHILD_DIED)]


@pytest.mark.parametrize(
    ("status", "words"),
    [(1, "status 1"), (-11, "SIGSEGV"), (3, "lost a process")],
)
def test_statuses_in_words(status: int, words: str) -> None:
    assert words in describe(status)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens_it_ends_once_with_no_child_left(data: st.DataObject) -> None:
    core = Supervision(PLAN)
    running: set[str] = set()
    numbers = [0]
    ended: list[Ended] = []

    def perform(effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(name):
                    assert name not in running
                    running.add(name)
                case Terminate(name) | Kill(name):
                    assert name in running
                case SetDeadline(number, _):
                    numbers.append(number)
                case Ended():
                    ended.append(effect)
                case _:
                    pass

    perform(core.begin(0.0))
    while not ended:
        names = st.sampled_from(sorted(running))
        inputs: st.SearchStrategy[Input] = st.one_of(
            st.builds(ChildExited, names, st.sampled_from([0, 1, 3, -9, -15])),
            st.builds(ChildReady, names, st.just("ready")),
            st.builds(StopRequested, st.just("SIGTERM")),
            st.builds(SessionEnded),
            st.builds(DeadlinePassed, st.sampled_from(numbers)),
        )
        given_input = data.draw(inputs)
        if isinstance(given_input, ChildExited):
            running.remove(given_input.name)
        perform(core.step(given_input, 0.0))
    assert not running
    assert len(ended) == 1
    assert core.state is State.ENDED
