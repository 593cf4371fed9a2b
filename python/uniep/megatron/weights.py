"""What experts have as uniep takes it, and the main gradients.

Megatron's optimizer and DDP own the parameters. Weights are taken where they lie: one parameter, or
one for each expert. Of biases uniep takes one tensor: where each expert has a parameter of its own,
the parameters are made views of one tensor; where DDP has put them, or their main gradients, into
its flat buffers, they are found there, in ascending or descending order of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from uniep._forms import ExpertWeight

__all__ = ["ExpertParams", "Stack", "main_grad_of", "stacked_view", "through_stack"]


def stacked_view(tensors: Sequence[Tensor]) -> tuple[Tensor, bool] | None:
    """The tensors as one [n, ...] view of their common memory, and whether it runs backwards.

    None where they do not follow each other without gaps.
    """
    first, last = tensors[0], tensors[-1]
    step = first.numel() * first.element_size()
    if any(
        not t.is_contiguous() or t.shape != first.shape or t.dtype != first.dtype for t in tensors
    ):
        return None
    addresses = [t.data_ptr() for t in tensors]
    if len({t.untyped_storage().data_ptr() for t in tensors}) != 1:
        return None
    ascending = [addresses[0] + i * step for i in range(len(tensors))]
    descending = [addresses[-1] + i * step for i in reversed(range(len(tensors)))]
    if addresses not in (ascending, descending):
        return None
    backwards = addresses != ascending
    base = (last if backwards else first).detach()
    size, stride = (len(tensors), *first.shape), (first.numel(), *first.stride())
    return base.as_strided(size, stride), backwards


def main_grad_of(param: Parameter, name: str) -> Tensor:
    """The gradient buffer of a parameter, as DDP has assigned it.

    Raises:
        RuntimeError: where there is none that uniep can add to.
    """
    grad = getattr(param, "main_grad", None)
    if grad is None:
        raise RuntimeError(
            f"{name} has no main_grad, which gradient_accumulation_fusion=True asks for; wrap the "
            "model in Megatron's DistributedDataParallel, or set gradient_accumulation_fusion=False"
        )
    grad = cast(Tensor, grad)
    if grad.dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(
            f"main_grad of {name} is {grad.dtype}; it must be torch.float32 or torch.bfloat16"
        )
    if grad.shape != param.shape or not grad.is_contiguous() or grad.device != param.device:
        raise RuntimeError(
            f"main_grad of {name} is {list(grad.shape)} with strides {grad.stride()} on "
            f"{grad.device}; it must be contiguous {list(param.shape)} on {param.device}"
        )
    if getattr(param, "zero_out_wgrad", False):
        raise RuntimeError(f"{name} has zero_out_wgrad=True; with uniep's experts it must be False")
    if getattr(param, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"{name} has a post-accumulate-grad hook, as Megatron-FSDP sets it; with "
            "gradient_accumulation_fusion=True it must have none"
        )
    return grad


Owned: TypeAlias = tuple[Module, str]


class ExpertParams:
    """What all local experts have: one parameter, or one for each expert, wherever they lie.

    Args:
        places: module and name of one parameter [experts, rows, columns], or of one [rows, columns]
            for each expert; of biases [experts, rows], or [rows] for each expert.
        name: for errors.
        own_dims: dimensions of what an expert has: 2 of a weight, 1 of a bias.
    """

    def __init__(self, places: Sequence[Owned], name: str, own_dims: int = 2) -> None:
        self._places = tuple(places)
        self.name = name
        self.is_one = self.params[0].dim() > own_dims  # one parameter for all experts

    @property
    def params(self) -> list[Parameter]:
        """The parameters, as modules have them now: FSDP2 puts others in their place."""
        return [owner.get_parameter(name) for owner, name in self._places]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of weights: [experts, rows, columns]."""
        first = self.params[0].shape
        rows, columns = first[-2:]
        return (first[0] if self.is_one else len(self.params)), rows, columns

    def require_grad(self) -> list[bool]:
        """Of each parameter, whether a gradient is asked for."""
        return [param.requires_grad for param in self.params]

    def weight(self, tensors: Sequence[Tensor], backwards: bool = False) -> ExpertWeight:
        """What :func:`uniep.moe` takes of these, one for each parameter."""
        if self.is_one:
            return tensors[0]
        return list(tensors[::-1] if backwards else tensors)

    def main_grads(self) -> list[Tensor]:
        """The main gradient of each parameter.

        Raises:
            RuntimeError: where there are none that uniep can add to.
        """
        return [
            main_grad_of(param, self.name if len(self.params) == 1 else f"{self.name}{i}")
            for i, param in enumerate(self.params)
        ]

    def mark_accumulated(self) -> None:
        """Tells DDP that main_grad has this step's gradient, and gives its hooks a gradient.

        The gradient is one zero seen in the parameter's shape: hooks ask that there is one, and
        take nothing from it. It costs no memory, and an optimizer that reads it does no harm.
        """
        for param in self.params:
            param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            if param.grad is None:
                param.grad = param.new_zeros(()).expand(param.shape)

    def accumulated(self, tensors: Sequence[Tensor], later: bool) -> list[Tensor]:
        """The tensors, made of the parameters, for a call with ``main_grads``.

        In backward, the hooks of DDP run after it.

        Args:
            tensors: one for each parameter, or one for all.
            later: the gradients come later, and so does :meth:`mark_accumulated`.
        """
        return list(_Accumulated.apply(self, later, len(tensors), *tensors, *self.params))


class Stack(ExpertParams):
    """The biases of all local experts as one tensor. Arguments are those of ExpertParams."""

    def __init__(self, places: Sequence[Owned], name: str) -> None:
        super().__init__(places, name, own_dims=1)
        self._known: tuple[list[int], Tensor, bool] | None = None
        self._first = self.params[0]
        found = stacked_view([param.detach() for param in self.params])
        memory = self._first.untyped_storage()
        whole = found is not None and found[0].nbytes == memory.nbytes()
        # Address of memory that these parameters have for themselves, if they have one in common.
        self._own = memory.data_ptr() if whole else None
        self._leaf: Tensor | None = None

    def tensor(self, backwards: bool | None = None) -> tuple[Tensor, bool]:
        """What all experts have, detached, and whether experts run backwards.

        Parameters that lie apart are gathered in one tensor, once, and become views of it.

        Args:
            backwards: the order that is needed; None: any.

        Raises:
            RuntimeError: where parameters lie apart, or in the other order, in a buffer of others.
        """
        if self.is_one:
            return self.params[0].detach(), False
        if self.params[0] is not self._first:
            raise RuntimeError(
                f"other parameters are in the place of {self.name}'s, as where FSDP2 shards them, "
                "and uniep needs these one behind the other; use layout='stacked' there"
            )
        # DDP, .to() and .cuda() move parameters; then all of them have another address.
        addresses = [param.data_ptr() for param in self.params]
        if self._known is None or self._known[0] != addresses:
            found = stacked_view([param.detach() for param in self.params])
            self._known = None if found is None else (addresses, *found)
        if self._known is None or backwards not in (None, self._known[2]):
            self._gather(backwards or False)
        assert self._known is not None
        return self._known[1:]

    def _gather(self, backwards: bool) -> None:
        for param in self.params:
            memory = param.untyped_storage()
            if memory.nbytes() != param.nbytes and memory.data_ptr() != self._own:
                raise RuntimeError(
                    f"the parameters of {self.name} lie apart in a buffer with others, and uniep "
                    f"needs them one behind the other; use layout='stacked', {self._close}, or a "
                    "DDP without use_distributed_optimizer"
                )
        ordered = self.params[::-1] if backwards else self.params
        with torch.no_grad():
            whole = torch.stack([param.detach() for param in ordered])
            for param, part in zip(ordered, whole, strict=True):
                param.data = part
        self._own = whole.data_ptr()
        self._known = ([param.data_ptr() for param in self.params], whole, backwards)

    def main_grad(self) -> tuple[Tensor, bool]:
        """The main gradients of all experts, and whether experts run backwards.

        Raises:
            RuntimeError: where there are none, or they lie apart.
        """
        grads = self.main_grads()
        if self.is_one:
            return grads[0], False
        found = stacked_view(grads)
        if found is None:
            raise RuntimeError(
                f"the main gradients of {self.name} lie apart, and uniep needs them one behind the "
                f"other; use layout='stacked', {self._close}, or a DDP without "
                "use_distributed_optimizer"
            )
        return found

    @property
    def _close(self) -> str:
        """What leaves no gaps: the distributed optimizer's buffers begin each at a multiple."""
        return f"biases of a multiple of 64 numbers (these have {self.params[0].numel()})"

    def leaf(self) -> Tensor:
        """The weights as a tensor that has a ``grad``, for gradients that come later."""
        if self.is_one:
            return self.params[0]
        weights, _ = self.tensor()
        if self._leaf is None or self._leaf.data_ptr() != weights.data_ptr():
            self._leaf = weights.detach().requires_grad_()
        return self._leaf

    def hand_out(self) -> None:
        """Gives each parameter its part of what has come to :meth:`leaf`."""
        if self._leaf is None or self._leaf.grad is None:
            return
        assert self._known is not None
        parts, self._leaf.grad = self._leaf.grad.unbind(0), None
        for param, part in zip(self.params, parts[::-1] if self._known[2] else parts, strict=True):
            param.grad = part if param.grad is None else param.grad + part


class _Accumulated(torch.autograd.Function):
    """What experts have, whose gradient has gone to main_grad when backward comes here."""

    @staticmethod
    def forward(
        ctx: Any, owner: ExpertParams, later: bool, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owner = owner
        ctx.later = later
        ctx.inputs = len(tensors)
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        assert all(g is None for g in gradients), "the gradient of the weights went to main_grad"
        if not ctx.later:
            ctx.owner.mark_accumulated()
        nothing: tuple[None, ...] = (None,) * (3 + ctx.inputs)
        return nothing


class _Stacked(torch.autograd.Function):
    """The weights of parameters that are views of them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, backwards: bool, *params: Tensor) -> Tensor:
        ctx.backwards = backwards
        return weights.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradient.unbind(0)
        return (None, None, *(parts[::-1] if ctx.backwards else parts))


def through_stack(stack: Stack, weights: Tensor, backwards: bool) -> Tensor:
    """The weights for a call whose gradients go to ``param.grad``."""
    if stack.is_one:
        return stack.params[0]
    out: Tensor = _Stacked.apply(weights, backwards, *stack.params)
    return out
