"""What the two ends of a connection demand of each other."""

from __future__ import annotations

from gapless.client.channel import OPTIONS
from gapless.gateway.channel import server_options


def test_the_gateway_permits_the_clients_pings() -> None:
    client = dict(OPTIONS)
    server = dict(server_options(deadline_max_s=1.0, reuse_port=False))
    interval_ms = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] > interval_ms
    # Between two calls as well: without it gRPC counts every ping of an idle connection.
    assert server["grpc.keepalive_permit_without_calls"] == 1
