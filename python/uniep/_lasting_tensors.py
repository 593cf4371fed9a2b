"""Tensors that outlive the block of code in which the first call makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["lasting_tensors"]


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Tensors made within serve every later call, whatever is under way when they are made.

    They are not inference tensors, which training could not use. Nor are they fake, or recorded, as
    within ``torch.export``, ``make_fx`` and FakeTensorMode.
    """
    with torch.inference_mode(False), _disable_current_modes():
        yield
