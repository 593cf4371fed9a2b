#!/usr/bin/env bash
# gpu_suite.sh [BUILD_DIR [LAYER.safetensors]]: everything that needs a GPU, on this machine, from a
# finished build (default build/cuda) and a layer (default data/moe_lm_layer.safetensors). Needs
# neither cmake nor ctest. Prints each part's log where it fails, and a table last, even when it is
# interrupted. Exit code 0: every selected part passed; 1: one failed; 3: none failed, but one did
# not run; 2: there is nothing to run.
#
# Where a part has more ranks than there are GPUs, they share them (UNIEP_SHARE_DEVICE=1), and the
# table says so: "passed, 4 ranks on 1 GPU". That is slow, and tests the bits and the protocol, not
# the links between GPUs. Parts that measure need a GPU for each rank. Suites of different GPUs
# (CUDA_VISIBLE_DEVICES) may run side by side, each with its own GPU_SUITE_LOGS.
#
# GPU_SUITE_PARTS=REGEX   selects the parts whose names match
# GPU_SUITE_GPUS=N        selects those of at most N ranks
# GPU_SUITE_LIST=1        only lists the selected parts, and what they are expected to take
# GPU_SUITE_SECONDS=N     begins no part that would not be done after N seconds, and ends then
# GPU_SUITE_RESUME=1      leaves out parts that have passed before, with the same build and layer
# GPU_SUITE_LOGS=DIR      where logs, verdicts and times are kept (default BUILD_DIR/gpu_suite)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

# What was tuned on this machine decides nothing here: a file that is never there.
export UNIEP_TUNE_CACHE=/nowhere/tuned.json
unset UNIEP_SHARE_DEVICE  # set for the parts whose ranks share

# Schedules that `uniep run` is checked with; all must give the same bytes at any number of ranks.
schedules=(
  'sequential,tile_m=128,tile_n=256,dispatch_workers=16'
  'pipelined:2,tile_m=128,tile_n=256,dispatch_workers=16'
  'two-kernel,tile_m=128,tile_n=256,dispatch_workers=16'
  'single,tile_m=128,tile_n=256,dispatch_workers=16'
)
rank_counts=(1 2 4)
most_ranks=8  # of a group, beside these
tokens_beside_torch=512  # of a rank
# Seconds that a test program takes on four H200 and less; others: program_s. Once a part has run,
# its own time counts.
declare -A program_seconds=(
  [cuda_stages_test]=45 [cuda_faults_test]=120 [cuda_group_test]=160 [cuda_graph_test]=205
  [cuda_soak_test]=45 [cuda_profile_test]=60 [symmetric_memory_test]=115 [cuda_memory_test]=135
  [cuda_pages_test]=150
)
program_s=30
# Programs whose tests have groups of up to so many ranks, and what they take where these share.
declare -A group_ranks=(
  [cuda_group_test]=8 [cuda_graph_test]=8 [cuda_soak_test]=8 [symmetric_memory_test]=4
  [cuda_memory_test]=4 [cuda_pages_test]=4
)
declare -A shared_seconds=(
  [cuda_group_test]=330 [cuda_graph_test]=300 [cuda_soak_test]=150 [symmetric_memory_test]=150
  [cuda_memory_test]=150 [cuda_pages_test]=120
)

# A sanitizer's part has to be done after this many seconds: a layer smaller than a tile that no
# tile divides, and random layers and routings, a fraction of their usual number.
sanitizer_s=60
sanitizer_shape=custom,tokens=96,hidden=136,intermediate=72,experts=4,topk=2
sanitizer_schedules=(sequential single)
sanitizer_cases=0.02
# A sanitizer may run launches one after another, though those of emulated ranks wait for one
# another under schedules that hold several stages in one: it runs these tests only.
declare -A sanitizer_tests=(
  [cuda_stages_test]='CudaStages.RandomLayersAtAnyNumberOfRanks:CudaStages.*AtOneRank'
  [cuda_plan_test]='PlanKernel*:OrderKernel*'
)

build=${1:-build/cuda}
layer=${2:-data/moe_lm_layer.safetensors}
uniep=$build/bin/uniep
[ -x "$uniep" ] || { echo "there is no $uniep; a build with CUDA is needed" >&2; exit 2; }
[ -r "$layer" ] || { echo "there is no layer file $layer" >&2; exit 2; }
logs=${GPU_SUITE_LOGS:-$build/gpu_suite}
mkdir -p "$logs" || exit 2
# Of every program, and of what they are given.
build_id=$(cat "$uniep" "$build"/tests/{cuda,cli}/*_test "$build"/examples/train_gpu \
  "$build"/benchmarks/*.so "$layer" 2>/dev/null | cksum | cut -d' ' -f1)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
else
  gpus=$({ nvidia-smi --list-gpus || ls /dev/nvidia[0-9]*; } 2>/dev/null | grep -cE '^(GPU|/dev/)')
fi

# --- the parts: filled by `part` and others, in the order in which they run ---
names=() ranks=() sharing=() measures=() estimates=() limits=() commands=() reasons=()

selected() {  # NAME RANKS
  [[ $1 =~ ${GPU_SUITE_PARTS:-.} ]] && [ "$2" -le "${GPU_SUITE_GPUS:-1000}" ]
}

# sharing_of RANKS [TEXT]: what the table says where ranks share GPUs; nothing where they do not.
sharing_of() {
  [ "$1" -le "$gpus" ] || [ "$gpus" = 0 ] || echo "${2:-}$1 ranks on $gpus GPU$(plural "$gpus")"
}
plural() { [ "$1" = 1 ] || echo s; }

add() {  # NAME RANKS SHARING MEASURES ESTIMATE_S LIMIT_S COMMAND...
  selected "$1" "$2" || return 0
  names+=("$1") ranks+=("$2") sharing+=("$3") measures+=("$4")
  estimates+=("$(seconds_of "$1" "$3" "$5")") limits+=("$6") reasons+=('')
  shift 6
  commands+=("$(printf '%q ' "$@")")
}

# part NAME RANKS ESTIMATE_S LIMIT_S COMMAND...
part() { add "$1" "$2" "$(sharing_of "$2")" '' "${@:3}"; }

# measuring NAME RANKS ESTIMATE_S LIMIT_S COMMAND...: with a GPU for each rank, or not at all.
measuring() { add "$1" "$2" '' yes "${@:3}"; }

# missing NAME RANKS REASON: a part that cannot run here.
missing() {
  selected "$1" "$2" || return 0
  names+=("$1") ranks+=("$2") sharing+=('') measures+=('') estimates+=(0) limits+=(0)
  commands+=('') reasons+=("$3")
}

# What the names of a part's files begin with: a part whose ranks share is another one.
file_of() {  # NAME SHARING
  local name="$1${2:+, $2}"
  echo "$logs/${name//[^A-Za-z0-9_.,=-]/_}"
}

# A verdict file has the build, the seconds and the verdict of the part's last run.
seconds_of() {  # NAME SHARING ESTIMATE
  local id seconds
  if read -r id seconds _ 2>/dev/null <"$(file_of "$1" "$2").verdict"; then
    echo "$seconds"
  else
    echo "$3"
  fi
}

verdict_before() {  # NAME SHARING: of this build, if it passed
  local id seconds verdict
  read -r id seconds verdict 2>/dev/null <"$(file_of "$1" "$2").verdict" || return 1
  [ "$id" = "$build_id" ] && [[ $verdict == passed* ]] && echo "$verdict"
}

test_programs() {
  local program name shared
  for program in "$build"/tests/cuda/*_test "$build"/tests/cli/cuda_*_test; do
    [ -x "$program" ] || continue
    name=$(basename "$program")
    shared=$(sharing_of "${group_ranks[$name]:-1}" 'up to ')
    if [ -n "$shared" ]; then
      add "$name" 1 "$shared" '' "${shared_seconds[$name]}" 900 "$program"
    else
      part "$name" 1 "${program_seconds[$name]:-$program_s}" 600 "$program"
    fi
  done
}

# run_layer RANKS SCHEDULE: the first result is checked against float64 and `sequential` at one rank,
# and all others must be the same bytes.
run_layer() {
  local reference=$logs/layer.$build_id.cksum result check=() code=0
  result=$(mktemp "$logs/result.XXXXXX") || return 1
  [ -f "$reference" ] || check=(--check)
  "$uniep" run --backend cuda --ranks "$1" --input "$layer" --schedule "$2" \
    ${check[@]+"${check[@]}"} --output "$result" || code=$?
  if [ $code = 0 ] && [ -f "$reference" ]; then
    cksum <"$result" | cmp - "$reference" || code=1
  elif [ $code = 0 ]; then
    cksum <"$result" >"$reference"
  fi
  rm -f "$result"
  return $code
}

layer_runs() {
  local schedule count
  for schedule in "${schedules[@]}"; do
    for count in "${rank_counts[@]}" $most_ranks; do
      part "run --ranks $count $schedule" "$count" 15 300 run_layer "$count" "$schedule"
    done
  done
  for count in "${rank_counts[@]}"; do
    part "run --ranks $count, shared expert" "$count" 10 120 "$uniep" run --backend cuda \
      --ranks "$count" --shape small --shared-experts 1 --shared-gate --main-grad fp32 --check
  done
}

bench() {
  local count
  for count in "${rank_counts[@]}"; do
    measuring "uniep bench --ranks $count" "$count" 15 300 "$uniep" bench --backend cuda \
      --ranks "$count" --shape small --schedule sequential single --iterations 3
  done
}

# run_example RANKS: processes as a launcher starts them; the sorted lines must be those of one
# rank.
run_example() {
  local reference=$logs/example.$build_id.txt port=$((20000 + RANDOM % 10000)) rank code=0 pids=()
  local result
  result=$(mktemp "$logs/example.XXXXXX") || return 1
  for ((rank = 0; rank < $1; rank++)); do
    RANK=$rank WORLD_SIZE=$1 LOCAL_RANK=$rank MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
      "$build/examples/train_gpu" >>"$result" &
    pids+=($!)
  done
  for rank in "${pids[@]}"; do wait "$rank" || code=1; done
  sort -o "$result" "$result"
  cat "$result"
  if [ $code = 0 ] && [ -f "$reference" ]; then
    cmp "$result" "$reference" || code=1
  elif [ $code = 0 ]; then
    cp "$result" "$reference"
  fi
  rm -f "$result"
  return $code
}

example() {
  local count
  for count in "${rank_counts[@]}"; do
    if [ -x "$build/examples/train_gpu" ]; then
      part "example train_gpu, $count" "$count" 10 120 run_example "$count"
    else
      missing "example train_gpu, $count" "$count" "there is no $build/examples/train_gpu"
    fi
  done
}

# The package's tests on a GPU have ranks of their own, which share one. Other files import what a
# machine need not have.
python_package() {
  local files
  mapfile -t files < <(grep -l 'mark\.cuda' tests/python/test_*.py)
  if python3 -c 'import pytest, uniep' 2>/dev/null; then
    part "tests/python -m cuda" 1 230 600 \
      python3 -m pytest -q -p no:cacheprovider -m cuda "${files[@]}"
  else
    missing "tests/python -m cuda" 1 "python3 has no pytest or no uniep"
  fi
}

plain_torch() {
  local count
  for count in 1 2; do
    if python3 -c 'import torch, safetensors' 2>/dev/null; then
      part "plain_torch.py, $count" "$count" 90 600 \
        python3 tests/cuda/plain_torch.py "$uniep" "$count" "$layer"
    else
      missing "plain_torch.py, $count" "$count" "python3 has no torch or safetensors"
    fi
  done
}

beside_torch() {
  local library=$build/benchmarks/libuniep_bridge.so count why=''
  python3 -c 'import torch' 2>/dev/null || why='python3 has no torch'
  [ -f "$library" ] || why="there is no $library"
  for count in "${rank_counts[@]}"; do
    if [ -n "$why" ]; then
      missing "compare_torch.py, $count" "$count" "$why"
      continue
    fi
    measuring "compare_torch.py, $count" "$count" 90 600 python3 -m torch.distributed.run \
      --nproc_per_node="$count" benchmarks/compare_torch.py --library "$library" --check \
      --cases "all,tokens=$tokens_beside_torch" --iterations 3 \
      --forward "${schedules[@]}" --backward "${schedules[@]}"
  done
}

# sanitizer_part NAME TOOL COMMAND...
sanitizer_part() {
  local name="$2 $1" sanitizer
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer)
  if [ -z "$sanitizer" ]; then
    missing "$name" 1 "there is no compute-sanitizer"
    return 0
  fi
  # A rank of a group of one, so that no other process has to be watched.
  part "$name" 1 10 $sanitizer_s env UNIEP_TEST_CASES=$sanitizer_cases UNIEP_TIMEOUT_MS=60000 \
    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 \
    "$sanitizer" --tool "$2" --error-exitcode 99 "${@:3}"
}

sanitizers() {
  local tool schedule program
  for tool in memcheck racecheck synccheck; do
    for schedule in "${sanitizer_schedules[@]}"; do
      sanitizer_part "uniep run $schedule" $tool "$uniep" run --backend cuda \
        --shape "$sanitizer_shape" --schedule "$schedule"
    done
    for program in "${!sanitizer_tests[@]}"; do
      sanitizer_part "$program" $tool "$build/tests/cuda/$program" \
        --gtest_filter="${sanitizer_tests[$program]}"
    done
  done
}

# --- running them ---
table=()
passed=0 failed=0 not_run=0
running=''      # process id of the part that runs
interrupted=''  # by this signal

note() {  # NAME RANKS ESTIMATE SECONDS VERDICT
  case $5 in
    passed*) passed=$((passed + 1)) ;;
    FAILED*) failed=$((failed + 1)) ;;
    *) not_run=$((not_run + 1)) ;;
  esac
  table+=("$(printf '%-68s %5s  %8s  %7s  %s' "$1" "$2" "$3" "$4" "$5")")
  printf '%s: %s (%s s)\n' "$1" "$5" "$4"
}

# What a GoogleTest program's log says of tests that did not run: "passed" covers none of these.
verdict_of_log() {
  local passed skipped
  passed=$(sed -nE 's/^\[  PASSED  \] ([0-9]+) tests?\.$/\1/p' "$1" | tail -n 1)
  skipped=$(sed -nE 's/^\[  SKIPPED \] ([0-9]+) tests?, listed below:$/\1/p' "$1" | tail -n 1)
  if [ -z "$skipped" ]; then
    echo passed
  elif [ "${passed:-0}" = 0 ]; then
    echo "did not run: all tests were skipped"
  else
    echo "passed, $skipped of $((passed + skipped)) tests skipped"
  fi
}

time_left() { echo $((${GPU_SUITE_SECONDS:-1000000} - SECONDS)); }

# Why a part is not to be begun; nothing where it is.
obstacle() {  # NUMBER
  local i=$1
  if [ -n "${reasons[i]}" ]; then
    echo "${reasons[i]}"
  elif [ "$gpus" = 0 ]; then
    echo "there is no GPU here"
  elif [ -n "${measures[i]}" ] && [ "$gpus" -lt "${ranks[i]}" ]; then
    echo "it measures ${ranks[i]} GPUs, and the machine has $gpus"
  elif [ -n "$interrupted" ]; then
    echo "interrupted"
  elif [ "${estimates[i]}" -ge "$(time_left)" ]; then
    echo "GPU_SUITE_SECONDS is $GPU_SUITE_SECONDS"
  fi
}

run_part() {  # NUMBER
  local i=$1 name=${names[$1]} limit=${limits[$1]} shared=${sharing[$1]} verdict why log
  local begin=$SECONDS code=0 seconds
  if [ -n "${GPU_SUITE_RESUME:-}" ] && verdict=$(verdict_before "$name" "$shared"); then
    note "$name" "${ranks[i]}" "${estimates[i]}" 0 "$verdict, before"
    return 0
  fi
  why=$(obstacle "$i")
  if [ -n "$why" ]; then
    note "$name" "${ranks[i]}" "${estimates[i]}" 0 "did not run: $why"
    return 0
  fi
  log=$(file_of "$name" "$shared").log
  [ "$limit" -le "$(time_left)" ] || limit=$(time_left)
  # In the background, because a trap has to wait for what runs in the foreground.
  env ${shared:+UNIEP_SHARE_DEVICE=1} timeout --kill-after=10 "$limit" bash -c "${commands[i]}" \
    >"$log" 2>&1 &
  running=$!
  wait $running || code=$?
  running=''
  seconds=$((SECONDS - begin))
  if [ -n "$interrupted" ]; then
    verdict="did not run to its end: interrupted"
  elif [[ $code =~ ^(124|137)$ ]] && [ "$limit" -lt "${limits[i]}" ]; then
    verdict="did not run to its end: GPU_SUITE_SECONDS is $GPU_SUITE_SECONDS"
  else
    case $code in
      0) verdict=$(verdict_of_log "$log") ;;
      124 | 137) verdict="FAILED: not done after $limit s" ;;
      *) verdict="FAILED: exit code $code" ;;
    esac
    [[ $verdict == did\ not* ]] || verdict+=${shared:+, $shared}
    echo "$build_id $seconds $verdict" >"$(file_of "$name" "$shared").verdict"
  fi
  note "$name" "${ranks[i]}" "${estimates[i]}" $seconds "$verdict"
  [ $code = 0 ] || tail -n 40 "$log"
}

interrupt() {  # SIGNAL
  interrupted=$1
  [ -z "$running" ] || kill -TERM "$running" 2>/dev/null
}

list_parts() {
  local i why total=0
  printf '%-68s %5s  %8s  %s\n' part ranks 'expected' 'here'
  for i in "${!names[@]}"; do
    why=$(obstacle "$i")
    printf '%-68s %5s  %6s s  %s\n' "${names[i]}" "${ranks[i]}" "${estimates[i]}" \
      "${why:-${sharing[i]}}"
    total=$((total + estimates[i]))
  done
  echo "# ${#names[@]} parts, $total s expected; $gpus GPU$(plural "$gpus") here"
}

print_table() {
  printf '\n# logs in %s\n' "$logs"
  [ "$gpus" != 0 ] || echo '# there is no GPU here: nothing that needs one has run'
  printf '%-68s %5s  %8s  %7s  %s\n' part ranks expected seconds verdict
  printf '%s\n' "${table[@]}"
  printf '# %s passed, %s failed, %s did not run' $passed $failed $not_run
  echo "${interrupted:+; interrupted by SIG$interrupted}"
}

test_programs
layer_runs
example
bench
python_package
plain_torch
beside_torch
sanitizers

if [ ${#names[@]} = 0 ]; then
  echo "no part is selected; GPU_SUITE_LIST=1 without GPU_SUITE_PARTS lists all" >&2
  exit 2
fi
if [ -n "${GPU_SUITE_LIST:-}" ]; then
  list_parts
  exit 0
fi
export uniep build layer logs build_id
export -f run_layer run_example
for signal in INT TERM HUP; do
  # shellcheck disable=SC2064
  trap "interrupt $signal" $signal
done
for i in "${!names[@]}"; do run_part "$i"; done
print_table
[ $failed = 0 ] || exit 1
[ $not_run = 0 ] || exit 3
