"""The experts of a Megatron-Core layer, run by uniep."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import Parameter

import uniep
from uniep._forms import ExpertWeight
from uniep.arithmetic import Arithmetic
from uniep.row_pool import shared_pool

from .checkpoint import Place, rename_experts, sharded_experts
from .options import Options, activation_of, check_config, check_options
from .shared import SharedExperts
from .weights import ExpertParams, Stack, through_stack

__all__ = ["ExpertLinear", "RoutedExperts", "UniepExperts"]


class _Given(NamedTuple):
    """What :func:`uniep.moe` takes."""

    w1: ExpertWeight
    w2: ExpertWeight
    b1: Tensor | None
    b2: Tensor | None


class RoutedExperts:
    """Calls of :func:`uniep.moe` with what experts have, as Megatron's options say.

    Args:
        config: Megatron's.
        options: uniep's.
        group: the expert-parallel group.
        fc1: weights [experts, 2I, H], without a gate [experts, I, H].
        fc2: weights [experts, H, I].
        biases: of fc1 and fc2, as many rows; or none.
    """

    def __init__(
        self,
        config: Any,
        options: Options,
        group: dist.ProcessGroup,
        fc1: ExpertParams,
        fc2: ExpertParams,
        *biases: Stack,
    ) -> None:
        if options.backward_rows and getattr(config, "delay_wgrad_compute", False):
            raise ValueError(
                f"backward_rows is {options.backward_rows}; where delay_wgrad_compute is True, "
                "which keeps all rows of a backward, it must be 0"
            )
        self.config = config
        self.options = options
        self.group = group
        self.weights = (fc1, fc2)
        self.biases = biases
        self.activation = activation_of(config)
        self.deferred = uniep.DeferredWeights()
        self.workspace: uniep.Workspace | None = None
        self._left_to_main = False  # the weight gradients that wait go to main_grad
        self.shared: SharedExperts | None = None  # the layer's, where they are part of the pass

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
        """The sum of the experts' outputs for each token, [T, H]."""
        whole = torch.is_grad_enabled() and self.all_require_grad()
        delayed = whole and getattr(self.config, "delay_wgrad_compute", False)
        fused = whole and self.config.gradient_accumulation_fusion
        if torch.is_grad_enabled():
            self._left_to_main = fused and delayed
        given, main_grads, backwards = self._given(fused, delayed)
        w1, w2, b1, b2 = given
        if backwards:  # biases lie in descending order of experts, whose numbers are mirrored
            topk_ids = _mirrored(topk_ids, self.weights[0].shape[0])
        if self.workspace is None or self._outgrows(self.workspace, x):
            self.workspace = self._shared_workspace(x, topk_ids.shape[1])
        shared = None
        if self.shared is not None:
            shared = self.shared.given(x, main_grads is not None)
            main_grads = main_grads and (*main_grads, *shared.main_grads)
        try:
            return uniep.moe(
                x,
                topk_ids,
                topk_probs,
                w1,
                w2,
                workspace=self.workspace,
                main_grads=main_grads,
                deferred=self.deferred if delayed else None,
                b1=b1,
                b2=b2,
                **({} if shared is None else shared.tensors._asdict()),
            )
        except RuntimeError as error:  # of all ranks, whichever has too many
            if "max_tokens=" not in str(error):
                raise
            raise RuntimeError(
                f"{error}; give with_uniep(spec, max_tokens=...) the most that any rank ever has"
            ) from error

    def _outgrows(self, workspace: uniep.Workspace, x: Tensor) -> bool:
        """Whether one rank's larger call asks for another workspace; in a group it is refused."""
        alone = dist.get_world_size(self.group) == 1
        return alone and self.options.max_tokens is None and x.shape[0] > workspace.max_tokens

    def all_require_grad(self) -> bool:
        """Whether uniep computes all gradients, in its pass or later.

        Where some are frozen, autograd gives gradients to the others, and DDP adds these up.
        """
        shared = () if self.shared is None else self.shared.weights
        return all(
            need for own in (*self.weights, *self.biases, *shared) for need in own.require_grad()
        )

    def _given(
        self, fused: bool, delayed: bool
    ) -> tuple[_Given, tuple[ExpertWeight, ...] | None, bool]:
        """Weights and biases, their main gradients, and whether experts stand backwards."""
        rows, row_grads, backwards = self._given_biases(fused, delayed)
        main_grads: tuple[ExpertWeight, ...] | None = None
        if fused:
            of_weights = (own.weight(own.main_grads(), backwards) for own in self.weights)
            main_grads = (*of_weights, *row_grads)
        weights = []
        for own in self.weights:
            tensors: list[Tensor] = list(own.params)
            if fused:
                tensors = own.accumulated([param.detach() for param in tensors], delayed)
            weights.append(own.weight(tensors, backwards))
        b1, b2 = rows or (None, None)
        return _Given(weights[0], weights[1], b1, b2), main_grads, backwards

    def _given_biases(self, fused: bool, delayed: bool) -> tuple[list[Tensor], list[Tensor], bool]:
        """Biases, their main gradients, and whether experts stand backwards there."""
        if not self.biases:
            return [], [], False
        main_grads = [stack.main_grad() for stack in self.biases] if fused else []
        for stack, (_, backwards) in zip(self.biases, main_grads, strict=False):
            if backwards != main_grads[0][1]:
                raise RuntimeError(
                    f"the main gradients of {self.biases[0].name} and {stack.name} lie in "
                    "different orders of experts; use layout='stacked' or "
                    "gradient_accumulation_fusion=False"
                )
        backwards = main_grads[0][1] if fused else self.biases[0].tensor()[1]
        tensors = [stack.tensor(backwards)[0] for stack in self.biases]
        if fused:
            tensors = [
                stack.accumulated([tensor], delayed)[0]
                for stack, tensor in zip(self.biases, tensors, strict=True)
            ]
        elif delayed:
            tensors = [stack.leaf() for stack in self.biases]
        else:
            tensors = [
                through_stack(stack, tensor, backwards)
                for stack, tensor in zip(self.biases, tensors, strict=True)
            ]
        return tensors, [grad for grad, _ in main_grads], backwards

    def backward_weights(self) -> None:
        """Computes the weight gradients that ``delay_wgrad_compute`` has left for later."""
        uniep.backward_weights(self.deferred)
        if self._left_to_main:
            for own in (*self.weights, *self.biases):
                own.mark_accumulated()
            return
        for stack in self.biases:
            stack.hand_out()

    def _shared_workspace(self, x: Tensor, topk: int) -> uniep.Workspace:
        (experts, _, hidden), options = self.weights[0].shape, self.options
        intermediate = self.weights[1].shape[2]
        ranks = dist.get_world_size(self.group)
        most = options.max_tokens
        if most is None:
            tokens = torch.tensor(x.shape[0], device=x.device)
            dist.all_reduce(tokens, dist.ReduceOp.MAX, group=self.group)
            most = max(int(tokens), 1)
        capacity = options.capacity_rows
        factor = getattr(self.config, "moe_expert_rank_capacity_factor", None)
        if capacity is None and factor is not None:
            # As Megatron counts, and room to round each expert's rows up to uniep's 128.
            capacity = int(most * topk * factor) + 127 * experts
        shape = (hidden, intermediate, experts * ranks, topk, most)
        arithmetic = Arithmetic(
            self.activation,
            bias=bool(self.biases),
            combine_groups=options.combine_groups,
            combine_partials=options.combine_partials,
            shared_experts=0 if self.shared is None else self.shared.count,
            shared_gate=self.shared is not None,
        )
        given = {
            "capacity_rows": capacity,
            **{name: getattr(options, name) for name in _OF_WORKSPACES},
            **arithmetic._asdict(),
            "device": x.device,
        }
        known = _workspaces.setdefault(self.group, WeakValueDictionary())
        key = (*shape, *given.values())
        workspace = known.get(key)
        # That of layers which are no longer used may have ended on some ranks only: Python collects
        # cycles when it likes. Making one is collective, so the ranks decide together.
        everywhere = torch.tensor(int(workspace is not None), device=x.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self.group)
        if workspace is None or not everywhere:
            kept = (hidden, intermediate, options.save, options.recompute_h, self.activation)
            pool = shared_pool(options.row_pool, self.group, x.device, *kept)
            workspace = uniep.Workspace(self.group, *shape, **given | {"row_pool": pool})
            known[key] = workspace
        return workspace


# Options that are workspaces' own.
_OF_WORKSPACES = (
    "save",
    "recompute_h",
    "backward_rows",
    "exact_rows",
    "exact_hosts",
    "row_pool",
    "schedule",
    "on_overflow",
)

# One for all layers of a shape; it ends with the last of them.
_workspaces: WeakKeyDictionary[
    dist.ProcessGroup, WeakValueDictionary[tuple[Any, ...], uniep.Workspace]
] = WeakKeyDictionary()


def _mirrored(ids: Tensor, experts: int) -> Tensor:
    """Ids for experts that lie in descending order within each rank; -1 stays."""
    local = ids.remainder(experts)
    return torch.where(ids < 0, ids, ids - local + (experts - 1 - local))


class ExpertLinear(torch.nn.Module):
    """Weights and biases of fc1 or fc2 of the local experts, under the names of Megatron's.

    Attributes:
        weights: of the experts.
        biases: likewise, or None.
    """

    def __init__(
        self, weights: Tensor, biases: Tensor | None, name: str, options: Options, config: Any
    ) -> None:
        super().__init__()
        self._register("weight", weights, options, config)
        self.weights = ExpertParams([(self, own) for own in self.named()], f"{name}.weight")
        self.biases: Stack | None = None
        if biases is not None:
            self._register("bias", biases, options, config)
            self.biases = Stack([(self, own) for own in self.named("bias")], f"{name}.bias")
        self._hooks: list[tuple[Parameter, Any]] = []

    def _register(self, kind: str, tensor: Tensor, options: Options, config: Any) -> None:
        # Backwards, since DDP lays out its buffers from the last parameter to the first: so experts
        # lie there in ascending order.
        parts = {kind: tensor}
        if options.layout == "per_expert":
            parts = {f"{kind}{i}": tensor[i] for i in reversed(range(len(tensor)))}
        for own_name, part in parts.items():
            param = Parameter(part)
            # Reduced over expert data parallel groups, and counted by every rank in gradient norms.
            param.allreduce = not _has_expert_groups(config)  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(param, True, -1, 1)
            param.skip_backward_post_hook = getattr(  # type: ignore[attr-defined]
                config, "delay_wgrad_compute", False
            )
            self.register_parameter(own_name, param)

    def named(self, kind: str = "weight") -> dict[str, Parameter]:
        """The weights or biases by name, experts ascending."""
        own = [entry for entry in self.named_parameters(recurse=False) if entry[0].startswith(kind)]
        return dict(reversed(own))

    def forward(self) -> None:
        """Nothing: the call runs the hooks by which DDP waits for gathered parameters."""

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """DDP's hook of a parameter whose gradient comes with ``backward_dw``.

        DDP does not say which: it gives one for each that asks for a gradient, in their order.
        """
        trained = [param for param in self.parameters() if param.requires_grad]
        self._hooks.append((trained[len(self._hooks) % len(trained)], hook))

    def run_hooks(self) -> None:
        """Tells DDP that the gradients are there; parameters frozen since then have none."""
        for param, hook in self._hooks:
            if param.requires_grad:
                hook()

    def loses_later_gradients(self) -> bool:
        """Whether DDP adds up ``grad`` in backward, and not again with ``backward_dw``."""
        in_ddp = any(hasattr(param, "main_grad") for param in self.parameters())
        return in_ddp and not self._hooks


def _has_expert_groups(config: Any) -> bool:
    """Whether experts are reduced over groups other than those of dense weights."""
    return bool(config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1)


class UniepExperts(MegatronModule):  # type: ignore[misc]
    """All that lies between the router and the layer's output, in one call of :func:`uniep.moe`.

    Args:
        num_local_experts: experts of this rank.
        config: Megatron's TransformerConfig; what uniep cannot do is refused.
        submodules: none are taken.
        pg_collection: Megatron's process groups.
        name: of the module.
        options: see :class:`uniep.megatron.Options`.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        check_config(config)
        super().__init__(config=config)
        if submodules is not None:
            raise ValueError(f"submodules is {type(submodules).__name__}; UniepExperts takes none")
        self.num_local_experts = num_local_experts
        self.groups = pg_collection
        self.options = Options(**options)
        check_options(self.options)
        rank, ranks = dist.get_rank(pg_collection.ep), dist.get_world_size(pg_collection.ep)
        self.first_expert, self.num_experts = rank * num_local_experts, ranks * num_local_experts
        hidden, intermediate = config.hidden_size, config.moe_ffn_hidden_size
        self.halves = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = self._linear(
            "linear_fc1", self.halves * intermediate, hidden, config.init_method
        )
        self.linear_fc2 = self._linear(
            "linear_fc2", hidden, intermediate, config.output_layer_init_method
        )
        linears = (self.linear_fc1, self.linear_fc2)
        first, second = (linear.weights for linear in linears)
        biases = [linear.biases for linear in linears if linear.biases is not None]
        self.routed = RoutedExperts(config, self.options, pg_collection.ep, first, second, *biases)
        self._register_load_state_dict_pre_hook(_rename, with_module=True)

    def _linear(self, name: str, rows: int, columns: int, init_method: Any) -> ExpertLinear:
        config = self.config
        cpu = config.use_cpu_initialization
        weights = torch.empty(
            self.num_local_experts,
            rows,
            columns,
            dtype=config.params_dtype,
            device="cpu" if cpu else torch.cuda.current_device(),
        )
        if config.perform_initialization and cpu:
            # Every rank draws all experts, so that weights do not depend on the number of ranks.
            drawn = torch.empty(rows, columns, dtype=torch.float32, device="cpu")
            for expert in range(self.num_experts):
                init_method(drawn)
                if expert in range(self.first_expert, self.first_expert + self.num_local_experts):
                    weights[expert - self.first_expert].copy_(drawn)
        elif config.perform_initialization:
            tracker = get_cuda_rng_tracker()
            random = tracker.fork(get_expert_parallel_rng_tracker_name())
            with random if tracker.is_initialized() else nullcontext():
                for weight in weights:
                    init_method(weight)
        biases = weights.new_zeros(weights.shape[:2]) if config.add_bias_linear else None
        return ExpertLinear(weights, biases, name, self.options, config)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> tuple[Tensor, None]:
        """The experts' output and no bias.

        Args:
            x: bf16 [T, H].
            topk_ids: int32 [T, K], numbers of all ranks' experts; -1: no route.
            topk_probs: fp32 [T, K].

        Raises:
            RuntimeError: where gradients that come later would not get to DDP.
        """
        self.linear_fc1()
        self.linear_fc2()
        if torch.is_grad_enabled() and getattr(self.config, "delay_wgrad_compute", False):
            self._check_hooks()
        return self.routed(x, topk_ids, topk_probs), None

    def _check_hooks(self) -> None:
        if self.config.gradient_accumulation_fusion or not self.routed.all_require_grad():
            return
        if self.linear_fc1.loses_later_gradients() or self.linear_fc2.loses_later_gradients():
            raise RuntimeError(
                "delay_wgrad_compute is True in the model's configuration and False in that of "
                "DDP, which would lose gradients that come later; give it "
                "DistributedDataParallelConfig(delay_wgrad_compute=True)"
            )

    def backward_dw(self) -> None:
        """Computes the weight gradients, where ``delay_wgrad_compute`` is set."""
        if getattr(self.config, "delay_wgrad_compute", False):
            self.routed.backward_weights()
            self.linear_fc2.run_hooks()
            self.linear_fc1.run_hooks()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The entries of a distributed checkpoint; those of Megatron's own experts."""
        place = Place(
            self.first_expert,
            self.num_experts,
            tuple(sharded_offsets),
            dist.get_rank(self.groups.expt_dp),
            bool((metadata or {}).get("singleton_local_shards", False)),
        )
        entries: dict[str, Any] = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            halves = self.halves if name == "linear_fc1" else 1
            for kind in ("weight", "bias"):
                params: dict[str, Tensor] = dict(linear.named(kind))
                entries.update(sharded_experts(name, kind, params, place, prefix, halves=halves))
        return entries


def _rename(module: UniepExperts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, linear in (("linear_fc1", module.linear_fc1), ("linear_fc2", module.linear_fc2)):
        for kind in ("weight", "bias"):
            names = list(linear.named(kind))
            if names:
                rename_experts(state, prefix, name, kind, names, module.num_local_experts)
