"""The real core and the real CUDA device in one process: slots in memory, no sockets.

Imports of CUDA modules stand inside functions, since they need triton.
"""

from __future__ import annotations

import copy
import dataclasses
import mmap
import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gapless.executor.arenas import PlainArenas
from gapless.executor.cuda_attention import HeadShape
from gapless.executor.device import Regions
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.seats import SeatCopy
from gapless.protos.messages import Epoch, Failed, Finished, Handle, Stopping, Submit
from gapless.protos.sampling import Sampling
from gapless.protos.slots import Frame, FrameSlots, ResultSlots
from gapless.protos.wakeful import CORES_MIN
from gapless.scheduler.config import CoreConfig, GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.frames import apply_assignments

EPOCH = Epoch(1)
GATEWAY = GatewayIndex(0)
GREEDY = Sampling(temperature=0.0)
WAKEUP_LIMIT_S = 60.0

Tokens = list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_tokens: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StepStamps:
    """One step's times in nanoseconds on CLOCK_MONOTONIC, and its rows."""

    row_count: int
    token_count: int
    accepted_ns: int
    started_ns: int
    finished_ns: int


def random_model(layers: int = 4, *, heads: int = 8, kv_heads: int = 2, dim: int = 128) -> Model:
    """A small Llama with random bf16 weights on the GPU, always the same."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=4096,
    )
    device = torch.device("cuda")
    return Model.random(config, torch.bfloat16, device, PlainArenas(device))


def varied_model() -> Model:
    """The same with larger embeddings: what it says depends on each token and does not soon repeat.

    A token that is wrong, or late by a step, then changes the answer.
    """
    model = random_model()
    embeddings: Any = model.module.get_input_embeddings()
    weight: torch.Tensor = embeddings.weight
    weight.normal_(std=0.3, generator=torch.Generator(weight.device).manual_seed(0))
    return model


def head_shape(model: Model) -> HeadShape:
    config = model.module.config.get_text_config()
    return HeadShape(
        config.num_attention_heads,
        model.shape.kv_head_count,
        model.shape.head_dim,
        model.shape.dtype,
    )


class Oracle:
    """The same weights in float32 with transformers' own attention, one sequence at a time."""

    def __init__(self, model: Model) -> None:
        module: Any = copy.deepcopy(model.module)
        self._module = module.float()
        self._module.set_attn_implementation("sdpa")

    def shortfall(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """How far below the best logit a chosen token lies at most; greedy choice is near 0."""
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        with torch.inference_mode():
            logits = self._module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        return float((logits.amax(dim=-1) - chosen).max())


class CudaServer:
    """Serves requests through one device; may be used again once idle."""

    def __init__(
        self,
        model: Model,
        *,
        backend: str,
        is_fused: bool = True,
        row_max: int = 16,
        token_max: int = 512,
        context_length: int = 512,
        block_count: int | None = None,
        block_tokens: int = 16,
        depth: int = 2,
        chunk_tokens_max: int | None = None,
        is_wakeful: bool = False,
    ) -> None:
        from gapless.executor.cuda_device import CudaDevice
        from gapless.executor.cuda_step import CudaStep
        from gapless.executor.fused import FusedDecoder, recognise

        blocks = block_count or 1 + row_max * -(-context_length // block_tokens)
        config = CoreConfig(
            running_max=row_max,
            queued_max=10_000,
            depth=depth,
            step_tokens_max=token_max,
            chunk_tokens_max=chunk_tokens_max or token_max,
            row_max=row_max,
            block_tokens=block_tokens,
            block_count=blocks,
            context_length=context_length,
            vocab_size=model.shape.vocab_size,
            assignment_max=40_000,
        )
        self.core = Core(config, EPOCH)
        frames, results, seats = config.frame_layout, config.result_layout, config.seat_layout
        self.frames = FrameSlots(frames, memoryview(mmap.mmap(-1, frames.size_bytes)))
        self.results = ResultSlots(results, memoryview(mmap.mmap(-1, results.size_bytes)))
        self.table = seats.table(memoryview(mmap.mmap(-1, seats.size_bytes)))
        device = torch.device("cuda")
        self.pool = KvPool(PlainArenas(device), model.shape.kv_shape(block_tokens), blocks)
        self.pool.tensor.fill_(float("nan"))  # what nobody wrote must never matter
        self.pool.tensor[:, :, 0] = 0.0
        copy = SeatCopy(seats, device)
        copy.upload(self.table)
        fused = recognise(model.module, model.shape.context_length) if is_fused else None
        assert fused is None or isinstance(fused, FusedDecoder), fused
        self.step = CudaStep(model, fused, self.pool, copy, head_shape(model), frames, backend)
        regions = Regions(self.frames, self.results, self.table)
        self.device = CudaDevice(EPOCH, regions, self.step, CORES_MIN if is_wakeful else 1)
        self.tokens: dict[int, list[int]] = {}
        self.stamps: list[StepStamps] = []
        self.carried_count = 0
        self.wakeup_limit_s = WAKEUP_LIMIT_S
        self._shapes: dict[int, tuple[int, int]] = {}
        self._handle_count = 0

    def submit(self, request: Request) -> int:
        handle = self._handle_count
        self._handle_count += 1
        self.tokens[handle] = []
        word = Submit(
            handle=Handle(handle),
            request_id=f"request-{handle}",
            tenant="",
            prompt=np.array(request.prompt, dtype=np.int32).tobytes(),
            sampling=request.sampling,
            stopping=Stopping(request.max_new_tokens, stop_tokens=request.stop_tokens),
            received_s=0.0,
        )
        self.core.submit(time.monotonic(), GATEWAY, word)
        return handle

    def serve(self, requests: Sequence[Request]) -> list[list[int]]:
        """Submits all of `requests` and runs until idle; their tokens."""
        handles = [self.submit(request) for request in requests]
        while not self.core.is_idle:
            self.turn()
        return [self.tokens[handle] for handle in handles]

    def turn(self) -> None:
        """Fills the pipeline, waits for results, takes them."""
        while self.core.can_build():
            frame = self.core.build(time.monotonic())
            if frame is None:
                break
            self.publish(frame)
        if self.device.may_sleep():
            readable, _, _ = select.select([self.device.wakeup], [], [], self.wakeup_limit_s)
            assert readable, "nothing landed"
        for step in self.device.finished():
            result = self.results.read(EPOCH, step)
            self.stamps.append(
                StepStamps(
                    *self._shapes.pop(step),
                    result.accepted_ns,
                    result.started_ns,
                    result.finished_ns,
                )
            )
            self.core.result(time.monotonic(), result)
            self._take_updates()

    def publish(self, frame: Frame) -> None:
        """Puts `frame` into its slot and says so."""
        apply_assignments(self.table, frame.assignments)
        self.frames.write(frame)
        self._shapes[frame.step] = (frame.row_count, frame.token_count)
        self.carried_count += int((frame.rows.carry_row >= 0).sum())
        self.device.accept(frame.step)

    def close(self) -> None:
        self.device.close()

    def _take_updates(self) -> None:
        for update in self.core.take_updates().values():
            handles = np.frombuffer(update.handles, dtype=np.int64).tolist()
            for handle, token in zip(
                handles, np.frombuffer(update.tokens, dtype=np.int32).tolist(), strict=True
            ):
                self.tokens[handle].append(token)
            for event in update.events:
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    assert event.completion_tokens == len(self.tokens[event.handle]), event


def outcome(server: CudaServer, requests: Sequence[Request]) -> Tokens | str:
    """What `server` says; or how it broke, if a plant made it break."""
    try:
        return server.serve(requests)
    except AssertionError as broken:
        return f"broken: {broken}"
    finally:
        server.close()
