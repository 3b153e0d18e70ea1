# One image for every process of Solaris; `docker run solaris:local --help` lists the verbs.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make && rm -rf /var/lib/apt/lists/*
WORKDIR /app
# The locked packages first: they change seldom, and this layer holds the 6 GB.
COPY pyproject.toml requirements.lock build.lock compiler.lock README.md Makefile ./
COPY .ci/set-up .ci/set-up
RUN for part in schemas models streams agents solaris; do mkdir $part && touch $part/__init__.py; done && \
    make set-up && rm -rf .tools /root/.cache
COPY . .

FROM python:3.12-slim
COPY --from=build /app /app
RUN useradd --system solaris && mkdir /state && chown solaris /state
USER solaris
WORKDIR /app
VOLUME /state
# What numba compiles at the first start is kept with the state.
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=/state/.compiled
ENTRYPOINT ["/app/.venv/bin/python", "-m", "solaris"]
