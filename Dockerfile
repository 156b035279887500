# Three images from one file: `gateway` and `scheduler` without torch, `executor` with it.
#
#   docker compose build
#
# Build arguments
#   PYTHON_IMAGE     base image
#   TORCH            requirement for the executor's torch
#   TORCH_INDEX_URL  package index to take torch from; default: PyTorch's CPU builds. Empty = pip's own.
#                    If it cannot be reached, pip's own index serves.
#   MODEL            what `gapless.executor.prepare` takes: baked into the images under /models/default
# Wheels put into ./wheels are preferred to any index (builds without a network).
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM scratch AS source
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY protos /src/protos
COPY gateway /src/gateway
COPY scheduler /src/scheduler
COPY executor /src/executor
COPY client /src/client
COPY bench /src/bench

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_FIND_LINKS=/wheels PATH=/opt/gapless/bin:$PATH
RUN useradd --uid 10001 --create-home gapless \
 && mkdir -p /run/gapless /models /wheels && chown gapless /run/gapless \
 && python3 -m venv /opt/gapless
# The pattern makes the folder optional.
COPY LICENSE wheel[s]/* /wheels/

FROM base AS executor-base
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN if ls /wheels/torch-* >/dev/null 2>&1 || [ -z "$TORCH_INDEX_URL" ]; then pip install "$TORCH"; \
    else pip install --index-url "$TORCH_INDEX_URL" "$TORCH" || pip install "$TORCH"; fi
COPY --from=source /src /src
RUN pip install "/src[executor]"

FROM executor-base AS model
ARG MODEL=demo
RUN folder=$(python -m gapless.executor.prepare "$MODEL" --cache /tmp/cache | tail -n 1) \
 && mkdir -p /models && mv "$folder" /models/default \
 && python -c "import pathlib; from gapless.protos import model_folder; f = pathlib.Path('/models/default'); r = model_folder.revision(f); (f / 'revision').write_text(r)" \
 && mkdir /models/description && cp /models/default/*.json /models/default/revision /models/description/ \
 && rm -f /models/description/*.index.json \
 && { cp /models/default/*.jinja /models/description/ 2>/dev/null || true; }

FROM base AS scheduler
COPY --from=source /src /src
RUN pip install "/src[scheduler]"
USER gapless
ENTRYPOINT ["python", "-m", "gapless.scheduler", "--run-folder", "/run/gapless"]

FROM executor-base AS executor
COPY --from=model /models/default /models/default
USER gapless
# What Triton and FlashInfer compile on a GPU; compose keeps it in a volume.
ENV TRITON_CACHE_DIR=/home/gapless/.cache/triton
RUN mkdir -p "$TRITON_CACHE_DIR"
ENTRYPOINT ["python", "-m", "gapless.executor", "--run-folder", "/run/gapless"]
CMD ["--model", "/models/default"]

FROM base AS gateway
COPY --from=source /src /src
RUN pip install "/src[gateway]"
COPY --from=model /models/description /models/default
USER gapless
EXPOSE 50051
ENTRYPOINT ["python", "-m", "gapless.gateway", "--run-folder", "/run/gapless"]
CMD ["--model", "/models/default", "--model-name", "demo", "--listen", "0.0.0.0:50051"]
