#!/usr/bin/env bash
# Installs what building and testing uniep needs and this machine lacks: on Debian and Ubuntu, by
# apt-get, as root or with sudo. Where nothing is missing it needs no network and changes nothing.
# Elsewhere it says what to install. docs/dependencies.md says what each package is for.
set -euo pipefail

has_command() { command -v "$1" >/dev/null; }
has_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ]; }
has_cblas() { has_header cblas.h || compgen -G '/usr/include/*/cblas.h' >/dev/null; }
# A virtual environment, and the headers that torch.compile builds with.
has_python_for_torch() {
  python3 -c 'import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}
has_fuzzer() {
  has_command clang++ &&
    compgen -G "$(dirname "$(clang++ -print-libgcc-file-name --rtlib=compiler-rt)")/*fuzzer*.a" \
      >/dev/null
}

required=() optional=()
has_command make || required+=(make)
has_command g++ || required+=(g++)
has_command cmake || required+=(cmake)
has_command ninja || required+=(ninja-build)
has_command python3 || required+=(python3)
has_python_for_torch || required+=(python3-venv python3-dev)
has_header gtest/gtest.h || required+=(libgtest-dev)
has_header CLI/CLI.hpp || required+=(libcli11-dev)
has_header nlohmann/json.hpp || required+=(nlohmann-json3-dev)
has_header benchmark/benchmark.h || required+=(libbenchmark-dev)
has_command ccache || optional+=(ccache)
has_command pkg-config || optional+=(pkg-config)
has_cblas || optional+=(libopenblas-dev)
has_header rdma/fi_cm.h || optional+=(libfabric-dev)
has_fuzzer || optional+=(clang libclang-rt-dev)

# Installed, yet not found by the tests above (say, for another compiler): trying again would
# change nothing.
drop_installed() {
  local -n list=$1
  local package kept=()
  for package in "${list[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      kept+=("$package")
  done
  list=("${kept[@]}")
}
if has_command dpkg-query; then
  drop_installed required
  drop_installed optional
fi

# apt: as root, through sudo, or not at all.
as_root=()
can_install=no
if has_command apt-get; then
  if [ "$(id -u)" = 0 ]; then
    can_install=yes
  elif has_command sudo; then
    as_root=(sudo)
    can_install=yes
  fi
fi
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "$@" </dev/null; }

if [ ${#required[@]} -gt 0 ] || [ ${#optional[@]} -gt 0 ]; then
  if [ $can_install = yes ]; then
    echo "Installing:" "${required[@]}" "${optional[@]}"
    apt -qq update || echo "apt-get update failed; trying with the lists that are here" >&2
    if [ ${#required[@]} -gt 0 ]; then
      apt -qq install -y --no-install-recommends "${required[@]}" || {
        echo "Could not install:" "${required[@]}" >&2
        exit 1
      }
    fi
    for package in "${optional[@]}"; do
      apt -qq install -y --no-install-recommends "$package" ||
        echo "Could not install $package: going on without it" >&2
    done
  else
    [ ${#optional[@]} = 0 ] || echo "Not here, and not needed:" "${optional[@]}" >&2
    if [ ${#required[@]} -gt 0 ]; then
      echo "Missing, by their Debian names:" "${required[@]}" >&2
      echo "Install them: this needs apt-get and root or sudo, which are not at hand here." >&2
      exit 1
    fi
  fi
fi

# What an older distribution's packages would fail at later, with a longer error.
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }
cmake_version=$(cmake --version | sed -n '1s/.* //p')
at_least 3.25 "$cmake_version" || {
  echo "CMake 3.25 or newer is needed; $(command -v cmake) is $cmake_version." \
    "Debian 12 and Ubuntu 24.04 have it; elsewhere: pip install cmake" >&2
  exit 1
}
if [ -z "${CXX:-}" ]; then
  gcc_version=$(g++ -dumpfullversion)
  at_least 12 "$gcc_version" || {
    echo "g++ 12 or newer is needed; $(command -v g++) is $gcc_version." \
      "Install one and name it in CXX, e.g. CXX=g++-12 make build" >&2
    exit 1
  }
fi
