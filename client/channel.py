"""How the client's channels are set up: the published service config and the channel options.

The service config is what any client, in any language, should use: it retries UNAVAILABLE while no
message was received (the server sends nothing before a request is admitted, so that is safe), and
it avoids servers whose health says that they admit nothing. Must not know the calls.
"""

from __future__ import annotations

import json
from typing import Final

import grpc

SERVICE: Final = "gapless.v1.InferenceService"
RETRIED_METHODS: Final = ("Generate", "Tokenize", "Detokenize", "GetModel", "ListModels")

SERVICE_CONFIG: Final = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": SERVICE},
        "methodConfig": [
            {
                "name": [{"service": SERVICE, "method": method} for method in RETRIED_METHODS],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
    }
)

OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without this only two pings go out during a long prefill.
    ("grpc.http2.max_pings_without_data", 0),
)


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    *,
    with_service_config: bool,
    own_connection: bool = False,
) -> grpc.aio.Channel:
    """A channel to `address`; it connects when first used.

    Args:
        address: ``host:port`` or a gRPC target such as ``dns:///gateway:50051``.
        credentials: of TLS; None for an unencrypted connection.
        with_service_config: False for calls that must reach a server that admits nothing: with
            health checking gRPC would not let them through.
        own_connection: False lets channels of this process to one address share a connection.
    """
    options: list[tuple[str, int | str]] = list(OPTIONS)
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if with_service_config:
        options.append(("grpc.service_config", SERVICE_CONFIG))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
