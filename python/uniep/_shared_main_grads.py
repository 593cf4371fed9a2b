"""Shared experts beside others that have main gradients.

Experts are one rank's alone. Shared ones are every rank's, so what reduces a model's gradients over
ranks is to see theirs: where they have no main gradients, autograd gets gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from ._forms import Experts

__all__ = ["gradients_of_shared", "with_sums_of_shared"]


def with_sums_of_shared(main: Experts, weights: Experts) -> Experts:
    """What passes add to: `main`, and where it has none of shared experts, zeros of this call's."""
    w1, w2 = weights.shared_w1, weights.shared_w2
    if w1 is None or w2 is None or main.shared_w1 is not None:
        return main
    dtype = main.w1[0].dtype
    sums = torch.zeros_like(w1, dtype=dtype), torch.zeros_like(w2, dtype=dtype)
    return Experts(main.w1, main.w2, main.b1, main.b2, *sums, main.layout)


def gradients_of_shared(main: Experts, sums: Experts, weights: Experts) -> Any:
    """What is not in `main`, as ops return gradients; None: nothing.

    Args:
        main: as the call was given it.
        sums: of :func:`with_sums_of_shared`, behind the pass.
        weights: of the call.
    """
    w1, w2 = weights.shared_w1, weights.shared_w2
    if w1 is None or w2 is None or main.shared_w1 is not None:
        return None
    own = [None] * len(weights.w1), [None] * len(weights.w2)
    assert sums.shared_w1 is not None and sums.shared_w2 is not None
    # Rounded once, as gradients that are not added to anything are.
    return *own, None, None, sums.shared_w1.to(w1.dtype), sums.shared_w2.to(w2.dtype)
