"""Triton's kernels run in its interpreter where there is no GPU to compile them for.

Triton reads this when it is imported, which importing transformers already does.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
