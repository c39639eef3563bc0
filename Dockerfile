# adaptive serve in a container.
#
#   docker build -t adaptive .                            on the processor
#   docker build -t adaptive --build-arg TORCH=cu128 .    on an NVIDIA GPU (docker run --gpus all ...)
#
#   docker run -p 127.0.0.1:8080:8080 -e ADAPTIVE_API_KEY=choose-one -v adaptive:/state -v models:/models adaptive
#
# /state holds the log and the adapters, /models what is fetched from the hub. The key is needed: a port of a container can
# be reached from outside of it.

FROM python:3.12-slim-bookworm AS build
# Which of PyTorch's indexes torch comes from: cpu, cu126, cu128, ...
ARG TORCH=cpu
# The kernels are compiled for every instruction set that they know, whatever the machine that builds.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/adaptive
ENV PATH=/opt/adaptive/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --index-url "https://download.pytorch.org/whl/${TORCH}" torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY adaptive adaptive
COPY checkpoints checkpoints
COPY cli cli
COPY trainers trainers
RUN pip install --no-cache-dir -c constraints.txt .

FROM python:3.12-slim-bookworm
COPY --from=build /opt/adaptive /opt/adaptive
RUN useradd --uid 1000 --create-home adaptive \
    && install -d -m 700 -o adaptive -g adaptive /state /models
USER adaptive
WORKDIR /home/adaptive
ENV PATH=/opt/adaptive/bin:$PATH \
    ADAPTIVE_HOME=/state \
    ADAPTIVE_HOST=0.0.0.0 \
    HF_HOME=/models
VOLUME ["/state", "/models"]
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=5)"]
# SIGTERM gives running answers ten seconds.
STOPSIGNAL SIGTERM
ENTRYPOINT ["adaptive"]
CMD ["serve"]
