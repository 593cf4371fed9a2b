"""uniep as the experts of transformers' MoE models.

    import uniep.transformers

    uniep.transformers.register()
    model.set_experts_implementation("uniep")  # all experts in this process
    DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="uniep")  # expert parallel

Routing weights enter before the second projection here, and behind it in transformers: results are
equal to tolerance, not to the bit. docs/transformers.md has figures, and what is supported.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import uniep

try:
    from transformers.integrations import moe as _hf_moe
except ImportError as error:
    raise ImportError(
        "uniep.transformers needs transformers 5.0 or later, and it cannot be imported: "
        f"{error}; pip install transformers"
    ) from error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check", "register"]


@dataclass(frozen=True)
class _Options:
    """What `register` passes on to every `uniep.moe`."""

    max_tokens: int | None = None
    capacity_rows: int | None = None
    save: Literal["rows", "tokens", "none"] | None = None
    recompute_h: bool | None = None
    exact_rows: bool | None = None
    schedule: str | None = None
    row_pool: uniep.RowPool | int | None = None


def register(
    name: str = "uniep",
    *,
    max_tokens: int | None = None,
    capacity_rows: int | None = None,
    save: Literal["rows", "tokens", "none"] | None = None,
    recompute_h: bool | None = None,
    exact_rows: bool | None = None,
    schedule: str | None = None,
    row_pool: uniep.RowPool | int | None = None,
) -> None:
    """Makes `name` an experts implementation and an EP implementation of transformers.

    Calling again replaces what an earlier call registered under `name`: models look experts up at
    every forward, and an EP implementation once, when they are distributed. transformers before
    5.23 has no EP implementations; there, only the experts are registered.

    Args:
        name: by which settings refer to it.
        max_tokens: see :func:`uniep.moe`; needed for EP where the number of tokens varies. It does
            not count for experts in transformers' own EP, which hands them rows, not tokens.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        schedule: see :func:`uniep.moe`.
        row_pool: where forwards keep rows; see :func:`uniep.moe`.
    """
    options = _Options(max_tokens, capacity_rows, save, recompute_h, exact_rows, schedule, row_pool)
    _hf_moe.ExpertsInterface.register(name, functools.partial(_experts_forward, options))
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return
    EPImplementationInterface.register(name, functools.partial(_expert_parallel_class(), options))


def check(model: nn.Module) -> list[str]:
    """The names of the model's modules whose experts uniep can run.

    Raises:
        NotImplementedError: the sentence that a forward would raise.
        ValueError: for a model none of whose experts has a choice of implementation.
    """
    names = []
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):  # what the decorator leaves on every such class
            _refuse_unsupported(module)
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no experts with a choice of implementation; accepted are "
            "models whose experts are decorated with transformers' use_experts_implementation"
        )
    return names


def _experts_forward(
    options: _Options,
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The function behind `set_experts_implementation`: experts of this rank alone."""
    _refuse_unsupported(experts)
    if getattr(experts, "_is_expert_parallel", False):
        # transformers' own EP marks slots of other ranks' experts by the number of local ones, and
        # sends one expert's rows of all ranks here: as many as the routing says, not max_tokens.
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
        options = replace(options, max_tokens=None)
    return _run(options, experts, hidden_states, top_k_index, top_k_weights, group=None)


def _run(
    options: _Options,
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    group: Any,
) -> Tensor:
    w1, w2 = experts.gate_up_proj, experts.down_proj
    _refuse_dtypes(experts, hidden_states=hidden_states, gate_up_proj=w1, down_proj=w2)
    out = uniep.moe(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        w1,
        w2,
        group=group,
        max_tokens=options.max_tokens,
        capacity_rows=options.capacity_rows,
        save=options.save,
        recompute_h=options.recompute_h,
        exact_rows=options.exact_rows,
        schedule=options.schedule,
        row_pool=options.row_pool,
    )
    return out.to(hidden_states.dtype)


def _refuse_dtypes(experts: Any, **tensors: Tensor) -> None:
    if torch.is_autocast_enabled(tensors["hidden_states"].device.type):
        return  # uniep.moe casts fp32 then, and refuses the rest
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} of {type(experts).__name__} is {tensor.dtype}; it must be torch.bfloat16 "
                "(from_pretrained(..., dtype=torch.bfloat16)), or the model run under "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )


def _refuse_unsupported(experts: Any) -> None:
    """Raises one sentence if these experts are not bf16(w2 (silu(gate) * up)) without biases."""
    kind = type(experts).__name__
    if not getattr(experts, "has_gate", True):
        raise NotImplementedError(f"{kind} has no gate; uniep computes silu(gate) * up")
    if getattr(experts, "is_transposed", False):
        raise NotImplementedError(
            f"{kind} stores its weights transposed; uniep takes gate_up_proj [E, 2I, H] and "
            "down_proj [E, H, I]"
        )
    if not getattr(experts, "is_concatenated", True):
        raise NotImplementedError(
            f"{kind} interleaves gate and up rows; uniep takes all gate rows, then all up rows"
        )
    if getattr(experts, "has_bias", False):
        raise NotImplementedError(f"{kind} has biases; uniep computes products without them")
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{kind} normalises each expert's output; uniep sums outputs as they are"
        )
    if getattr(type(experts), "_apply_gate", None) is not _hf_moe._default_apply_gate:
        raise NotImplementedError(
            f"{kind} has a gate of its own (_apply_gate); uniep computes silu(gate) * up"
        )
    if not _is_silu(experts.act_fn):
        activation = getattr(experts.act_fn, "__name__", type(experts.act_fn).__name__)
        raise NotImplementedError(
            f"{kind} has activation {activation}; uniep computes silu(gate) * up"
        )


def _is_silu(activation: Any) -> bool:
    if isinstance(activation, nn.SiLU) or activation is nn.functional.silu:
        return True
    return type(activation).__name__ == "SiLUActivation"  # transformers' own, whatever its home


@functools.cache
def _expert_parallel_class() -> type:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import EPImplementation

    class UniepEP(EPImplementation):
        """Dispatch, experts and combine of one MoE block in `uniep.moe`, over the EP group.

        Ranks of a TP group hold the same tokens: each of them sends its slice, as AllToAllEP does.
        """

        def __init__(
            self, options: _Options, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
        ) -> None:
            _refuse_unsupported(experts)
            super().__init__(experts, ep_mesh, tp_mesh)
            self.options = options
            self.experts = experts

        def __call__(
            self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Tensor:
            tokens = hidden_states.shape[0]
            sliced = self.tp_mesh.size() > 1
            if sliced:
                hidden_states, top_k_index, top_k_weights = (
                    self._slice(tensor) for tensor in (hidden_states, top_k_index, top_k_weights)
                )
            group = self.ep_mesh.get_group()
            out = _run(
                self.options, self.experts, hidden_states, top_k_index, top_k_weights, group=group
            )
            if not sliced:
                return out
            whole = DTensor.from_local(
                out.contiguous(),
                self.tp_mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((tokens, out.shape[1])),
                stride=(out.shape[1], 1),
            ).full_tensor()
            assert isinstance(whole, Tensor)
            return whole

        def _slice(self, tensor: Tensor) -> Tensor:
            """Returns this rank's rows; backward gathers those of all ranks of the TP group."""
            shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
            own: Tensor = shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()
            return own

    return UniepEP
