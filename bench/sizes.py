"""What a benchmark must know of a model beforehand: its revision, its vocabulary, bytes a step.

Owns the sizes of the presets, which the executor's own table defines (a test compares the two).
Reads no weight; the executor's own `prepare` makes a folder of what is none. Called by `work`
(vocabulary), `link` (greeting) and `report` (memory floor).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from gapless.protos import model_folder

PRESET_PREFIX: Final = "preset:"
DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ModelError(Exception):
    """There is no such model; the message says what is missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's form; whether its embeddings are tied, no step can tell."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weights_read(self) -> int:
        """Weights that a step reads whatever its rows are: all but the input embedding."""
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        head = self.hidden_size * (self.vocab_size + 1)
        return self.layers * (attention + feed_forward + norms) + head

    @property
    def kv_values(self) -> int:
        """Keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES: Final = {
    "llama-8b": Shape(128256, 4096, 14336, 32, 32, 8, 128),
    "llama-1b": Shape(128256, 2048, 8192, 16, 32, 8, 64),
    "qwen3-8b": Shape(151936, 4096, 12288, 36, 32, 8, 128),
    "tiny": Shape(1024, 256, 512, 2, 4, 2, 64),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model as the command line names it."""

    name: str
    """For the results: ``preset:NAME``, or the name of the folder or of what it was made from."""
    source: str
    """For the executor: ``preset:NAME`` or the folder."""
    revision: str
    """What the executor will say; see `protos.model_folder`."""
    vocab_size: int
    shape: Shape | None
    """Known of presets."""


def find_model(text: str) -> Model:
    """The model of ``--model``: a preset, or whatever can be made a model folder.

    Raises:
        ModelError: no such preset or model.
    """
    if text.startswith(PRESET_PREFIX):
        shape = SHAPES.get(text.removeprefix(PRESET_PREFIX))
        if shape is None:
            raise ModelError(f"{text} is none of: {', '.join(PRESET_PREFIX + s for s in SHAPES)}")
        return Model(text, text, text, shape.vocab_size, shape)
    folder = _prepared(text)
    config = json.loads((folder / "config.json").read_text())
    vocab_size = config.get("text_config", config).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{folder / 'config.json'} names no vocab_size")
    name = Path(text).name
    return Model(name, str(folder), model_folder.revision(folder), vocab_size, None)


def _prepared(text: str) -> Path:
    """The model folder of ``--model``, made if need be, as `gapless serve` has it made."""
    command = (sys.executable, "-m", "gapless.executor.prepare", text)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"cannot prepare model {text!r}")
    return Path(done.stdout.splitlines()[-1])
