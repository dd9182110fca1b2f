# docker build -t ddptrain .            an image for `ddptrain train`, and for pods of the backend kubernetes
# docker run --gpus all --shm-size 8g -v "$PWD/runs:/workspace/runs" ddptrain ddptrain train petnames
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ddptrain ddptrain
COPY configs configs
COPY docs/man docs/man
RUN pip install --no-cache-dir "build>=1.2" "hatchling>=1.27" \
    && python -m build --no-isolation --wheel --outdir /dist

FROM python:${PYTHON}-slim
# git: code of a work tree is copied to other hosts, and its commit is recorded. tini: reaps processes as PID 1.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git tini \
    && rm -rf /var/lib/apt/lists/*
# EXTRAS, as [sweep,notify,s3]; torch comes with its CUDA libraries.
ARG EXTRAS=""
COPY --from=build /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)${EXTRAS}" \
    && rm -r /dist
# Nobody's files are overwritten in mounted folders: --user "$(id -u):$(id -g)" chooses another user.
RUN useradd --create-home --uid 1000 ddptrain \
    && mkdir /workspace \
    && chown ddptrain /workspace
USER 1000
WORKDIR /workspace
# SIGTERM to the container reaches ddptrain: the ranks save, and it ends with 75. Pods of a cluster run `python -m ...`.
ENTRYPOINT ["tini", "--"]
CMD ["ddptrain", "--help"]
