"""What the results say of the machine: GPU, processor, versions of what was measured.

Owns nothing; asks the operating system and the driver's own tool. Called by `measure`, `report`.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    *("torch", "transformers", "triton", "flashinfer-python", "tokenspeed-fa3"),
    *("numpy", "msgspec", "pyzmq"),
)


def versions() -> dict[str, str]:
    """Of Python, the GPU's driver and the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (driver := _ask_gpu("driver_version")) is not None:
        found["driver"] = driver
    return found


def device_name(device: str) -> str:
    """Such as "NVIDIA H200"; for the CPU its model."""
    if device.startswith("cuda"):
        return _ask_gpu("name") or device
    return f"none (CPU: {processor_name()})"


def processor_name() -> str:
    """Such as "AMD EPYC"; where Linux does not say, the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def device_memory_bytes() -> int | None:
    """Memory in use on the first GPU."""
    used_mib = _ask_gpu("memory.used")
    return None if used_mib is None or not used_mib.isdecimal() else int(used_mib) << 20


def _ask_gpu(field: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    flags = (f"--query-gpu={field}", "--format=csv,noheader,nounits")
    answer = subprocess.run(
        (program, *flags), capture_output=True, text=True, timeout=30, check=False
    )
    lines = answer.stdout.splitlines()
    return lines[0].strip() if answer.returncode == 0 and lines else None
