"""What the two ends of a connection demand of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from gapless.client.channel import OPTIONS
from gapless.gateway.channel import server_options

CLIENT = dict(OPTIONS)
SERVER = dict(server_options(deadline_max_s=1.0, reuse_port=False))


def test_the_gateway_permits_the_clients_pings() -> None:
    interval_ms = SERVER["grpc.http2.min_ping_interval_without_data_ms"]
    assert CLIENT["grpc.keepalive_time_ms"] > interval_ms
    # Between two calls as well: without it gRPC counts every ping of an idle connection.
    assert SERVER["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.parametrize("options", [CLIENT, SERVER])
def test_grpc_knows_every_option(options: dict[str, int]) -> None:
    """It passes over one that it does not know, without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    # In the library each name ends with a zero byte.
    assert [name for name in options if f"{name}\0".encode() not in library] == []
