"""Which packages a command needs beyond the client's own, and what to say if they are not there.

Owns the lists, one an extra of the distribution. Imports none of them. Called by `serve` and
`__main__`, before a process is started that could only end in a traceback.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Final

BENCH: Final = ("msgspec", "numpy", "torch", "transformers", "zmq")
LOAD: Final = ("grpc", "msgspec", "numpy")
"""Of `gapless bench --server`."""
SERVE: Final = (*BENCH, "grpc_reflection", "jinja2", "tokenizers")


def lacking(extra: str, packages: Iterable[str]) -> str | None:
    """What to tell a person whose installation lacks some of an extra's packages; else None."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"not installed: {', '.join(missing)} (pip install 'gapless[{extra}]' brings them)"
