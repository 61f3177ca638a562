# The operator and `conch fetch` in one image: non-root, no shell needed, read-only root file system.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/conch
COPY operator/requirements.txt operator/requirements.txt
RUN /opt/conch/bin/pip install --no-cache-dir --no-compile --require-hashes -r operator/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/conch/bin/pip install --no-cache-dir --no-deps . && /opt/conch/bin/python -m compileall -q /opt/conch/lib

FROM ${BASE}
COPY --from=build /opt/conch /opt/conch
ENV PATH=/opt/conch/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["conch"]
CMD ["run"]
