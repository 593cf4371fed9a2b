"""MoELayer: router, experts and shared experts as a module."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ._arguments import check_device, check_local_tensors
from ._choices import Choices
from ._differentiable import refuse_transforms
from ._plain_values import check_bool, check_whole
from ._same_weights import warn_of_other_weights
from ._save_choice import Save
from .arithmetic import Activation, CombinePartials, ProbsPlace
from .deferred import DeferredWeights
from .functional import moe
from .group import GroupLike, rank_and_size, ranks_of, warn_of_others, without_mesh
from .router import Router, RouterConfig, Routing
from .row_pool import RowPoolLike
from .workspace import Workspace, check_is_workspace
from .zero_experts import ZeroExpertType
from .zero_experts import check as check_zero_experts

__all__ = ["MoELayer", "SharedExperts", "expert_parameters"]


class SharedExperts(nn.Module):
    """Experts that every token goes to: a plain SwiGLU, in PyTorch, the same on every rank.

    Args:
        hidden: H.
        intermediate: I of all shared experts together.
        dtype: of its weights.
        device: where they lie.

    Attributes:
        gate_up: linear [2I, H], rows of the gate, then those of up.
        down: linear [H, I].
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(intermediate, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def _choice(name: str) -> Any:
    """An attribute of a layer that is one of its choices: set, it is that of later calls."""

    def get(layer: MoELayer) -> Any:
        return getattr(layer._choices, name)

    def put(layer: MoELayer, choice: Any) -> None:
        layer._choices = layer._choices.but(**{name: choice})

    return property(get, put)


class MoELayer(nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a group.

    Args:
        hidden: H, a multiple of 8.
        intermediate: I of each expert, a multiple of 8.
        num_experts: E of all ranks, divisible by their number. Rank r of N holds the r-th of N
            equal parts.
        topk: K.
        group: a ProcessGroup, a DeviceMesh, a :class:`uniep.Group`, or None: this process has all
            experts. See :func:`uniep.moe`.
        router: how tokens choose.
        shared_intermediate: I of shared experts together that are computed apart, by PyTorch; 0:
            there are none.
        shared_experts: S, shared experts of I columns each that are part of the same pass; see
            :func:`uniep.moe`. Not with ``shared_intermediate``.
        shared_gate: whether what a shared expert gives a token counts sigmoid(gate · x) times.
        max_tokens: most tokens that a rank ever has; see :func:`uniep.moe`.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        backward_rows: rows that backward works in at a time; see :class:`uniep.Workspace`.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        exact_hosts: over hosts, whether tokens go only to those that have an expert of them; see
            :class:`uniep.Workspace`.
        schedule: see :class:`uniep.Workspace`.
        workspace: to work in; None: the one that all layers of this shape and group share. What it
            was made with is the layer's, which is given none of it.
        main_grad: dtype of the ``main_grad`` that w1, w2, b1 and b2 then have, to which gradients
            are added instead of to ``grad``: torch.float32 or torch.bfloat16. None: they have
            ``grad``, as shared experts do, whose gradients are to be averaged over ranks.
        dtype: of the weights; bfloat16, or float32 for training under autocast.
        device: where they lie.
        activation: what an expert computes; see :func:`uniep.moe`.
        probs: where probabilities enter; likewise.
        bias: whether experts have biases, which start as zeros.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`.
        combine_partials: likewise.
        row_pool: where forwards keep rows; see :func:`uniep.moe`.
        zero_experts: Z, further experts of the router, which compute nothing; see
            :func:`uniep.moe`.
        zero_expert_type: what they give; likewise.

    Attributes:
        router: the :class:`uniep.Router`, of E + Z experts; the same weights on every rank.
        w1: [E / N, 2I, H], this rank's experts: gate, then up; without a gate [E / N, I, H].
        w2: [E / N, H, I].
        b1: [E / N, 2I], as w1's rows, or None.
        b2: [E / N, H] or None.
        shared: :class:`SharedExperts` or None; the same weights on every rank.
        shared_w1: [S, 2I, H], as w1, or None; the same weights on every rank, as the next two.
            Their gradients are of this rank's tokens: it is yours to reduce them over ranks.
        shared_w2: [S, H, I] or None.
        shared_gate: linear [S, H] or None.
        first_expert: number of this rank's first expert among all.

    Raises:
        ValueError: for experts that the ranks cannot share, widths that are no multiple of 8, a
            group of other ranks than the workspace's, and what :class:`Router` refuses.
        TypeError: for another dtype than bfloat16 or float32, sizes that are no int, and a
            workspace that is none.

    Warns:
        UserWarning: where there are several processes, no group, and no process group yet, as where
            ``dist.group.WORLD`` is passed ahead of ``init_process_group``: it is None then.
    """

    max_tokens: int | None = _choice("max_tokens")
    capacity_rows: int | None = _choice("capacity_rows")
    save: Save | None = _choice("save")
    recompute_h: bool | None = _choice("recompute_h")
    backward_rows: int | None = _choice("backward_rows")
    exact_rows: bool | None = _choice("exact_rows")
    exact_hosts: bool | None = _choice("exact_hosts")
    schedule: str | None = _choice("schedule")
    row_pool: RowPoolLike = _choice("row_pool")

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        *,
        group: GroupLike = None,
        router: RouterConfig | None = None,
        shared_intermediate: int = 0,
        max_tokens: int | None = None,
        capacity_rows: int | None = None,
        save: Save | None = None,
        recompute_h: bool | None = None,
        backward_rows: int | None = None,
        exact_rows: bool | None = None,
        exact_hosts: bool | None = None,
        schedule: str | None = None,
        workspace: Workspace | None = None,
        main_grad: torch.dtype | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        activation: Activation | None = None,
        probs: ProbsPlace | None = None,
        bias: bool | None = None,
        combine_groups: int | None = None,
        combine_partials: CombinePartials | None = None,
        row_pool: RowPoolLike = None,
        zero_experts: int = 0,
        zero_expert_type: ZeroExpertType = "identity",
        shared_experts: int = 0,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        check_whole(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            topk=topk,
            shared_intermediate=shared_intermediate,
            shared_experts=shared_experts,
        )
        check_bool(bias=bias, shared_gate=shared_gate)
        choices = Choices(
            max_tokens=max_tokens,
            capacity_rows=capacity_rows,
            save=save,
            recompute_h=recompute_h,
            backward_rows=backward_rows,
            activation=activation,
            probs=probs,
            combine_groups=combine_groups,
            combine_partials=combine_partials,
            row_pool=row_pool,
            exact_rows=exact_rows,
            exact_hosts=exact_hosts,
            schedule=schedule,
        )
        choices.check()
        _check_experts_beside(
            zero_experts, zero_expert_type, router, shared_experts, shared_intermediate
        )
        self.arithmetic = choices.arithmetic(bool(bias), shared_experts, shared_gate)
        if workspace is not None:
            check_is_workspace(workspace)
            choices.refuse_beside_workspace(shared_experts=shared_experts or None, bias=bias)
            self.arithmetic = workspace.arithmetic
            if group is None:
                group = workspace.members
            else:
                _refuse_other_ranks(group, workspace)
        elif group is None:
            warn_of_others()
        self.group = without_mesh(group)
        self.rank, self.size = rank_and_size(group)
        _check_sizes(hidden, intermediate, num_experts, self.size)
        _check_dtypes(dtype, main_grad)
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_experts = num_experts
        self.topk = topk
        self._choices = choices
        self.workspace = workspace
        self.zero_experts = zero_experts
        self.zero_expert_type: ZeroExpertType = zero_expert_type
        self.first_expert = self.rank * num_experts // self.size
        self._compares_ranks = self.size > 1
        self._warns_of_loss = True

        self.router = Router(hidden, num_experts + zero_experts, topk, router, device=device)
        self._make_experts(shared_gate, dtype, device)
        self.shared = (
            SharedExperts(hidden, shared_intermediate, dtype=dtype, device=device)
            if shared_intermediate
            else None
        )
        self._reset_experts()
        self._main_grad = main_grad
        self._make_main_grads()

    def _make_experts(
        self, shared_gate: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        """Their parameters, without values."""

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        local = self.num_experts // self.size
        width = self.arithmetic.halves() * self.intermediate
        self.w1 = empty(local, width, self.hidden)
        self.w2 = empty(local, self.hidden, self.intermediate)
        self.b1 = self.b2 = None
        if self.arithmetic.bias:
            self.b1 = empty(local, width)
            self.b2 = empty(local, self.hidden)
        self.shared_w1 = self.shared_w2 = self.shared_gate = None
        shared = self.arithmetic.shared_experts
        if shared:
            self.shared_w1 = empty(shared, width, self.hidden)
            self.shared_w2 = empty(shared, self.hidden, self.intermediate)
        elif shared_gate:
            raise ValueError("shared_gate is True, but shared_experts is 0; it gates these")
        if shared_gate and not self.arithmetic.shared_gate:
            raise ValueError(
                "shared_gate is True, and the workspace is for shared_gate=False; they must agree"
            )
        if shared_gate:
            self.shared_gate = nn.Linear(
                self.hidden, shared, bias=False, dtype=dtype, device=device
            )

    def __copy__(self) -> MoELayer:
        """A layer of the same parameters, in the same group and workspace."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A layer with weights of its own, in the same group and workspace."""
        memo[id(self.group)] = self.group  # PyTorch's process groups cannot be copied
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for mine, its in zip(self._weights(), other._weights(), strict=True):
            if hasattr(mine, "main_grad"):  # which copies of parameters do not have
                its.main_grad = mine.main_grad.clone()  # type: ignore[attr-defined]
        return other

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps, if there is neither a group nor a workspace."""
        if self.workspace is not None:
            raise TypeError(
                "a uniep.MoELayer with a workspace cannot be pickled, since that belongs to this "
                "process; save state_dict()"
            )
        if self.group is not None:
            raise TypeError(
                "a uniep.MoELayer with a group cannot be pickled, since its group belongs to this "
                "process; save state_dict() or uniep.checkpoint.distributed_state_dict(model)"
            )
        return self.__dict__

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        before = self._kept_main_grads()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._make_main_grads(before)
        return self

    def _load_from_state_dict(self, *arguments: Any) -> None:
        before = self._kept_main_grads()
        super()._load_from_state_dict(*arguments)
        self._make_main_grads(before)

    def _kept_main_grads(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(weight, "main_grad", None) for weight in self._own_weights())

    def _make_main_grads(self, before: tuple[Tensor | None, ...] = ()) -> None:
        """Those that are missing, as of parameters that PyTorch has put in the place of ours.

        Args:
            before: those that there were. Where parameters are swapped for others, or replaced,
                these have them no more (``torch.__future__``).
        """
        if self._main_grad is None:
            return
        for weight, kept in zip(self._own_weights(), before or (None,) * 4, strict=False):
            if isinstance(weight, DTensor):  # FSDP2's: calls have others in its place, with grad
                continue
            main: Tensor | None = getattr(weight, "main_grad", kept)
            if main is None or main.is_meta:
                main = torch.zeros_like(weight, dtype=self._main_grad)
            weight.main_grad = main.to(weight.device)  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        """Draws all weights anew, from U(-1/sqrt(n), 1/sqrt(n)) for n inputs.

        With the same state of PyTorch's random numbers on all ranks, every expert gets the same
        weights for any number of ranks.
        """
        self.router.reset_parameters()
        if self.shared is not None:
            self.shared.gate_up.reset_parameters()
            self.shared.down.reset_parameters()
        if self.shared_gate is not None:
            self.shared_gate.reset_parameters()
        self._reset_experts()

    def _own_weights(self) -> tuple[nn.Parameter, ...]:
        """Those that no other rank has: w1 and w2, then biases if there are any."""
        return (self.w1, self.w2, *(bias for bias in (self.b1, self.b2) if bias is not None))

    def _weights(self) -> tuple[nn.Parameter, ...]:
        """Those of experts: its own, then those of shared ones if there are any."""
        shared = (self.shared_w1, self.shared_w2)
        return (*self._own_weights(), *(weight for weight in shared if weight is not None))

    def _main_grads(self) -> tuple[Tensor, ...] | None:
        """What a call adds gradients to. Of shared experts only what somebody else has made."""
        having = [weight for weight in self._weights() if hasattr(weight, "main_grad")]
        if not any(weight.requires_grad for weight in having):
            return None
        if len(having) not in (len(self._own_weights()), len(self._weights())) or not hasattr(
            self.w1, "main_grad"
        ):
            raise ValueError(self._says_what_lacks_main_grad())
        return tuple(weight.main_grad for weight in having)

    def _says_what_lacks_main_grad(self) -> str:
        """Where some of the weights have been replaced by others."""
        names = ("w1", "w2", "b1", "b2", "shared_w1", "shared_w2")
        there = [name for name in names if getattr(self, name) is not None]
        having = [name for name in there if hasattr(getattr(self, name), "main_grad")]
        lacking = next(name for name in there if name not in having)
        return (
            f"{lacking} has no main_grad, and {having[0]} has; give one to each of w1, w2, b1 and "
            "b2, and to both or none of shared_w1 and shared_w2, or replace all of them, as by "
            "torch.func.functional_call"
        )

    @torch.no_grad()
    def _reset_experts(self) -> None:
        drawn = torch.randint(2**62, (1,), device="cpu")
        if self.w1.is_meta or isinstance(drawn, FakeTensor):  # there are no values
            return
        seed = int(drawn.item())
        for bias in (self.b1, self.b2):
            if bias is not None:
                bias.zero_()
        self._draw(self.w1, self.w2, seed + self.first_expert)
        if self.shared_w1 is not None and self.shared_w2 is not None:
            self._draw(self.shared_w1, self.shared_w2, seed + self.num_experts)

    @staticmethod
    def _draw(w1: Tensor, w2: Tensor, first_seed: int) -> None:
        weights = (w1, w2)
        # Of what FSDP2 has split up whole ones: an expert's numbers follow from its seed.
        whole = [
            torch.empty(w.shape, dtype=w.dtype, device=w.device) if isinstance(w, DTensor) else w
            for w in weights
        ]
        generator = torch.Generator(device=w1.device)
        for index in range(w1.shape[0]):
            generator.manual_seed(first_seed + index)
            for weight in whole:
                bound = 1.0 / math.sqrt(weight.shape[2])
                weight[index].uniform_(-bound, bound, generator=generator)
        for weight, drawn in zip(weights, whole, strict=True):
            if isinstance(weight, DTensor):
                parts = (weight.device_mesh, weight.placements)
                weight.copy_(distribute_tensor(drawn, *parts, src_data_rank=None))

    def _shared_probs(self, x: Tensor) -> Tensor | None:
        if self.shared_gate is None:
            return None
        return torch.sigmoid(self.shared_gate(x)).float()

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        deferred: DeferredWeights | None = None,
    ) -> Tensor:
        """Runs the layer on this rank's tokens; collective, as is its backward.

        Args:
            x: [..., H].
            token_mask: bool [...]; False: padding, which may hold anything: no routed expert sees
                it, and shared ones see zeros. None: there is none.
            deferred: see :func:`uniep.moe`.

        Returns:
            [..., H]. The router's losses are not in it; :meth:`forward_with_routing` returns them.
        """
        out, routing = self.forward_with_routing(x, token_mask=token_mask, deferred=deferred)
        if not torch.compiler.is_compiling() and self._warns_of_loss:
            self._warn_of_loss(routing)
        return out

    def forward_with_routing(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        deferred: DeferredWeights | None = None,
    ) -> tuple[Tensor, Routing]:
        """As :meth:`forward`, with what the router found: load, and the loss to add to yours."""
        refuse_transforms()
        check_local_tensors(x=x)
        check_device(x)
        if not torch.compiler.is_compiling() and self._compares_ranks:
            self._compare_ranks(x)
        if token_mask is not None:
            check_local_tensors(token_mask=token_mask)
        routing: Routing = self.router(x, token_mask)
        if token_mask is not None and (self.shared is not None or self.shared_w1 is not None):
            x = torch.where(token_mask.unsqueeze(-1), x, 0.0)  # shared experts see padding, too
        own = self.workspace is None
        out = moe(
            x,
            routing.ids,
            routing.probs,
            self.w1,
            self.w2,
            group=self.group if own else None,
            workspace=self.workspace,
            main_grads=self._main_grads(),
            deferred=deferred,
            b1=self.b1,
            b2=self.b2,
            zero_experts=self.zero_experts,
            zero_expert_type=self.zero_expert_type,
            shared_w1=self.shared_w1,
            shared_w2=self.shared_w2,
            shared_probs=self._shared_probs(x),
            **self._choices.arguments(self.arithmetic if own else None),
        )
        if self.shared is not None:
            out = out + self.shared(x)
        return out, routing

    def _warn_of_loss(self, routing: Routing) -> None:
        """Once: a router that is to learn an even load does not, if nobody adds its loss."""
        if not self.training or routing.loss is None or not routing.loss.requires_grad:
            return
        self._warns_of_loss = False
        warnings.warn(
            "the router's loss (aux_loss or z_loss) is not in the output of a uniep.MoELayer; call "
            "forward_with_routing, and add the loss of its Routing to yours",
            stacklevel=5,  # behind two of torch.nn.Module
        )

    def _compare_ranks(self, x: Tensor) -> None:
        """In the first call: later, ranks that began alike are alike as long as they reduce."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._compares_ranks = False
        experts = {id(weight) for weight in (self.w1, self.w2, self.b1, self.b2)}
        others: list[tuple[str, Tensor]] = [
            named for named in self.named_parameters() if id(named[1]) not in experts
        ]
        bias = getattr(self.router, "bias", None)  # a buffer, which experts are chosen by, too
        if isinstance(bias, Tensor):
            others.append(("router.bias", bias))
        others.sort(key=lambda named: not named[0].startswith("router."))  # what matters most
        warn_of_other_weights(others, self.group)

    def extra_repr(self) -> str:
        """Its figures, for printing."""
        zero = f", zero_experts={self.zero_experts}" if self.zero_experts else ""
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, "
            f"num_experts={self.num_experts}{zero}, topk={self.topk}, "
            f"rank={self.rank} of {self.size}"
        )


def _check_experts_beside(
    zero_experts: int,
    zero_expert_type: ZeroExpertType,
    router: RouterConfig | None,
    shared_experts: int,
    shared_intermediate: int,
) -> None:
    check_zero_experts(zero_experts, zero_expert_type)
    if zero_experts and router is not None and router.capacity_factor is not None:
        raise ValueError(
            f"zero_experts is {zero_experts} and capacity_factor is {router.capacity_factor}; "
            "experts that compute nothing have no capacity, pass one of them"
        )
    if shared_intermediate < 0:
        raise ValueError(f"shared_intermediate is {shared_intermediate}; it must be 0 or more")
    if shared_experts and shared_intermediate:
        raise ValueError(
            f"shared_experts is {shared_experts} and shared_intermediate is "
            f"{shared_intermediate}; shared experts are in the pass or apart, pass one of them"
        )


def expert_parameters(layer: MoELayer, prefix: str) -> dict[str, nn.Parameter]:
    """w1, w2, b1 and b2 of a layer that is called `prefix`, by their names in the model.

    Raises:
        ValueError: for those that are computed of others, as where they are parametrized or
            pruned, of a layer whose experts are spread over ranks.
    """
    found = {}
    for key in ("w1", "w2", "b1", "b2"):
        name = f"{prefix}.{key}" if prefix else key
        weight = layer._parameters.get(key)
        if weight is not None:
            found[name] = weight
        elif layer.size > 1 and getattr(layer, key) is not None:
            raise ValueError(
                f"{name} is no parameter of its layer, as where it is parametrized; a plain "
                "parameter is accepted: remove the parametrization first"
            )
    return found


def _check_dtypes(dtype: torch.dtype, main_grad: torch.dtype | None) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(
            f"dtype is {dtype}; torch.bfloat16 is accepted, or torch.float32 for calls under "
            "torch.autocast"
        )
    if main_grad not in (None, torch.float32, torch.bfloat16):
        raise TypeError(
            f"main_grad is {main_grad!r}; torch.float32, torch.bfloat16 and None are accepted"
        )


def _refuse_other_ranks(group: GroupLike, workspace: Workspace) -> None:
    """Raises ValueError where the layer would hold other experts than those that are computed."""
    own, its = ranks_of(group), ranks_of(workspace.members)
    if own is None or its is None:  # of a process group that has ended only this is known
        places = rank_and_size(group), rank_and_size(workspace.members)
        if places[0] != places[1]:
            (rank, size), (of, count) = places
            raise ValueError(
                f"group has this process as rank {rank} of {size}, and the group of the workspace "
                f"has it as {of} of {count}; the workspace's group is accepted, or none"
            )
    elif own != its:
        raise ValueError(
            f"group has ranks {own}, and the group of the workspace has {its}; the same ranks are "
            "accepted, or no group"
        )


def _check_sizes(hidden: int, intermediate: int, num_experts: int, ranks: int) -> None:
    for what, columns in (("hidden", hidden), ("intermediate", intermediate)):
        if columns < 8 or columns % 8:
            raise ValueError(f"{what} is {columns}; a multiple of 8, from 8 on, is accepted")
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; 1 or more is accepted")
    if num_experts % ranks:
        raise ValueError(
            f"{num_experts} experts cannot be shared by {ranks} ranks; their number must divide "
            "the experts"
        )
