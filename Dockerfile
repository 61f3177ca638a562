# The operator and `conch fetch` in one image: non-root, no shell needed, read-only root file system.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
RUN python3 -m venv /opt/conch
COPY operator/requirements.txt /src/operator/requirements.txt
RUN /opt/conch/bin/pip install --no-cache-dir --require-hashes -r /src/operator/requirements.txt

FROM dependencies AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/conch/bin/pip install --no-cache-dir --no-deps --target /opt/app .

# The dependencies are a layer of their own, so a change of the code is a small one.
FROM ${BASE}
COPY --from=dependencies /opt/conch /opt/conch
COPY --from=build /opt/app /opt/app
ENV PATH=/opt/app/bin:/opt/conch/bin:$PATH PYTHONPATH=/opt/app PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["conch"]
CMD ["run"]
