"""The supervisor over real processes: stand-ins that obey the ready-fd contract."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from gapless.client.supervision import EXIT_CHILD_DIED, EXIT_FORCED, EXIT_OK, Plan
from gapless.client.supervisor import (
    LINE_BYTES_MAX,
    READY_FD,
    SAME_MOMENT_S,
    Lines,
    Supervisor,
    run_once,
)

NAMES = ("scheduler", "executor", "gateway")
CHILD = Path(__file__).with_name("child.py")
ROOT = CHILD.parents[2]


def plan(**changes: float) -> Plan:
    times = {"start_timeout_s": 100.0, "stop_timeout_s": 100.0} | changes
    return Plan(
        start=(("scheduler",), ("executor", "gateway")),
        stop=(("gateway",), ("scheduler",), ("executor",)),
        doing=dict.fromkeys(NAMES, "starting"),
        **times,
    )


PLAN = plan()

Session = Callable[[Mapping[str, str]], Awaitable[None]]


def child(*arguments: str) -> Sequence[str]:
    return [sys.executable, "-I", str(CHILD), "--ready-fd", READY_FD, *arguments]


async def nothing(lines: Mapping[str, str]) -> None:
    """A session that is over at once."""


async def signal_itself(lines: Mapping[str, str]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


def supervise(
    session: Session = nothing,
    on_line: Callable[[str, str], None] = lambda name, line: None,
    using: Plan = PLAN,
    **commands: Sequence[str],
) -> tuple[int, list[str]]:
    """Exit code, and what was reported as ``name|line``."""
    reported: list[str] = []

    def report(name: str, line: str) -> None:
        reported.append(f"{name}|{line}")
        on_line(name, line)

    given = {name: commands.get(name, child()) for name in NAMES}
    code = asyncio.run(Supervisor(using, given, report, session).run())
    return code, reported


@pytest.mark.parametrize("session", [nothing, signal_itself])
def test_everything_starts_serves_and_stops_in_order(session: Session) -> None:
    code, reported = supervise(session)
    assert code == EXIT_OK
    stops = [line for line in reported if line.endswith(("draining", "stopped"))]
    assert stops == [
        f"{name}|{what}"
        for name in ("gateway", "scheduler", "executor")
        for what in ("draining", "stopped")
    ]
    starts = [line for line in reported if "starting ..." in line or "ready after" in line]
    assert starts[0] == "|scheduler: starting ..."
    assert starts[1].startswith("|scheduler: ready after")
    assert {starts[2], starts[3]} == {"|executor: starting ...", "|gateway: starting ..."}


def test_the_session_gets_the_ready_lines() -> None:
    seen: dict[str, str] = {}

    async def session(lines: Mapping[str, str]) -> None:
        seen.update(lines)

    supervise(session)
    assert seen.keys() == set(NAMES)
    pids = [line.removeprefix("ready at ") for line in seen.values()]
    assert len(set(pids)) == len(NAMES)


def test_children_have_process_groups_of_their_own() -> None:
    async def session(lines: Mapping[str, str]) -> None:
        for line in lines.values():
            pid = int(line.removeprefix("ready at "))
            assert os.getpgid(pid) == pid

    supervise(session)


def test_an_error_of_the_session_stops_all_and_comes_out() -> None:
    reported: list[str] = []

    async def session(lines: Mapping[str, str]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervise(session, lambda name, line: reported.append(f"{name}|{line}"))
    assert "executor|stopped" in reported


def test_a_second_signal_forces() -> None:
    def again(name: str, line: str) -> None:
        if (name, line) == ("gateway", "draining"):
            loop = asyncio.get_running_loop()
            loop.call_later(2 * SAME_MOMENT_S, os.kill, os.getpid(), signal.SIGINT)

    code, reported = supervise(signal_itself, again, gateway=child("--deaf"))
    assert code == EXIT_FORCED
    assert "scheduler|draining" not in reported


def test_signals_of_the_same_moment_are_one() -> None:
    """Such as those of `timeout`, which signals its child and then the whole group."""

    async def session(lines: Mapping[str, str]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    code, reported = supervise(session)
    assert code == EXIT_OK
    assert reported[-1] == "executor|stopped"


def test_one_that_does_not_stop_in_time_is_killed() -> None:
    code, reported = supervise(
        signal_itself, using=plan(stop_timeout_s=0.2), gateway=child("--deaf")
    )
    assert code == EXIT_CHILD_DIED
    assert "|gateway: not stopped after 0.2 s, killed" in reported
    assert reported[-1] == "executor|stopped"


def test_a_child_that_cannot_start_ends_the_start() -> None:
    code, reported = supervise(scheduler=child("--status-at-start", "2"))
    assert code == EXIT_CHILD_DIED
    assert reported == [
        "|scheduler: starting ...",
        "scheduler|failing",
        "|scheduler ended with exit status 2",
    ]


def test_a_command_that_does_not_exist_is_told() -> None:
    code, reported = supervise(scheduler=["/nowhere/at-all"])
    assert code == EXIT_CHILD_DIED
    assert "scheduler|cannot start '/nowhere/at-all': No such file or directory" in reported


def test_a_child_that_dies_while_serving_is_named_and_the_rest_stopped() -> None:
    async def session(lines: Mapping[str, str]) -> None:
        os.kill(int(lines["executor"].removeprefix("ready at ")), signal.SIGKILL)
        await asyncio.Event().wait()

    code, reported = supervise(session)
    assert code == EXIT_CHILD_DIED
    assert "|executor was killed by SIGKILL" in reported
    assert reported.index("gateway|stopped") < reported.index("scheduler|draining")


def test_a_child_that_dies_right_after_ready_is_no_success() -> None:
    code, reported = supervise(scheduler=child("--kill-self"))
    assert code == EXIT_CHILD_DIED
    assert "|scheduler was killed by SIGKILL" in reported


def test_ready_never_comes() -> None:
    code, reported = supervise(using=plan(start_timeout_s=0.2), scheduler=child("--never-ready"))
    assert code == EXIT_CHILD_DIED
    assert "|scheduler: not ready after 0.2 s" in reported


def test_a_status_of_its_own_at_the_end_is_reported() -> None:
    code, reported = supervise(gateway=child("--status", "7"))
    assert code == EXIT_CHILD_DIED
    assert "|gateway ended with exit status 7" in reported


def test_output_held_open_by_a_grandchild_does_not_hold_the_end() -> None:
    code, reported = supervise(executor=child("--leave-child", "--status-at-start", "9"))
    (left,) = [line for line in reported if line.startswith("executor|left ")]
    os.kill(int(left.removeprefix("executor|left ")), signal.SIGKILL)
    assert code == EXIT_CHILD_DIED
    assert "|executor ended with exit status 9" in reported


def test_a_child_that_ends_just_before_it_is_asked_to_is_no_surprise() -> None:
    """It has been reaped, but its last words (a grandchild holds its pipe) are awaited still."""

    reported: list[str] = []

    async def session(lines: Mapping[str, str]) -> None:
        process = supervisor._processes["gateway"].process
        process.kill()
        await process.wait()

    commands = {**dict.fromkeys(NAMES, child()), "gateway": child("--leave-child")}
    supervisor = Supervisor(
        PLAN, commands, lambda name, line: reported.append(f"{name}|{line}"), session
    )
    code = asyncio.run(supervisor.run())
    (left,) = [line for line in reported if line.startswith("gateway|left ")]
    os.kill(int(left.removeprefix("gateway|left ")), signal.SIGKILL)
    assert code == EXIT_CHILD_DIED
    assert "|gateway was killed by SIGKILL" in reported
    assert "scheduler|stopped" in reported


def test_kill_minus_9_of_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    alive = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "tests.client.supervise", str(fifo)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "serving\n"
        os.set_blocking(alive, True)
        supervisor.kill()
        # The end of the FIFO comes when the last child is gone: none of them closes it alive.
        assert os.read(alive, 1) == b""
    os.close(alive)


def test_one_command_alone_gives_its_status_and_output() -> None:
    reported: list[str] = []
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"
    command = [sys.executable, "-I", "-c", script]
    ran = asyncio.run(
        run_once("model", command, lambda name, line: reported.append(f"{name}|{line}"))
    )
    assert ran == (5, ["out"])
    assert reported == ["model|err"]


def test_a_signal_ends_one_command_alone() -> None:
    def interrupt(name: str, line: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    script = "import signal, sys; print('up', file=sys.stderr, flush=True); signal.pause()"
    command = [sys.executable, "-I", "-c", script]
    status, _ = asyncio.run(run_once("model", command, interrupt))
    assert status == -signal.SIGKILL


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    lines: list[str] = []
    output = Lines(lines.append)
    for _ in range(3):
        output.data_received(b"x" * (LINE_BYTES_MAX // 2))
    output.data_received(b"y\nz")
    assert [len(line) for line in lines] == [LINE_BYTES_MAX, LINE_BYTES_MAX // 2 + 1]
    assert lines[1].endswith("y")
