#!/bin/sh
# check_fixture.sh ORACLE DIR: computes the fixture's result again and compares. 77: no numpy.
python=/usr/bin/python3  # Debian's, the one for which python3-numpy is installed
"$python" -c 'import numpy' 2>/dev/null || exit 77
"$python" "$1" "$2/fixture_layer.safetensors" fixture_again.safetensors &&
  "$python" "$1" --compare fixture_again.safetensors "$2/fixture_result.safetensors"
