"""`gapless serve` up to the command lines of its processes."""

from __future__ import annotations

import argparse
import itertools
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.client import serve
from gapless.client.__main__ import main
from gapless.client.options import make_parser

FOLDER = Path("/run/r")
MODEL = Path("/models/m")


def parsed(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["serve", *arguments])


def values(command: list[str]) -> dict[str, str]:
    """The options of a command line with their values."""
    return {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}


def commands(*arguments: str, admin: str | None = None) -> dict[str, list[str]]:
    made = serve.make_commands(parsed(*arguments), FOLDER, MODEL, "127.0.0.1:7", admin)
    return {name: list(command) for name, command in made.items()}


def test_each_process_gets_its_own_options_and_no_others() -> None:
    made = commands("--depth", "1", "--kv-blocks", "64", "--flush-interval-ms", "5")
    shared = {"--run-folder": "/run/r", "--ready-fd": "{ready_fd}"}
    assert values(made["scheduler"]) == shared | {"--depth": "1", "--drain-timeout-s": "60.0"}
    assert values(made["executor"]) == shared | {"--model": "/models/m", "--kv-blocks": "64"}
    assert values(made["gateway-0"]) == shared | {
        "--model": "/models/m",
        "--model-name": "smollm2-135m-instruct",
        "--listen": "127.0.0.1:7",
        "--drain-timeout-s": "60.0",
        "--lame-duck-s": "0.0",
        "--flush-interval-ms": "5",
    }


def test_the_executor_draws_the_weights_of_a_preset_itself() -> None:
    made = commands("--model", "preset:tiny")
    assert values(made["executor"])["--model"] == "preset:tiny"
    assert values(made["gateway-0"])["--model"] == "/models/m"
    assert values(made["gateway-0"])["--model-name"] == "preset:tiny"


def test_an_option_that_is_a_switch_has_no_value() -> None:
    assert commands("--allow-chat-template")["gateway-0"][-1] == "--allow-chat-template"
    assert "--allow-chat-template" not in commands()["gateway-0"]


def test_several_gateways_share_the_port_and_the_first_has_the_admin_service() -> None:
    made = commands("--gateways", "2", admin="127.0.0.1:8")
    assert "--reuse-port" in made["gateway-0"]
    assert "--reuse-port" in made["gateway-1"]
    assert "--admin-listen" in made["gateway-0"]
    assert "--admin-listen" not in made["gateway-1"]
    assert "--reuse-port" not in commands()["gateway-0"]


@pytest.mark.parametrize("kind", ["scheduler", "executor", "gateway"])
def test_every_option_is_known_to_its_process(kind: str) -> None:
    """The contract between the rooms, read off each process's own help."""
    helped = subprocess.run(
        [sys.executable, "-m", f"gapless.{kind}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(helped.replace(",", " ").replace("[", " ").replace("]", " ").split())
    passed = {f"--{option.replace('_', '-')}" for option in serve.PASSED_ON[kind]}
    own = {"--run-folder", "--ready-fd"} | ({"--reuse-port"} if kind == "gateway" else set())
    assert passed | own <= known


def test_the_plan_drains_gateways_first_and_the_executor_last() -> None:
    plan = serve.make_plan(parsed("--gateways", "2", "--drain-timeout-s", "7"))
    assert plan.start == (("scheduler",), ("executor", "gateway-0", "gateway-1"))
    assert plan.stop == (("gateway-0", "gateway-1"), ("scheduler",), ("executor",))
    assert plan.stop_timeout_s > 7


def test_the_models_name_is_chosen_or_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert serve.model_name(parsed()) == serve.DEMO_NAME
    assert serve.model_name(parsed("--model", f"{folder}/")) == "my-model"
    assert serve.model_name(parsed("--model", "org/name")) == "org/name"
    assert serve.model_name(parsed("--model-name", "x")) == "x"


@pytest.mark.parametrize(
    ("address", "dialled"),
    [
        ("0.0.0.0:5", "localhost:5"),
        ("[::]:5", "localhost:5"),
        ("127.0.0.1:5", "127.0.0.1:5"),
    ],
)
def test_a_wildcard_is_dialled_as_localhost(address: str, dialled: str) -> None:
    assert serve.reachable(address) == dialled


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen"])
@pytest.mark.parametrize("address", ["50051", "host:", ":50051", "host:70000"])
def test_an_address_that_is_none_is_wrong_usage(
    flag: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--listen", "127.0.0.1:0", flag, address]) == 2
    assert address in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--listen", "192.0.2.1:1"]) == 1
    assert "192.0.2.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("gateways", ["1", "2"])
def test_a_port_in_use_is_said_before_anything_starts(
    gateways: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        assert main(["serve", "--gateways", gateways, "--listen", f"127.0.0.1:{port}"]) == 1
        assert capsys.readouterr().err.startswith(f"gapless serve: port {port} is in use")
        admin = f"127.0.0.1:{port}"
        assert main(["serve", "--listen", "127.0.0.1:0", "--admin-listen", admin]) == 1
        assert capsys.readouterr().err.endswith("choose another --admin-listen\n")


def test_several_processes_can_listen_on_a_reserved_port() -> None:
    with serve.reserved("127.0.0.1:0", 2) as address:
        host, port = serve.split_address(address)
        assert port != 0
        first = socket.create_server((host, port), reuse_port=True)
        second = socket.create_server((host, port), reuse_port=True)
        # Connections go to those that listen, never to the reservation.
        for _ in range(20):
            socket.create_connection((host, port)).close()
        first.close()
        second.close()


def test_a_run_folder_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert main(["serve", "--listen", "127.0.0.1:0", "--run-folder", str(tmp_path)]) == 1
    assert "no run folder" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gapless.client", "serve", "--listen", "127.0.0.1:0"]
    command += ["--model", str(tmp_path / "nowhere"), "--run-folder", str(tmp_path / "run")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "cannot prepare model" in run.stderr
    assert not (tmp_path / "run").exists()
