"""How the gateway's ports are set up: limits of messages, keepalive, age of connections.

Owns the channel options, so that a stand-in server can have the same. Must not know services and
calls. Called by `server`.
"""

from __future__ import annotations

from typing import Final

from gapless.gateway.config import MIB

CONNECTION_AGE_MAX_MS: Final = 30 * 60 * 1000


def server_options(*, deadline_max_s: float, reuse_port: bool) -> list[tuple[str, int]]:
    """Options of a gRPC server that listens for clients.

    Args:
        deadline_max_s: longest call: a connection that is too old stays so long for its calls.
        reuse_port: several processes listen on one port.
    """
    return [
        ("grpc.max_receive_message_length", 16 * MIB),
        ("grpc.max_send_message_length", 4 * MIB),
        # Finds dead clients of idle streams: each holds KV blocks.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # What clients may send in turn; without these a client that pings each 30 s while it
        # waits for a token is cut off after a few of them ("too_many_pings").
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Lets balancers spread long-lived connections anew; no request is cut by it.
        ("grpc.max_connection_age_ms", CONNECTION_AGE_MAX_MS),
        ("grpc.max_connection_age_grace_ms", round(deadline_max_s * 1000)),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.so_reuseport", 1 if reuse_port else 0),
    ]
