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
unformatted=0
while IFS= read -r -d '' file; do
  "$tool" --dry-run --Werror "$file" 2>/dev/null || {
    echo "not formatted: $file"
    unformatted=$((unformatted + 1))
  }
done < <(sources)
[ $unformatted = 0 ] || {
  echo "$unformatted files are not formatted; make format does it" >&2
  exit 1
}
