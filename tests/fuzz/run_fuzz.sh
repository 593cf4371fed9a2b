#!/bin/sh
# run_fuzz.sh SOURCE_DIR WORK_DIR [SECONDS]: builds the libFuzzer targets with clang++ and lets each
# run for half of SECONDS (30). Exit status 0: nothing found; 77: this machine cannot fuzz; anything
# else: a finding, whose input is left in WORK_DIR.
set -eu
source_dir=$1
work_dir=$2
seconds=${3:-30}
skipped=77

cxx=${UNIEP_FUZZ_CXX:-clang++}
flags="-std=c++20 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -fno-sanitize-recover=all
       -fsanitize=address,undefined -I$source_dir/include -I$source_dir/src -I$source_dir/tests"
if [ -n "${UNIEP_FUZZ_INCLUDE:-}" ]; then
  flags="$flags -isystem $UNIEP_FUZZ_INCLUDE"
fi
mkdir -p "$work_dir"

if ! command -v "$cxx" >/dev/null; then
  echo "skipped: there is no $cxx; install clang, or name one in UNIEP_FUZZ_CXX"
  exit $skipped
fi
cat >"$work_dir/probe.cpp" <<'PROBE'
#include <nlohmann/json.hpp>
extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
PROBE
if ! "$cxx" $flags -fsyntax-only "$work_dir/probe.cpp" 2>"$work_dir/probe.log"; then
  echo "skipped: $cxx does not find nlohmann/json.hpp; name its folder in UNIEP_FUZZ_INCLUDE"
  exit $skipped
fi
sed -i 1d "$work_dir/probe.cpp"
if ! "$cxx" $flags -fsanitize=fuzzer "$work_dir/probe.cpp" -o "$work_dir/probe" 2>"$work_dir/probe.log"
then
  echo "skipped: $cxx cannot link libFuzzer (on Debian: apt install libclang-rt-14-dev)"
  exit $skipped
fi

# Recompiles only what is older than some source, as the JSON parser takes its time.
objects=
for file in src/io/layer_file src/io/safetensors src/io/safetensors_header src/base/destination \
            src/base/files src/base/memory_info src/base/output_file src/base/quotes \
            src/base/temporary_file \
            tests/fuzz/fuzz_safetensors tests/fuzz/fuzz_layer tests/fuzz/make_corpus; do
  object=$work_dir/$(basename $file).o
  newer=
  if [ -f "$object" ]; then
    newer=$(find "$source_dir/src" "$source_dir/include" "$source_dir/tests/fuzz" -newer "$object" \
            -type f \( -name '*.h' -o -path "*/$file.cpp" \))
  fi
  if [ ! -f "$object" ] || [ -n "$newer" ]; then
    "$cxx" $flags -fsanitize=fuzzer-no-link -c "$source_dir/$file.cpp" -o "$object"
  fi
  case $file in src/*) objects="$objects $object" ;; esac
done

"$cxx" $flags "$work_dir/make_corpus.o" $objects -o "$work_dir/make_corpus"
for target in fuzz_safetensors fuzz_layer; do
  "$cxx" $flags -fsanitize=fuzzer "$work_dir/$target.o" $objects -o "$work_dir/$target"
  "$work_dir/make_corpus" "$work_dir/seeds"
  mkdir -p "$work_dir/corpus_$target"
  echo "== $target for $((seconds / 2)) s"
  "$work_dir/$target" -max_total_time=$((seconds / 2)) -rss_limit_mb=1024 -malloc_limit_mb=64 \
    -timeout=10 -max_len=16384 -print_final_stats=1 -artifact_prefix="$work_dir/$target-" \
    -dict="$source_dir/tests/fuzz/safetensors.dict" "$work_dir/corpus_$target" "$work_dir/seeds" \
    >"$work_dir/$target.log" 2>&1 || { tail -n 60 "$work_dir/$target.log"; exit 1; }
  grep -E 'number_of_executed_units|peak_rss|DONE' "$work_dir/$target.log"
done
