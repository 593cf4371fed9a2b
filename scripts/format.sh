#!/usr/bin/env bash
# format.sh [--check]: formats every C++ source that git tracks, or says which are not formatted.
# Other versions of clang-format break lines elsewhere, so it has to be version 14.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in clang-format-14 clang-format; do
  if command -v $tool >/dev/null && $tool --version | grep -q 'version 14\.'; then break; fi
  tool=
done
if [ -z "$tool" ]; then
  echo "clang-format 14 is needed; on Debian 12: apt-get install clang-format-14" >&2
  exit 1
fi

sources() { git ls-files -z '*.h' '*.cpp' '*.cc' '*.cu' '*.cuh'; }
if [ "${1:-}" != --check ]; then
  sources | xargs -0 "$tool" -i
  exit
fi
# Several files at a time, on all CPUs. A complaint begins with the file's name.
complaints=$(sources | xargs -0 -n 16 -P "$(nproc)" "$tool" --dry-run --Werror 2>&1) || {
  unformatted=$(sed -nE 's/^([^ :]+):[0-9]+:[0-9]+: .*/\1/p' <<<"$complaints" | sort -u)
  [ -n "$unformatted" ] || { echo "$complaints" >&2; exit 1; }
  sed 's/^/not formatted: /' <<<"$unformatted"
  echo "$(wc -l <<<"$unformatted") files are not formatted; make format does it" >&2
  exit 1
}
