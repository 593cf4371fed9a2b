"""torchtitan's layers for tests, on CPUs, with stand-ins for packages that no test uses."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, relative
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Modules that torchtitan's trainer imports and no test uses; and a machine without a GPU.

    torchtitan asks once, when it is imported, which device there is.
    """
    modules: dict[str, dict[str, Any]] = {
        "datasets": {"Dataset": object, "load_dataset": None},
        "datasets.distributed": {"split_dataset_by_node": None},
        "torchdata": {},
        "torchdata.stateful_dataloader": {"StatefulDataLoader": type("StatefulDataLoader", (), {})},
        "torch.utils.tensorboard": {"SummaryWriter": None},
    }
    missing = []
    for name, attributes in modules.items():
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
            missing.append(name)
    device = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        yield
    finally:
        torch._utils._get_available_device_type = device
        for name in missing:  # others look whether these packages are there
            del sys.modules[name]


with stand_ins():
    importlib.import_module("torchtitan.models.qwen3.config_registry")
    gpt_oss = importlib.import_module("torchtitan.models.gpt_oss.moe")
    gpt_oss_sharding = importlib.import_module("torchtitan.models.gpt_oss.sharding")
from torchtitan.models.common.config_utils import make_routed_experts_config  # noqa: E402
from torchtitan.models.common.moe_sharding import _routed_experts_sharding_configs  # noqa: E402
from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT  # noqa: E402

import uniep.torchtitan  # noqa: E402

# Relative L2 distances from torchtitan's own layer; docs/torchtitan.md states these limits.
OUTPUT = 1e-2
GRADIENT = 1e-2
LOSS = 5e-3
EXPERTS = "uniep.torchtitan.uniep_routed_experts"
KEEP = "uniep.torchtitan.uniep_selective_ac"
SHARED_TOO = "uniep.torchtitan.uniep_moe"


def config_of(case: Case, *, ep: bool = False, **dispatcher: Any) -> Any:
    """torchtitan's config of routed experts of these sizes, with shardings set as its models do."""
    hidden, intermediate, experts, topk = case.shape
    initial = lambda weight: nn.init.normal_(weight, std=0.1)  # noqa: E731
    config = make_routed_experts_config(
        dim=hidden,
        hidden_dim=intermediate,
        num_experts=experts,
        top_k=topk,
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), initial),
        comm_backend="standard",
        **dispatcher,
    )
    config.sharding_config, config.inner_experts.sharding_config = _routed_experts_sharding_configs(
        enable_ep=ep, enable_sp=False, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT
    )
    return config


def own_layer(case: Case, dtype: torch.dtype = torch.bfloat16) -> Any:
    """torchtitan's layer with the weights of the case."""
    layer = config_of(case).build()
    gate, up = case.w1.chunk(2, 1)
    weights = {"w1_EFD": gate, "w2_EDF": case.w2, "w3_EFD": up}
    layer.inner_experts.load_state_dict(weights)
    return layer.to(dtype)


def uniep_layer(case: Case, dtype: torch.dtype = torch.bfloat16) -> Any:
    """uniep's, which loads what torchtitan's saved."""
    layer = uniep.torchtitan.uniep_routed_experts(config_of(case)).build().to(dtype)
    layer.load_state_dict(own_layer(case, dtype).state_dict())
    return layer


def layer_step(layer: Any, case: Case, batch: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Output and gradients; `batch`: leading sizes of the input, as [B, L]."""
    x, probs, ids, dy = case.x, case.probs, case.ids.long(), case.dy.to(case.x.dtype)
    if batch:
        x, probs, ids, dy = (t.reshape(*batch, -1) for t in (x, probs, ids, dy))
    x, probs = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    layer.zero_grad()
    counts = torch.bincount(ids.flatten(), minlength=case.w1.shape[0])
    out = layer(x, probs, ids, counts)
    assert out.shape == x.shape and out.dtype == x.dtype
    out.backward(dy)
    found = {"out": out.detach(), "dx": x.grad, "dprobs": probs.grad}
    for name, weight in layer.inner_experts.named_parameters():
        found[name] = weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad
    return {name: t.reshape(-1, t.shape[-1]) if name[0] in "od" else t for name, t in found.items()}


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: relative(found[name], exact[name]) for name in exact}


def gpt_oss_config(case: Case, *, ep: bool = False, **options: Any) -> Any:
    hidden, intermediate, experts, _ = case.shape
    layout = gpt_oss_sharding._GPT_OSS_EXPERTS_PARAM_LAYOUT
    initial = lambda weight: nn.init.normal_(weight, std=0.1)  # noqa: E731
    inner = gpt_oss.GptOssGroupedExperts.Config(
        dim=hidden,
        hidden_dim=intermediate,
        num_experts=experts,
        param_init=dict.fromkeys(layout, initial),
        **options,
    )
    config = replace(config_of(case, ep=ep), inner_experts=inner)
    config.sharding_config, inner.sharding_config = _routed_experts_sharding_configs(
        enable_ep=ep, enable_sp=False, expert_param_layout=layout
    )
    return config


def gpt_oss_layers(case: Case) -> tuple[Any, Any]:
    """torchtitan's layer and uniep's, with the same weights and biases."""
    own = gpt_oss_config(case).build()
    torch.manual_seed(3)
    own.init_states()
    layer = uniep.torchtitan.uniep_routed_experts(gpt_oss_config(case)).build()
    layer.load_state_dict(own.state_dict())
    return own.bfloat16(), layer.bfloat16()
