"""What the running processes have loaded: each only what its room may import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.server import Server

pytestmark = pytest.mark.processes

TORCH = "/torch/"
GRPC = "/grpc/"


def mapped_folders(pid: int) -> str:
    """Paths of everything that the process has mapped, one a line."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return "\n".join(sorted({line.split(maxsplit=5)[-1] for line in lines if "/" in line}))


def test_the_scheduler_has_neither_torch_nor_grpc(tiny_server: Server) -> None:
    mapped = mapped_folders(tiny_server.scheduler.pid)
    assert "numpy" in mapped
    assert TORCH not in mapped
    assert GRPC not in mapped


def test_the_executor_has_torch_but_no_grpc(tiny_server: Server) -> None:
    mapped = mapped_folders(tiny_server.executor.pid)
    assert TORCH in mapped
    assert GRPC not in mapped


def test_each_gateway_has_grpc_but_no_torch(tiny_server: Server) -> None:
    for gateway in tiny_server.gateways:
        mapped = mapped_folders(gateway.pid)
        assert GRPC in mapped
        assert TORCH not in mapped
