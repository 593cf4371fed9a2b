#!/bin/sh
# nvcc_strict.sh COMPILER ARGUMENT...: compiles, and fails as well where ptxas says that it serialises
# wgmma: each product then waits for the one before, kernels are right and a tenth slower, and for
# ptxas that is no more than information.
said=$("$@" 2>&1)
code=$?
[ -z "$said" ] || printf '%s\n' "$said" >&2
case $said in
*"wgmma.mma_async instructions are serialized"*)
  echo "error: ptxas serialises wgmma (see above): for C7520, accumulators must have no value that is" \
       "not a product's while products are under way; for C7511, registers ran short, which a change" \
       "in any role of the kernel can cause (docs/kernels.md)" >&2
  exit 1
  ;;
esac
exit $code
