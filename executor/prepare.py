"""Turns whatever names a model into a model folder (see `gapless.protos.model_folder`).

    python -m gapless.executor.prepare MODEL [--cache FOLDER]

MODEL is a model folder, a GGUF file or a folder with exactly one, the name of a repository on the
Hugging Face hub, ``demo``, or ``preset:NAME``. The last line on stdout is the model folder's path;
progress goes to stderr. Called by people, by `gapless serve` before it starts the processes, and by
tests.

Of a preset only what a gateway reads is made, as its weights are drawn by the executor itself.

Owns the conversion. Weights of a GGUF file are dequantised to float32, which is exact; config,
generation config, tokenizer and chat template are kept as transformers reads them. Where they
disagree about end tokens, the gateway decides.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gapless.executor import demo_model
from gapless.executor.config import LOG_FORMAT, PRESET_PREFIX, UserError
from gapless.executor.model_cache import default_cache, made_once
from gapless.protos.model_folder import DESCRIPTION_FILES, missing_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEMO: Final = "demo"
CONVERSION: Final = "float32-1"
"""Part of an entry's name in the cache: change it when `_convert` writes something else."""
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")

log = logging.getLogger(__name__)


def model_folder(model: str, cache: Path | None = None) -> Path:
    """The model folder of `model`, made if need be; absolute.

    Args:
        model: a path, a hub name, ``demo``, or ``preset:NAME``.
        cache: where what was made is kept; default see `default_cache`.

    Raises:
        UserError: there is no such model, or it cannot be converted.
    """
    cache = cache or default_cache()
    path = Path(model)
    try:
        if model == DEMO:
            return _demo(cache)
        if model.startswith(PRESET_PREFIX):
            return _preset(model.removeprefix(PRESET_PREFIX), cache)
        if path.is_file():
            return _from_gguf(path.absolute(), cache)
        if path.is_dir():
            return _from_folder(path.absolute(), cache)
    except OSError as error:
        raise UserError(f"cannot prepare {model!r}: {error}") from error
    if _HUB_NAME.fullmatch(model):
        return _from_hub(model)
    raise UserError(f"no such file or folder: {model!r}")


def _demo(cache: Path) -> Path:
    prepared = _entry(cache, demo_model.SHA256)
    if prepared.is_dir():
        return prepared
    gguf = demo_model.demo_gguf(cache)
    return made_once(prepared, lambda part: _convert(gguf, part))


def _preset(name: str, cache: Path) -> Path:
    from gapless.executor import presets  # here: it imports the models

    if name not in presets.PRESETS:
        raise UserError(f"no such preset: {name!r} (there are: {', '.join(presets.PRESETS)})")
    entry = (cache / "models" / f"preset-{name}-1").absolute()
    return made_once(entry, lambda part: presets.write_gateway_folder(name, part))


def _from_folder(folder: Path, cache: Path) -> Path:
    missing = missing_files(folder)
    if not missing:
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UserError(f"{folder} has several GGUF files, name one of them: {names}")
    if not found:
        raise UserError(
            f"{folder} is no model folder (missing: {', '.join(missing)}) and has no GGUF file"
        )
    return _from_gguf(found[0], cache)


def _from_gguf(gguf: Path, cache: Path) -> Path:
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{gguf} is not a GGUF file")
        file.seek(0)
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return made_once(_entry(cache, checksum), lambda part: _convert(gguf, part))


def _entry(cache: Path, checksum: str) -> Path:
    return (cache / "models" / f"{checksum[:32]}-{CONVERSION}").absolute()


def _convert(gguf: Path, part: Path) -> None:
    """Writes the model folder of `gguf` into `part` and reads it back."""
    import torch  # here: most calls find a finished folder, and importing takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        log.info("converting %s: reading weights ...", gguf.name)
        packed = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # A model that came from GGUF refuses to be saved, although its weights are plain by now:
        # a fresh one of the same config takes them over.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                AutoConfig.from_pretrained(**source), dtype=torch.float32
            )
        plain.load_state_dict(packed.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = packed.generation_config
        log.info("converting %s: writing ...", gguf.name)
        plain.save_pretrained(part)
        AutoTokenizer.from_pretrained(**source).save_pretrained(part)
        reread = AutoModelForCausalLM.from_pretrained(part, dtype=torch.float32)
    except Exception as error:
        raise UserError(f"cannot convert {gguf}: {_first_line(error)}") from error
    _check_equal(packed, reread)
    missing = missing_files(part)
    assert not missing, missing


def _check_equal(first: PreTrainedModel, second: PreTrainedModel) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    different = [name for name in ours if not ours[name].equal(theirs[name])]
    assert not different, f"saving changed {different}"


def _from_hub(name: str) -> Path:
    import huggingface_hub

    log.info("fetching %s from the Hugging Face hub ...", name)
    patterns = [*DESCRIPTION_FILES, "*.safetensors", "*.safetensors.index.json"]
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise UserError(
            f"no file or folder {name!r}, and the Hugging Face hub gave nothing of that name: "
            f"{_first_line(error)}"
        ) from error
    missing = missing_files(folder)
    if missing:
        raise UserError(f"{name} on the hub is no model folder (missing: {', '.join(missing)})")
    return folder


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on stderr if the model cannot be had."""
    parser = argparse.ArgumentParser("gapless.executor.prepare", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="path, hub name, 'demo' or preset:NAME")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="default: ~/.cache/gapless")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format(process="prepare"))
    try:
        print(model_folder(options.model, options.cache), flush=True)
    except UserError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
