"""A Megatron-Core MoE layer whose dispatch, experts and combine are one call of uniep."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from torch import Tensor

import uniep

from .experts import UniepExperts
from .options import Options, check_config, check_options, check_padding, frees_inputs_of_graphs
from .routes import routes, too_many_routes
from .shared import SharedExperts

__all__ = ["UniepMoELayer", "UniepTokenDispatcher", "with_uniep"]


class UniepTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Hands tokens and routes to :class:`UniepExperts`, which dispatch and combine themselves."""

    def __init__(self, config: Any, pg_collection: Any, experts: UniepExperts) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._experts = experts
        self._checked = False
        self.hidden_shape: torch.Size | None = None
        self.topk_ids: Tensor | None = None
        self.cudagraph_attrs = ["topk_ids"]

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [T, H] and probabilities [T, K] of their routes."""
        topk = self.config.moe_router_topk
        check_padding(self.config)
        if not self._checked and not _is_capturing(routing_map):
            wrong = too_many_routes(routing_map, topk)
            if wrong is not None:
                raise ValueError(wrong)
            self._checked = routing_map.is_cuda  # there, asking means waiting
        self.hidden_shape = hidden_states.shape
        self.topk_ids, topk_probs = routes(probs, routing_map, topk)
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        own = tokens.clone() if frees_inputs_of_graphs(self.config) else self._own(tokens)
        return own, topk_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they are."""
        return self._own(hidden_states), self._own(probs)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of :class:`UniepExperts`."""
        assert self.topk_ids is not None
        if self._experts.options.save == "none":  # backward reads them again
            hidden_states = self._own(hidden_states)
        return hidden_states, self.topk_ids, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As it is."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """As it is: uniep's output is the combined one."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The layer's output in the shape of its input."""
        assert self.hidden_shape is not None
        return hidden_states.view(self.hidden_shape)

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy where Megatron's schedule frees the memory of each step's inputs after it."""
        if getattr(self.config, "overlap_moe_expert_parallel_comm", False):
            return tensor.clone()
        return tensor

    # Capacity, with the names that Megatron's dispatchers have for it. Only on_overflow="flag"
    # tracks it: else a routing that does not fit is an error.

    def check_over_budget(self) -> Tensor | None:
        """Whether a routing did not fit since the last reset; bool [1] on the device."""
        workspace = self._experts.routed.workspace
        if workspace is None or not workspace.flag:
            return None
        return workspace.overflow[:1] > 0

    def check_required_capacity(self) -> Tensor | None:
        """The rows that would have done for all routings since the last reset; int64 [1]."""
        workspace = self._experts.routed.workspace
        return None if workspace is None or not workspace.flag else workspace.overflow[1:]

    def grow_ep_recv_capacity(self, new_capacity: int) -> None:
        """Makes room for so many rows on every rank; collective, before a step is replayed.

        Raises:
            RuntimeError: on all ranks, where it was not their number that did not fit.
        """
        workspace = self._experts.routed.workspace
        if workspace is None:
            return
        if workspace.flag and (other := _NO_ROWS.get(int(workspace.overflow[0]))):
            raise RuntimeError(f"{other}, which more capacity does not mend")
        if workspace.rows < new_capacity:
            workspace.grow(capacity_rows=new_capacity)

    def reset_over_budget(self) -> None:
        """Forgets what has not fitted."""
        workspace = self._experts.routed.workspace
        if workspace is not None:
            workspace.overflow.zero_()


# Faults of a routing, by Workspace.overflow[0], that are no lack of capacity.
_NO_ROWS: dict[int, str] = {
    uniep.Overflow.IMPOSSIBLE: "a routing had an id of no expert",
    uniep.Overflow.PAGES: (
        "a routing needed more pages than the pool had; give with_uniep(spec, row_pool=...) more"
    ),
    uniep.Overflow.EXPERT_ROWS: (
        "an expert had more rows than backward_rows; give with_uniep(spec, backward_rows=...) more"
    ),
}


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def _smallest_dispatcher(config: Any) -> Iterator[None]:
    """Lets MoELayer build the dispatcher that needs nothing; it is replaced."""
    chosen, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = chosen


class UniepMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer, with its router and shared experts, and routed experts of uniep's.

    Args:
        config: Megatron's TransformerConfig; what uniep cannot do is refused.
        submodules: Megatron's MoESubmodules; ``experts`` builds :class:`UniepExperts`.
        layer_number: of the layer.
        pg_collection: Megatron's process groups; None: those of ``parallel_state``.
        others: passed on to MoELayer, whose arguments differ by version.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        check_config(config)
        groups = pg_collection or get_default_pg_collection()
        _check_groups(config, groups)
        with _smallest_dispatcher(config):
            super().__init__(config, submodules, layer_number, groups, **others)
        if not isinstance(self.experts, UniepExperts):
            raise ValueError(
                f"submodules.experts builds {type(self.experts).__name__}; with UniepMoELayer it "
                "must build UniepExperts (with_uniep(spec) does that)"
            )
        self.token_dispatcher = UniepTokenDispatcher(config, groups, self.experts)
        routed = self.experts.routed
        if routed.options.shared_experts == "fused":
            intermediate = routed.weights[1].shape[2]
            routed.shared = SharedExperts(self.shared_experts, config, intermediate)

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """What Megatron adds to the routed experts' output; nothing where that has it already."""
        if self.experts.routed.shared is not None:
            return None
        out: Tensor | None = super().shared_experts_compute(hidden_states)
        return out


def _check_groups(config: Any, groups: Any) -> None:
    ranks, wanted = groups.ep.size(), config.expert_model_parallel_size
    if ranks != wanted:
        raise ValueError(
            f"the group of expert parallelism has {ranks} ranks, and expert_model_parallel_size is "
            f"{wanted}; where a model is given process groups, with_uniep(spec, pg_collection=...) "
            "must be given the same"
        )


Spec = TypeVar("Spec")


def with_uniep(spec: Spec, *, pg_collection: Any = None, **options: Any) -> Spec:
    """A copy of a spec of layers, blocks or models, with uniep's experts in every MoE layer.

    Args:
        spec: what ``get_gpt_layer_with_transformer_engine_spec`` or ``get_gpt_decoder_block_spec``
            returns, or a part of it.
        pg_collection: the process groups that the model is given. Megatron hands them to layers
            of its own classes only. None: those of ``parallel_state``.
        options: see :class:`uniep.megatron.Options`.

    Raises:
        ValueError: where the spec has no MoE layer, or one of a class that is not Megatron's, or
            for a word that is no choice.
        TypeError: for an unknown option.
    """
    check_options(Options(**options))
    found: list[bool] = []
    given = {} if pg_collection is None else {"pg_collection": pg_collection}
    changed: Spec = _changed(spec, _Change(given, options), found)
    if not found:
        raise ValueError(f"the spec {type(spec).__name__} has no MoELayer; give num_experts to it")
    return changed


class _Change(NamedTuple):
    """Arguments of the layers and of the experts that replace Megatron's."""

    of_layer: dict[str, Any]
    of_experts: dict[str, Any]


def _changed(spec: Any, change: _Change, found: list[bool]) -> Any:
    module = spec.func if isinstance(spec, functools.partial) else None
    if isinstance(spec, ModuleSpec):
        module = get_module(spec)
    if isinstance(module, type) and issubclass(module, MoELayer):
        if module is not MoELayer:
            raise ValueError(
                f"the spec has a {module.__name__}; with_uniep replaces MoELayer, not what is "
                "derived from it"
            )
        found.append(True)
        return _uniep_layer(spec, change)
    if isinstance(spec, functools.partial):
        keywords = {k: _changed(v, change, found) for k, v in spec.keywords.items()}
        return functools.partial(spec.func, *spec.args, **keywords)
    if isinstance(spec, (list, tuple)) and type(spec) in (list, tuple):
        return type(spec)(_changed(item, change, found) for item in spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        new = copy.copy(spec)
        for field in dataclasses.fields(spec):
            setattr(new, field.name, _changed(getattr(spec, field.name), change, found))
        return new
    return spec


def _uniep_layer(spec: Any, change: _Change) -> Any:
    if isinstance(spec, ModuleSpec):
        submodules = copy.copy(spec.submodules)
        new = copy.copy(spec)
        new.module, new.submodules = UniepMoELayer, submodules
        new.params = {**spec.params, **change.of_layer}
    else:
        submodules = copy.copy(spec.keywords["submodules"])
        new = functools.partial(
            UniepMoELayer,
            *spec.args,
            **{**spec.keywords, **change.of_layer, "submodules": submodules},
        )
    submodules.experts = ModuleSpec(module=UniepExperts, params=dict(change.of_experts))
    return new
