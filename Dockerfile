# The trainer in an image: Debian, Python, tini, and a user without rights.
#
#   docker build -t drafthouse:local .
#
# BASE_IMAGE       a Debian with Python 3.11 or later, or a bare Debian (Python then comes by apt)
# VARIANT          cpu, or gpu: adds the compiler and Python's headers, which Triton needs at run time
# TORCH_INDEX_URL  the package index for PyTorch, if not the one that pip is set to
# PACKAGES         an image with everything but our own code, to be used instead of building it
#
# A private index needs a password. Hand it in as a secret, which no layer keeps:
#   docker build --secret id=pip,src=$HOME/.config/pip/pip.conf .
ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG PACKAGES=packages

FROM ${BASE_IMAGE} AS base
ARG VARIANT=cpu
RUN set -eu; \
    packages=""; \
    command -v tini >/dev/null || packages="tini"; \
    python3 -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3-venv"; \
    case "$VARIANT" in \
      cpu) ;; \
      gpu) packages="$packages gcc libc6-dev"; \
           python3 -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null \
             || packages="$packages python3-dev" ;; \
      *) echo "VARIANT is '$VARIANT': use cpu or gpu" >&2; exit 2 ;; \
    esac; \
    if [ -n "$packages" ]; then \
      apt-get update -q; \
      DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages; \
      rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log; \
    fi; \
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the base image has Python "+sys.version.split()[0]+": 3.11 or later is needed")'
# The same ids on every build, so that a volume written by one image can be read by the next. A run's user may be
# another one, which has to pass through its home to what is mounted below.
RUN groupadd --gid 10001 drafthouse \
 && useradd --uid 10001 --gid drafthouse --home-dir /var/lib/drafthouse --create-home --shell /usr/sbin/nologin drafthouse \
 && chmod 755 /var/lib/drafthouse

# What the trainer needs, as a file of its own: the next stage is built again only if *this list* changes,
# not with every other line of pyproject.toml.
FROM base AS requirements
COPY pyproject.toml /tmp/
RUN python3 -c 'import tomllib; print(*tomllib.load(open("/tmp/pyproject.toml", "rb"))["project"]["optional-dependencies"]["trainer"], sep="\n")' >/tmp/requirements.txt

FROM base AS venv
ARG TORCH_INDEX_URL=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/venv
COPY --from=requirements /tmp/requirements.txt /tmp/
COPY constraints.txt /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/root/.config/pip/pip.conf \
    set -eu; \
    # An older pip takes three times as long to find what fits.
    /opt/venv/bin/python -m pip install --progress-bar off -c /tmp/constraints.txt --upgrade pip; \
    pip() { /opt/venv/bin/python -m pip install --progress-bar off -c /tmp/constraints.txt "$@"; }; \
    if [ -n "$TORCH_INDEX_URL" ]; then pip --index-url "$TORCH_INDEX_URL" torch; fi; \
    pip -r /tmp/requirements.txt

FROM base AS packages
COPY --from=venv /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/drafthouse \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1
# For who comes into an LXC container made of this image: by `su -`, cron or SSH (the first), by a login shell
# (the second, since Debian's own profile sets PATH anew). Docker reads neither.
RUN printf 'PYTHONUNBUFFERED=1\n' >>/etc/environment \
 && printf 'export PYTHONUNBUFFERED=1 PATH=%s\n' "$PATH" >/etc/profile.d/drafthouse.sh

# All that a change of our own code builds again, and all that needs no network: a deploy does this on the host,
# on packages that were built or shipped there before. Compiled here, since the root is read-only later.
FROM ${PACKAGES} AS code
COPY runs /opt/drafthouse/runs
COPY trainer /opt/drafthouse/trainer
RUN python -m compileall -q /opt/drafthouse/trainer
USER drafthouse
WORKDIR /var/lib/drafthouse
# No -g: TERM goes to launch alone, which stops the trainer so that it can save a checkpoint first.
# By name: a base image may have its tini elsewhere on PATH.
ENTRYPOINT ["tini", "--"]
CMD ["python", "-u", "-m", "trainer", "--help"]
