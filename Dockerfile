# The course in a container: README.md has the lines that build and start it. Binder and Codespaces build it, too.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
# Which PyTorch: cpu, one for a GPU such as cu130, or nothing for the package index's own, with CUDA.
ARG UV_TORCH_BACKEND=cpu
ARG NB_USER=reader
ARG NB_UID=1000

# On a GPU, Triton needs a C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc git libc6-dev make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9 \
    && useradd --create-home --non-unique --uid "${NB_UID}" "${NB_USER}" \
    && install --directory --owner="${NB_USER}" "/home/${NB_USER}/many-ranks"

USER ${NB_USER}
ENV VENV=/home/${NB_USER}/venv
ENV PATH=${VENV}/bin:/opt/uv/bin:${PATH}
WORKDIR /home/${NB_USER}/many-ranks
COPY --chown=${NB_USER} . .
RUN UV_NO_CACHE=1 make "${VENV}/.installed"
CMD ["make", "lab", "LAB=--ServerApp.ip=0.0.0.0 --no-browser"]
