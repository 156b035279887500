"""From a config to everything that serves: model, KV pool, facts for the scheduler, a device.

Owns the order of loading and what of it is the user's to mend. Knows nothing of sockets. Called by
`__main__`: `load` once, `Loaded.start_device` once an epoch.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time

import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from gapless.executor.arenas import Arenas, PlainArenas
from gapless.executor.attention import UnsupportedModelError
from gapless.executor.config import Config, UserError, default_token_max
from gapless.executor.cores import in_passing_thread, use_cores
from gapless.executor.cpu_device import CpuDevice
from gapless.executor.cpu_start import cpu_decoder
from gapless.executor.device import Device, Regions
from gapless.executor.heap import keep_freed_memory
from gapless.executor.kv import KvPool, KvShape, available_memory_bytes, cpu_block_count
from gapless.executor.model import Model, resolve_dtype
from gapless.executor.phases import Phases
from gapless.executor.presets import PREFIX, preset_config
from gapless.executor.seats import SeatCopy
from gapless.executor.step import Decoder, StepRunner
from gapless.protos import model_folder
from gapless.protos.messages import Attach, ModelFacts
from gapless.protos.seats import SeatLayout

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model and its KV pool, ready to run steps."""

    model: Model
    pool: KvPool
    decoder: Decoder
    """What computes the steps on a CPU."""
    facts: ModelFacts
    attention: str
    core_count: int
    """Cores for the steps on a CPU."""
    phases: Phases

    def start_device(self, attach: Attach, regions: Regions) -> Device:
        """The device of an epoch, its seat table uploaded."""
        self.phases.end("waiting for the scheduler")
        layout = SeatLayout(attach.seat_count, attach.seat_block_max)
        seats = SeatCopy(layout, self.pool.device)
        seats.upload(regions.seat_table)
        if self.pool.device.type == "cuda":
            from gapless.executor import cuda_start  # needs triton, which comes with CUDA builds

            return cuda_start.start(
                self.model, self.pool, seats, attach, regions, self.attention, self.phases
            )
        keep_freed_memory()
        runner = StepRunner(self.model, self.pool, seats, attach.row_max, self.decoder)
        return CpuDevice(attach.epoch, regions, runner, self.core_count)


def load(config: Config, phases: Phases) -> Loaded:
    """Loads the model and makes the KV pool.

    Raises:
        UserError: the folder holds no model that can be served, or memory does not suffice.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = _device(config.device)
    if device.type == "cpu":
        use_cores(1)
        return in_passing_thread(config.threads, lambda: _load(config, device, phases))
    use_cores(config.threads)
    return _load(config, device, phases)


def _load(config: Config, device: torch.device, phases: Phases) -> Loaded:
    arenas = PlainArenas(device)
    model = _load_model(config, device, arenas, phases)
    decoder: Decoder = model
    if device.type == "cpu":
        decoder = cpu_decoder(model, config.block_tokens)
        phases.end("kernels")
    context_length = model.shape.context_length
    if config.context_length_max is not None:
        context_length = min(context_length, config.context_length_max)
    shape = model.shape.kv_shape(config.block_tokens)
    pool = _make_pool(config, device, arenas, shape, context_length)
    named = PREFIX + config.preset if config.preset else None
    facts = ModelFacts(
        revision=named or model_folder.revision(config.model),
        vocab_size=model.shape.vocab_size,
        context_length=context_length,
        block_tokens=config.block_tokens,
        block_count=pool.block_count,
        row_max=config.row_max,
        token_max=config.token_max or default_token_max(device.type, config.row_max),
        device=str(device),
        dtype=model.shape.dtype_name,
    )
    phases.end("KV pool")
    return Loaded(model, pool, decoder, facts, config.attention, config.threads, phases)


def _load_model(config: Config, device: torch.device, arenas: Arenas, phases: Phases) -> Model:
    log.info("loading weights from %s ...", config.preset or config.model)
    begin = time.monotonic()
    if config.preset is not None:
        return _random_model(config, config.preset, device, arenas, phases)
    try:
        dtype = resolve_dtype(config.dtype, device, config.model)
        model = Model.load(config.model, dtype, device, arenas, phases)
    except UnsupportedModelError as error:
        raise UserError(str(error)) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # What transformers raises for files that are no model, or not the one of their config.
        raise UserError(f"cannot load {config.model}: {' '.join(str(error).split())}") from error
    shape = model.shape
    log.info(
        "loaded %s in %.1f s: %d layers, %s, context of %d tokens, %d threads",
        shape.architecture,
        time.monotonic() - begin,
        shape.layer_count,
        shape.dtype_name,
        shape.context_length,
        config.threads,
    )
    return model


def _random_model(
    config: Config, preset: str, device: torch.device, arenas: Arenas, phases: Phases
) -> Model:
    wanted = "bfloat16" if config.dtype == "auto" and device.type == "cuda" else config.dtype
    try:
        dtype = resolve_dtype(wanted, device, config.model)
        return Model.random(preset_config(preset), dtype, device, arenas, phases)
    except ValueError as error:
        raise UserError(str(error)) from error


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU")
    return torch.device("cuda", torch.cuda.current_device())


def _make_pool(
    config: Config, device: torch.device, arenas: Arenas, shape: KvShape, context_length: int
) -> KvPool:
    if device.type == "cuda":
        from gapless.executor.cuda_start import cuda_block_count

        count = config.kv_blocks or cuda_block_count(shape, context_length, config.row_max)
        log.info("KV pool: %d blocks, %.0f MiB", count, count * shape.block_bytes / 2**20)
        return KvPool(arenas, shape, count)
    available_bytes = available_memory_bytes()
    block_count = config.kv_blocks
    if block_count is None:
        try:
            block_count = cpu_block_count(
                shape,
                context_length=context_length,
                row_max=config.row_max,
                available_bytes=available_bytes,
            )
        except MemoryError as error:
            raise UserError(f"{error} (--context-length-max)") from error
    size_mib = block_count * shape.block_bytes / 2**20
    if block_count * shape.block_bytes > available_bytes:
        raise UserError(
            f"--kv-blocks {block_count} takes {size_mib:.0f} MiB, "
            f"available are {available_bytes / 2**20:.0f} MiB: choose fewer blocks"
        )
    log.info("KV pool: %d blocks of %d tokens, %.0f MiB", block_count, shape.block_tokens, size_mib)
    return KvPool(arenas, shape, block_count)
