#!/usr/bin/env bash
# gpu_suite.sh [BUILD_DIR [LAYER.safetensors]]: everything that needs a GPU, on this machine, from a
# finished build (default build/cuda) and a layer (default data/moe_lm_layer.safetensors). Needs
# neither cmake nor ctest. Prints each part's log where it fails, and a table last; the exit code is
# 1 where a part failed. A part that the machine has no GPUs or no programs for is "skipped".
#
# GPU_SUITE_PARTS=REGEX runs only the parts whose names match; GPU_SUITE_LOGS=DIR keeps their output.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

# Schedules that `uniep run` is checked with; all must give the same bytes at any number of GPUs.
schedules=(
  'sequential,tile_m=128,tile_n=256,dispatch_workers=16'
  'pipelined:2,tile_m=128,tile_n=256,dispatch_workers=16'
  'two-kernel,tile_m=128,tile_n=256,dispatch_workers=16'
  'single,tile_m=128,tile_n=256,dispatch_workers=16'
)
gpu_counts=(1 2 4)
# Random cases, relative to the usual number, in programs that a sanitizer slows down.
sanitizer_cases=0.05
sanitized=(cuda_stages_test cuda_plan_test)
# A sanitizer may run launches one after another, though those of emulated ranks wait for one another
# under schedules that hold several stages in one: it runs these tests only (and all of other programs).
sanitizer_filter='CudaStages.RandomLayersAtAnyNumberOfRanks:CudaStages.RandomSchedulesAtOneRank:PlanKernel*:OrderKernel*'
tokens_beside_torch=512  # of a rank

build=${1:-build/cuda}
layer=${2:-data/moe_lm_layer.safetensors}
uniep=$build/bin/uniep
logs=${GPU_SUITE_LOGS:-$(mktemp -d)}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
mkdir -p "$logs"
gpus=$({ nvidia-smi --list-gpus || ls /dev/nvidia[0-9]*; } 2>/dev/null | grep -cE '^(GPU|/dev/)')
table=()
failed=0

[ -x "$uniep" ] || { echo "there is no $uniep; a build with CUDA is needed" >&2; exit 2; }
[ -r "$layer" ] || { echo "there is no layer file $layer" >&2; exit 2; }

note() {  # note NAME GPUS VERDICT SECONDS
  table+=("$(printf '%-68s %4s  %8s  %s' "$1" "$2" "$4" "$3")")
  printf '%s: %s (%s s)\n' "$1" "$3" "$4"
}

wanted() { [[ $1 =~ ${GPU_SUITE_PARTS:-.} ]]; }

# What a GoogleTest program's log says of tests that did not run: "passed" covers none of these.
verdict_of_log() {
  local passed skipped
  passed=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\.$/\1/p' "$1" | tail -n 1)
  skipped=$(sed -nE 's/^\[  SKIPPED \] ([0-9]+) tests?, listed below:$/\1/p' "$1" | tail -n 1)
  if [ -z "$skipped" ]; then
    echo passed
  elif [ "${passed:-0}" = 0 ]; then
    echo skipped
  else
    echo "passed, $skipped of $((passed + skipped)) tests skipped"
  fi
}

# part NAME GPUS LIMIT_S COMMAND...: runs one part where there are that many GPUs.
part() {
  local name=$1 needed=$2 limit=$3
  shift 3
  wanted "$name" || return 0
  if [ "$gpus" -lt "$needed" ]; then
    note "$name" "$needed" "skipped: $gpus GPUs here" 0
    return 0
  fi
  local log=$logs/${name//[^A-Za-z0-9_.,=-]/_}.log begin=$SECONDS code=0
  timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 || code=$?
  local seconds=$((SECONDS - begin))
  case $code in
    0) note "$name" "$needed" "$(verdict_of_log "$log")" $seconds ;;
    124 | 137) note "$name" "$needed" "FAILED: not done after $limit s" $seconds ;;
    *) note "$name" "$needed" "FAILED: exit code $code" $seconds ;;
  esac
  if [ $code != 0 ]; then
    failed=1
    tail -n 40 "$log"
  fi
}

skip() { wanted "$1" && note "$1" "$2" "skipped: $3" 0; }

gtest_programs() {
  for program in "$build"/tests/cuda/*_test "$build"/tests/cli/cuda_bench_test; do
    [ -x "$program" ] || continue
    part "$(basename "$program")" 1 600 "$program"
  done
}

# The first result that exists is what all others are compared with.
layer_runs() {
  local first='' schedule count result
  for schedule in "${schedules[@]}"; do
    for count in "${gpu_counts[@]}"; do
      result=$results/$schedule.$count.safetensors
      part "run --ranks $count $schedule" "$count" 300 "$uniep" run --backend cuda \
        --ranks "$count" --input "$layer" --schedule "$schedule" --check --output "$result"
      [ -f "$result" ] || continue
      if [ -n "$first" ]; then
        part "same bytes --ranks $count $schedule" "$count" 60 cmp "$first" "$result"
      fi
      first=${first:-$result}
    done
  done
}

bench() {
  local count
  for count in "${gpu_counts[@]}"; do
    part "uniep bench --ranks $count" "$count" 300 "$uniep" bench --backend cuda \
      --ranks "$count" --shape small --schedule sequential single --iterations 3
  done
}

plain_torch() {
  if ! python3 -c 'import torch, safetensors' 2>/dev/null; then
    skip "plain_torch.py" 1 "python3 has no torch or safetensors"
    return 0
  fi
  for count in 1 2; do
    part "plain_torch.py, $count" "$count" 600 \
      python3 tests/cuda/plain_torch.py "$uniep" "$count" "$layer"
  done
}

beside_torch() {
  local library=$build/benchmarks/libuniep_bridge.so count missing=''
  python3 -c 'import torch' 2>/dev/null || missing='python3 has no torch'
  [ -f "$library" ] || missing="there is no $library"
  for count in "${gpu_counts[@]}"; do
    if [ -n "$missing" ]; then
      skip "compare_torch.py, $count" "$count" "$missing"
      continue
    fi
    part "compare_torch.py, $count" "$count" 600 python3 -m torch.distributed.run \
      --nproc_per_node="$count" benchmarks/compare_torch.py --library "$library" --check \
      --cases "all,tokens=$tokens_beside_torch" --iterations 3 \
      --forward "${schedules[@]}" --backward "${schedules[@]}"
  done
}

sanitizers() {
  local sanitizer tool program
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  for tool in memcheck racecheck synccheck; do
    for program in "${sanitized[@]}"; do
      if [ -z "$sanitizer" ]; then
        skip "$tool $program" 1 "there is no compute-sanitizer"
        continue
      fi
      part "$tool $program" 1 600 env UNIEP_TEST_CASES=$sanitizer_cases \
        "$sanitizer" --tool "$tool" --error-exitcode 99 "$build/tests/cuda/$program" \
        --gtest_filter="$sanitizer_filter"
    done
  done
}

gtest_programs
layer_runs
bench
plain_torch
beside_torch
sanitizers

printf '\n# logs in %s\n' "$logs"
printf '%-68s %4s  %8s  %s\n' part GPUs seconds verdict
printf '%s\n' "${table[@]}"
exit $failed
