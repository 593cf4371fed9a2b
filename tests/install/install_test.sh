#!/usr/bin/env bash
# install_test.sh built|shared SOURCE_DIR BUILD_DIR WORK_DIR: installs the library to a prefix under
# WORK_DIR and uses it from there as a stranger would.
#   built   installs what BUILD_DIR has built
#   shared  configures and builds a shared library of its own, unoptimised
# From the environment, all optional: CMAKE, CMAKE_GENERATOR, CXX, CMAKE_CXX_COMPILER_LAUNCHER, NM.
set -euo pipefail
variant=$1 source_dir=$2 build_dir=$3 work_dir=$4
cmake=${CMAKE:-cmake}
cxx=${CXX:-c++}
nm=${NM:-nm}

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
step() { echo "== $*"; }

rm -rf "$work_dir/prefix" "$work_dir/consumer"
mkdir -p "$work_dir"
prefix=$work_dir/prefix

if [ "$variant" = shared ]; then
  step "a shared library"
  "$cmake" -S "$source_dir" -B "$work_dir/shared" -DBUILD_SHARED_LIBS=ON \
    -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DUNIEP_BUILD_TOOLS=OFF \
    -DUNIEP_BUILD_TESTS=OFF -DUNIEP_BUILD_EXAMPLES=OFF >"$work_dir/configure.log"
  "$cmake" --build "$work_dir/shared" --parallel >"$work_dir/build.log" ||
    { tail -n 40 "$work_dir/build.log"; fail "building the shared library"; }
  build_dir=$work_dir/shared
fi

step "install"
"$cmake" --install "$build_dir" --prefix "$prefix" >"$work_dir/install.log"
[ -f "$prefix/include/uniep/uniep.h" ] || fail "no include/uniep/uniep.h was installed"

step "every public header compiles alone and includes only the standard library and uniep/"
for header in "$prefix"/include/uniep/*.h; do
  name=uniep/$(basename "$header")
  echo "#include <$name>" >"$work_dir/alone.cpp"
  "$cxx" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -I"$prefix/include" \
    "$work_dir/alone.cpp" || fail "$name does not compile alone"
  # A standard header has neither a folder nor a suffix, but in the one header that is C.
  if grep -E '^ *# *include' "$header" |
    grep -vE '^#include (<([a-z_]+|stddef\.h|stdint\.h)>|"uniep/[a-z0-9_]+\.h")$'
  then
    fail "$name includes what a user may not have"
  fi
done
extra=$(cd "$prefix/include" && find . -type f ! -path './uniep/*.h')
[ -z "$extra" ] || fail "unexpected files under include/: $extra"

library=$(find "$prefix" -name 'libuniep.so')
if [ "$variant" = shared ] && [ -z "$library" ]; then fail "no libuniep.so was installed"; fi
if [ -n "$library" ]; then
  step "the shared library exports names of the public headers only"
  "$nm" --dynamic --defined-only --demangle "$library" | cut -d' ' -f3- >"$work_dir/exports"
  [ -s "$work_dir/exports" ] || fail "nothing is exported"
  if grep -vE '^((typeinfo for |typeinfo name for |vtable for )?uniep::|uniep_[a-z_]+$)' \
    "$work_dir/exports"; then
    fail "exported, but neither of namespace uniep nor of the C API"
  fi
  for name in $(grep -oE '\buniep_[a-z_]+\(' "$prefix/include/uniep/c_api.h" | tr -d '('); do
    grep -qx "$name" "$work_dir/exports" || fail "$name of the C API is not exported"
  done
  # A nested namespace (lower case, then ::) is internal.
  if grep -E '^([a-z ]+ for )?uniep::(\(anonymous|[a-z0-9_]+::)' "$work_dir/exports"; then
    fail "exported, but internal"
  fi
fi

step "find_package from a project of its own"
consumer=$work_dir/consumer
# Its examples are one program.
sed -n '/^```cpp$/,/^```$/p' "$source_dir/docs/api.md" | sed '/^```/d' >"$work_dir/api_programs.cpp"
[ -s "$work_dir/api_programs.cpp" ] || fail "docs/api.md has no example"
"$cmake" -S "$source_dir/tests/install/consumer" -B "$consumer" -DCMAKE_PREFIX_PATH="$prefix" \
  -DPROGRAMS="$source_dir/examples/train_step.cpp;$work_dir/api_programs.cpp"
"$cmake" --build "$consumer"
"$consumer/consumer"
"$consumer/api_programs"
"$consumer/train_step" single | tail -n +2 >"$work_dir/single"
"$consumer/train_step" sequential | tail -n +2 | diff "$work_dir/single" - ||
  fail "the schedules single and sequential give different results"
step "passed"
