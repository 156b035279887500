"""How the next token of a sequence is chosen: validated parameters, as the executor applies them.

Written by the gateway after validation, carried by `Submit`, packed into the seat table by the
scheduler, applied by the executor's sampler. Every field has its final value: defaults of the
model and the server are resolved by the gateway, so nobody downstream knows about "unset".
"""

from __future__ import annotations

import msgspec

BIAS_ENTRIES_MAX = 1024 + 4096
"""Most (token, bias) pairs of a sequence: logit_bias entries plus banned ids."""
ALLOWED_TOKENS_MAX = 4096
"""Most ids in an allowed-token list."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of one sequence.

    Applied in this order, on logits in float32: bias, allowed list, temperature, then top-k,
    top-p and min-p on the tempered distribution, then one draw from what is left. The draw uses
    a random number that depends on (seed, position) alone, where *position* is the absolute index
    in the sequence (prompt included) of the token being drawn.
    """

    temperature: float = 1.0
    """0 is greedy: the argmax of the biased logits, the lowest id on ties."""
    top_k: int = 0
    """Most likely tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Smallest set of most likely tokens whose mass reaches this; always at least one token."""
    min_p: float = 0.0
    """Drops tokens below this fraction of the best probability."""
    seed: int = 0
    """Unsigned, 64 bits."""
    bias_tokens: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    """Added to the logits of `bias_tokens`; minus infinity bans a token."""
    allowed_tokens: tuple[int, ...] = ()
    """If not empty, only these ids can be drawn."""
