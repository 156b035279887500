"""The committed stubs are what the .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTOS = REPOSITORY / "protos"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    subprocess.run(
        [REPOSITORY / "scripts" / "generate_stubs.sh", tmp_path],
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        check=True,
        timeout=100,
    )
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "gapless/protos").iterdir()}
    committed = {path.name: path.read_bytes() for path in PROTOS.glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(committed)
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert stale == [], "run scripts/generate_stubs.sh and commit its output"
    assert len(fresh) == 4 * len(list(PROTOS.glob("*.proto")))
