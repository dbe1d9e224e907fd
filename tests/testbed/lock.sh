#!/bin/bash
# Pins in constraints.txt what pip resolves today for all extras.
#
# torch stays at the version that is pinned (TORCH=2.14.0 moves it): without a pin, pip takes the newest
# one, with gigabytes of CUDA. A local version such as +cpu is dropped, so that any build of it fits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q --progress-bar off --upgrade pip
"$work/venv/bin/python" -m pip install -q --progress-bar off "torch==$torch" -e '.[deploy,trainer,wandb,dev]'
{
  echo '# The versions that the tests run with, for pip: pip install -c constraints.txt -e ".[deploy,trainer,dev]"'
  echo '# Made by `make lock` (tests/testbed/lock.sh); ranges and reasons are in pyproject.toml.'
  # What a CUDA build of torch brings is torch's own business: another build needs other packages.
  "$work/venv/bin/python" -m pip freeze --all --exclude-editable --exclude setuptools --exclude wheel \
    | sed -e 's/+[a-z0-9.]*$//' -e '/^nvidia-.*-cu[0-9]/d' -e '/^triton==/d'
} >"$work/constraints.txt"
diff -u constraints.txt "$work/constraints.txt" && echo "constraints.txt is up to date" || true
cp "$work/constraints.txt" constraints.txt
