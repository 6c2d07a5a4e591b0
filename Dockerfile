# docker build --target cpu -t qdqbench:cpu .
# docker build --target gpu -t qdqbench:gpu .
# docker run --rm -v "$PWD:/work" qdqbench:cpu run; for the GPU image add --gpus all
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends git
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# g++: torch.compile of `bench`
FROM python:${PYTHON}-slim AS base
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /opt/qdqbench/
ENV PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/opt/qdqbench/constraints.txt HF_HOME=/work/.cache/huggingface
WORKDIR /work
ENTRYPOINT ["qdqbench"]

# CUDA's libraries come with torch; the host has the driver and the NVIDIA Container Toolkit.
FROM base AS gpu
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install "$(ls /wheels/*.whl)[quantize,rtx,openvino,serve]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The last target is the one that is built without --target.
FROM base AS cpu
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install "$(ls /wheels/*.whl)[quantize,openvino,serve]"
