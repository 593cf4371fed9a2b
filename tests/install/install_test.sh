#!/usr/bin/env bash
# install_test.sh built|shared SOURCE_DIR BUILD_DIR WORK_DIR: installs the library to a prefix under
# WORK_DIR and uses it from there as a stranger would.
#   built   installs what BUILD_DIR has built
#   shared  builds a shared library of its own: where BUILD_DIR has a compiler cache, as BUILD_DIR was
#           built, so that its objects come from there; else unoptimised
# From the environment, all optional: CMAKE, CMAKE_GENERATOR, CC, CXX, CMAKE_CXX_COMPILER_LAUNCHER, NM.
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

rm -rf "$work_dir/prefix" "$work_dir/moved" "$work_dir/consumer" "$work_dir/c_consumer"
mkdir -p "$work_dir"
prefix=$work_dir/prefix

# build_option NAME...: how BUILD_DIR was configured, for another build.
build_option() {
  local name
  for name; do
    sed -n "s/^\($name\):[A-Z]*=\(.*\)/-D\1=\2/p" "$build_dir/CMakeCache.txt"
  done
}

if [ "$variant" = shared ]; then
  step "a shared library"
  shared_dir=$work_dir/shared
  options=(-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DUNIEP_UNITY=ON)
  if build_option CMAKE_CXX_COMPILER_LAUNCHER | grep -q ccache; then
    # The cache knows sources by their way from the folder of a build, so this one lies beside it.
    case $build_dir in "$source_dir"/build/*) shared_dir=$build_dir-shared ;; esac
    export CCACHE_BASEDIR=$source_dir CCACHE_NOHASHDIR=1
    mapfile -t options < <(build_option CMAKE_BUILD_TYPE CMAKE_CXX_FLAGS CMAKE_CXX_COMPILER_LAUNCHER \
      CMAKE_CUDA_COMPILER_LAUNCHER UNIEP_{UNITY,CUDA,NVCC,NCCL_INCLUDE_DIR})
  fi
  "$cmake" -S "$source_dir" -B "$shared_dir" -DBUILD_SHARED_LIBS=ON "${options[@]}" \
    -DUNIEP_BUILD_TOOLS=OFF -DUNIEP_BUILD_TESTS=OFF -DUNIEP_BUILD_EXAMPLES=OFF \
    >"$work_dir/configure.log"
  "$cmake" --build "$shared_dir" --parallel >"$work_dir/build.log" ||
    { tail -n 40 "$work_dir/build.log"; fail "building the shared library"; }
  build_dir=$shared_dir
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

nvcc=$(sed -n 's/^UNIEP_NVCC:[A-Z]*=//p' "$build_dir/CMakeCache.txt")
if [ "$variant" = built ] && [ -x "$nvcc" ]; then
  step "kernels of a user's own convert to bf16 and back, without flags of uniep's"
  cat >"$work_dir/convert.cu" <<'EOF'
#include <uniep/bf16.h>
__global__ void to_bf16(const float* in, uniep::bf16* out) { *out = uniep::to_bf16(*in); }
__global__ void to_float(const uniep::bf16* in, float* out) { *out = uniep::to_float(*in); }
EOF
  "$nvcc" -std=c++20 -arch=sm_90 -Werror all-warnings -ptx -I"$prefix/include" \
    "$work_dir/convert.cu" -o "$work_dir/convert.ptx" || fail "bf16.h does not compile for devices"
  # A function of the host alone leaves nothing there, not even what stores its result.
  [ "$(grep -c 'st\.global' "$work_dir/convert.ptx")" = 2 ] || fail "a conversion stores nothing"
fi

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

# expect_own_symbols FILE: a library that links uniep statically hands on none of its functions.
expect_own_symbols() {
  "$nm" --dynamic --defined-only --demangle "$1" >"$work_dir/handed_on"
  if grep ' T uniep::' "$work_dir/handed_on"; then fail "$1 exports what is uniep's"; fi
}
if [ -z "$library" ]; then
  step "a shared library that links the static one"
  expect_own_symbols "$consumer/libplugin.so"
fi

if command -v "${CC:-cc}" >/dev/null; then
  step "find_package from a project in C alone"
  "$cmake" -S "$source_dir/tests/install/c_consumer" -B "$work_dir/c_consumer" \
    -DCMAKE_PREFIX_PATH="$prefix" -DPROGRAM="$source_dir/tests/api/c_api_compiles.c"
  "$cmake" --build "$work_dir/c_consumer" || fail "a project in C does not link"
  "$work_dir/c_consumer/c_consumer" || fail "the program in C exits with $?"
fi

step "pkg-config, where the tree has been moved to"
if command -v pkg-config >/dev/null; then
  moved="$work_dir/moved"
  rm -rf "$moved"
  mv "$prefix" "$moved"
  pc=$(find "$moved" -name uniep.pc)
  [ -n "$pc" ] || fail "no uniep.pc was installed"
  PKG_CONFIG_PATH=$(dirname "$pc")
  export PKG_CONFIG_PATH
  pkg-config --exists 'uniep >= 0.1 uniep < 99' || fail "its version is $(pkg-config --modversion uniep)"
  if grep -F -e "$prefix" -e "$build_dir" "$pc"; then fail "uniep.pc names a folder of this build"; fi
  at_run_time=-Wl,-rpath,$(pkg-config --variable=libdir uniep)
  # Words of their own, as in a makefile.
  # shellcheck disable=SC2046
  "$cxx" -std=c++20 "$source_dir/tests/install/consumer/consumer.cpp" -o "$work_dir/pc_consumer" \
    $(pkg-config --cflags --libs uniep) "$at_run_time"
  "$work_dir/pc_consumer"
  if [ -z "$library" ]; then
    # shellcheck disable=SC2046
    "$cxx" -shared "$consumer/CMakeFiles/consumer.dir/consumer.cpp.o" \
      -o "$work_dir/libpc_plugin.so" $(pkg-config --libs uniep)
    expect_own_symbols "$work_dir/libpc_plugin.so"
  fi
  if command -v "${CC:-cc}" >/dev/null; then
    # shellcheck disable=SC2046
    "${CC:-cc}" -std=c99 "$source_dir/tests/api/c_api_compiles.c" -o "$work_dir/pc_c_consumer" \
      $(pkg-config --cflags --libs --static uniep) "$at_run_time"
    "$work_dir/pc_c_consumer" || fail "the program in C exits with $?"
  fi
  mv "$moved" "$prefix"
else
  echo "SKIPPED: there is no pkg-config on this machine"
fi

step "docs, examples, and what completes the command line"
doc=$prefix/share/doc/uniep
for file in README.md LICENSE examples/train_step.cpp docs/images/step.svg; do
  [ -s "$doc/$file" ] || fail "no share/doc/uniep/$file was installed"
done
for file in "$source_dir"/docs/*.md; do
  cmp "$file" "$doc/docs/$(basename "$file")" || fail "docs/$(basename "$file") was not installed"
done
[ ! -e "$doc/docs/data" ] || fail "raw data of the docs was installed"
if [ -x "$prefix/bin/uniep" ]; then
  bash -c "source '$prefix/share/bash-completion/completions/uniep' && complete -p uniep" ||
    fail "bash cannot read what completes the command line"
  grep -q '^#compdef uniep$' "$prefix/share/zsh/site-functions/_uniep" ||
    fail "nothing completes the command line in zsh"
fi
step "passed"
