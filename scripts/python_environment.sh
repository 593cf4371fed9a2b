#!/usr/bin/env bash
# python_environment.sh DIR: a virtual environment in DIR with PyTorch, what tests/python needs, and
# uniep built from this checkout. Packages come from the package index that pip is set up for; what
# is there already stays. From the environment: PYTHON (python3), and what pyproject.toml reads.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

pip install -r tests/python/requirements.txt
pip install --no-deps -r tests/python/requirements-no-deps.txt
# A compiler cache then serves this checkout wherever it lies, and has what `make build` compiled in
# another folder: by the name that CMake takes, not by the one that Python was built with.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CXX=${CXX:-c++}
pip install --no-build-isolation --no-deps --config-settings=cmake.define.UNIEP_WERROR=ON .
