"""The shared experts of a Megatron-Core layer, in the pass of the routed ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from uniep import _shared_experts
from uniep._shared_experts import Shared

from .options import is_in_graph_of_te
from .weights import ExpertParams

__all__ = ["SharedExperts"]


class _Given(NamedTuple):
    """What :func:`uniep.moe` takes."""

    tensors: Shared
    main_grads: tuple[Tensor, ...]


class SharedExperts:
    """Megatron's module of shared experts as :func:`uniep.moe` takes them.

    The parameters, their gradients and checkpoints stay the module's. One expert is read in place.

    Args:
        module: Megatron's SharedExpertMLP, or None.
        config: Megatron's TransformerConfig.
        intermediate: I of a routed expert.

    Attributes:
        count: S, with experts of I columns.
        weights: of fc1 and fc2.

    Raises:
        ValueError: for what the pass cannot do; names the option, its value and what is accepted.
        NotImplementedError: for a width that is no multiple of I.
    """

    def __init__(self, module: Any, config: Any, intermediate: int) -> None:
        width = config.moe_shared_expert_intermediate_size
        if module is None or width is None:
            raise ValueError(
                f"moe_shared_expert_intermediate_size is {width}; with shared_experts='fused' it "
                "must be that of shared experts"
            )
        self.count = _shared_experts.count(width, intermediate)
        for option, accepted in (
            ("tensor_model_parallel_size", 1),
            ("delay_wgrad_compute", False),
            ("overlap_moe_expert_parallel_comm", False),
        ):
            value = getattr(config, option, accepted)
            if value != accepted:
                raise ValueError(
                    f"{option} is {value}; with shared_experts='fused' it must be {accepted} "
                    "(shared_experts='apart' takes it)"
                )
        if is_in_graph_of_te(config, "moe_router"):
            raise ValueError(
                f"cuda_graph_impl is '{config.cuda_graph_impl}' with 'moe_router' in its modules; "
                "with shared_experts='fused' it must be 'none', 'local' or 'full_iteration', since "
                "its graph of the router ends in the shared experts' output"
            )
        self._check_main_grads(config.gradient_accumulation_fusion)
        self._module = module
        self._intermediate = intermediate
        linears = {"linear_fc1": module.linear_fc1, "linear_fc2": module.linear_fc2}
        self.weights = tuple(
            ExpertParams([(linear, "weight")], f"shared_experts.{name}.weight")
            for name, linear in linears.items()
        )

    def given(self, x: Tensor, fused: bool) -> _Given:
        """The arguments of a call on these tokens.

        Args:
            x: [T, H].
            fused: whether weight gradients are added to ``main_grad``.
        """
        self._check_main_grads(fused)
        self._run_hooks()
        gate = self._module.gate_weight if self._module.use_shared_expert_gate else None
        probs = None
        if gate is not None:  # one for all of them
            logits = torch.nn.functional.linear(x, gate)
            probs = torch.sigmoid(logits).float().expand(-1, self.count)
        first, second = (own.params[0] for own in self.weights)
        if not fused:
            w1, w2 = _shared_experts.weights([first], second, self._intermediate)
            return _Given(Shared(w1, w2, probs), ())
        tensors = [
            own.accumulated([own.params[0].detach()], later=False)[0] for own in self.weights
        ]
        main = tuple(own.main_grads()[0].unsqueeze(0) for own in self.weights)
        w1, w2 = (tensor.unsqueeze(0) for tensor in tensors)
        return _Given(Shared(w1, w2, probs), main)

    def _check_main_grads(self, fused: bool) -> None:
        if fused and self.count > 1:
            raise ValueError(
                f"gradient_accumulation_fusion is True, and the shared experts are {self.count} of "
                "the routed ones' width, whose main gradients lie otherwise; with "
                "shared_experts='fused' it must be False there"
            )

    def _run_hooks(self) -> None:
        """Megatron's DDP gathers parameters in hooks of the modules that own them."""
        owners: tuple[Module, ...] = (
            self._module,
            self._module.linear_fc1,
            self._module.linear_fc2,
        )
        for owner in owners:
            for hook in owner._forward_pre_hooks.values():
                hook(owner, ())
