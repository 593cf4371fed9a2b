"""Deterministic expert-parallel mixture-of-experts layers for training.

:func:`moe` is the layer as a function, :class:`MoELayer` the module with its router. Results have
the same bits for every schedule, number of ranks and order of arrival.
"""

from . import checkpoint, placement
from ._common_workspaces import drop_workspaces
from ._library import Error, has_cuda, version
from ._overflow import Overflow
from .capacity import drop_over_capacity, expert_capacity
from .capture import capture, write_layer, write_trace
from .cli import schedule, tune
from .clipping import clip_grad_norm_
from .deferred import DeferredWeights, backward_weights
from .functional import moe
from .group import Group
from .layer import MoELayer, SharedExperts
from .offload import Offload
from .router import Router, RouterConfig, Routing
from .row_pool import RowPool
from .tuning import Tuned, tune_calls
from .workspace import Workspace

__version__ = version()

__all__ = [
    "DeferredWeights",
    "Error",
    "Group",
    "MoELayer",
    "Offload",
    "Overflow",
    "Router",
    "RouterConfig",
    "Routing",
    "RowPool",
    "SharedExperts",
    "Tuned",
    "Workspace",
    "__version__",
    "backward_weights",
    "capture",
    "checkpoint",
    "clip_grad_norm_",
    "drop_over_capacity",
    "drop_workspaces",
    "expert_capacity",
    "has_cuda",
    "moe",
    "placement",
    "schedule",
    "tune",
    "tune_calls",
    "write_layer",
    "write_trace",
]
