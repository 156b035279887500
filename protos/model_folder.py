"""What gateway and executor must agree on about a model folder: which model it is.

A *model folder* has the Hugging Face layout: ``config.json``, ``tokenizer.json``, one or more
``*.safetensors``, and optionally ``generation_config.json``, ``tokenizer_config.json``,
``chat_template.jinja``. Other forms (GGUF, a hub name) are turned into one by
``gapless.executor.prepare``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

DESCRIPTION_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
REQUIRED_FILES: Final = ("config.json", "tokenizer.json")


def missing_files(folder: Path) -> tuple[str, ...]:
    """Names that a model folder must have and `folder` has not; empty if it is one."""
    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    return tuple(missing)


def revision(folder: Path) -> str:
    """Hash of the description files and of the weight files' headers and sizes, hexadecimal.

    Cheap at any model size: no weight is read. A folder without weight files (a gateway's image
    may leave them out) must carry a file ``revision`` with the value.
    """
    recorded = folder / "revision"
    if recorded.is_file():
        return recorded.read_text().strip()
    digest = hashlib.sha256()
    for name in DESCRIPTION_FILES:
        path = folder / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
    return digest.hexdigest()[:16]
