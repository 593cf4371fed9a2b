"""uniep as the experts of transformers' MoE models.

    import uniep.transformers

    uniep.transformers.use(model)  # all experts in this process

    uniep.transformers.register()
    DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="uniep")  # expert parallel

Router, shared experts and all else stay the model's own modules, but
``use(model, shared_experts="fused")`` runs shared experts in the same pass as the others.
docs/transformers.md has figures, and docs/models.md what is supported.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import uniep

from ._choices import Choices
from ._save_choice import Save
from .arithmetic import CombinePartials, ProbsPlace

try:
    from transformers.integrations import moe as _hf_moe
except ImportError as error:
    raise ImportError(
        "uniep.transformers needs transformers 5.0 or later, and it cannot be imported: "
        f"{error}; pip install transformers"
    ) from error
from . import _transformers_shared as _shared
from ._shared_experts import Shared, SharedChoice, check_choice
from ._transformers_blocks import become, check_forward, check_hooks, with_forward
from ._transformers_experts import (
    IMPLEMENTATIONS,
    Facts,
    Packing,
    adapted_by,
    check_packing,
    facts_of,
    is_offloaded,
    is_quantised,
    is_to_be_packed,
    pack,
    weights_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check", "register", "use"]


_registered: dict[str, Choices] = {}


def register(
    name: str = "uniep",
    *,
    probs: ProbsPlace = "after",
    max_tokens: int | None = None,
    capacity_rows: int | None = None,
    save: Save | None = None,
    recompute_h: bool | None = None,
    backward_rows: int | None = None,
    exact_rows: bool | None = None,
    exact_hosts: bool | None = None,
    schedule: str | None = None,
    row_pool: uniep.RowPool | int | None = None,
    combine_groups: int | None = None,
    combine_partials: CombinePartials | None = None,
) -> None:
    """Makes `name` an experts implementation and an EP implementation of transformers.

    Calling again replaces what an earlier call registered under `name`: models look experts up at
    every forward, and an EP implementation once, when they are distributed. transformers before
    5.23 has no EP implementations; there, only the experts are registered.

    Args:
        name: by which settings refer to it.
        probs: where routing weights are multiplied: ``"after"`` the second projection, as
            transformers does, or ``"before"`` it, which gives the same but for roundings.
        max_tokens: see :func:`uniep.moe`; needed for EP where the number of tokens varies. It does
            not count for experts in transformers' own EP, which hands them rows, not tokens.
        capacity_rows: see :class:`uniep.Workspace`.
        save: what a forward keeps of x; see :class:`uniep.Workspace`.
        recompute_h: whether backward computes h again; see :class:`uniep.Workspace`.
        backward_rows: rows that backward works in at a time; see :class:`uniep.Workspace`.
        exact_rows: whether calls take memory for the rows that come; see :class:`uniep.Workspace`.
        exact_hosts: over hosts, whether tokens go only to those that have an expert of them; see
            :class:`uniep.Workspace`.
        schedule: see :func:`uniep.moe`.
        row_pool: where forwards keep rows; see :func:`uniep.moe`.
        combine_groups: how a token's rows are added up; see :func:`uniep.moe`. Not in transformers'
            own EP, which adds them up itself.
        combine_partials: likewise.

    Raises:
        ValueError: for a place of routing weights or a type of partial sums that there is not, and
            for fewer than one combine group.
    """
    choices = Choices(
        probs=probs,
        max_tokens=max_tokens,
        capacity_rows=capacity_rows,
        save=save,
        recompute_h=recompute_h,
        backward_rows=backward_rows,
        exact_rows=exact_rows,
        exact_hosts=exact_hosts,
        schedule=schedule,
        row_pool=row_pool,
        combine_groups=combine_groups,
        combine_partials=combine_partials,
    )
    choices.arithmetic()
    _registered[name] = choices
    IMPLEMENTATIONS.add(name)
    _hf_moe.ExpertsInterface.register(name, functools.partial(_experts_forward, choices))
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        return
    EPImplementationInterface.register(name, functools.partial(_expert_parallel_class(), choices))


def use(
    model: nn.Module, name: str = "uniep", *, shared_experts: SharedChoice = "apart"
) -> list[str]:
    """Makes uniep compute the experts of a model.

    It calls ``set_experts_implementation`` where the model has that. Weights that do not lie as
    uniep takes them are rearranged, once: parameters stay the same objects, with other shapes, and
    state dicts, ``save_pretrained`` too, keep the model's names, shapes and order. So call it after
    weights are loaded, and before optimizers and ``fully_shard`` see the parameters. Weights that
    peft has adapted already stay as they lie.

    Args:
        model: of a class that :func:`check` accepts, or a module that holds such models.
        name: under which :func:`register` was called; it is called if it was not.
        shared_experts: ``"apart"``: the model's own modules compute them, or ``"fused"``: they are
            part of the same pass as the others. Their weights stay the module's own
            parameters, with their gradients; where one is as wide as the others it is read in
            place, which makes gate and up views of one tensor. Outputs agree to tolerance.

    Returns:
        The names of the modules whose experts uniep computes.

    Raises:
        NotImplementedError, ValueError: see :func:`check`; for experts outside of any model of
            transformers; for weights that would be rearranged after DistributedDataParallel or
            FSDP1 has them, or that something else reads as they lie; and for ``"fused"`` where
            there are no shared experts, or such as cannot be part of the pass, as with adapters or
            hooks of their own.
    """
    check_choice(shared_experts)
    names = check(model)
    blocks, fused = _blocks_with_shared(model, names), shared_experts == "fused"
    if fused and not blocks:
        raise ValueError(
            f"{type(model).__name__} has no shared experts; shared_experts='apart' is accepted"
        )
    for block_name, block in blocks.items():
        if fused:
            _shared.check_block(block, block_name)
        if fused != _shared.is_fused(block):
            check_forward(block)
    modules: dict[str, Any] = {own_name: model.get_submodule(own_name) for own_name in names}
    models = _models_around(model, [n for n, module in modules.items() if not _is_block(module)])
    packing = _to_be_packed(model, modules)
    check_packing(model, packing)
    if name not in _registered:
        register(name)
    for own_model in models:
        own_model.set_experts_implementation(name)
    for own_name, module in modules.items():
        if _is_block(module):
            _use_in_block(module, name)
            continue
        if ".modules_to_save." in own_name:  # peft's copy, with a copy of the configuration
            module.config._experts_implementation = name
        found = module.config._experts_implementation
        if found != name:
            raise ValueError(
                f"set_experts_implementation of {type(model).__name__} leaves {own_name} with "
                f"'{found}'; it must be '{name}': call it for the model whose configuration that is"
            )
    for experts, facts in packing.values():
        pack(experts, facts)
    for block in blocks.values():
        (_shared.fuse if fused else _shared.separate)(block)
    return names


def _models_around(model: nn.Module, names: list[str]) -> list[Any]:
    """Whose configurations choose the implementation of these modules of experts.

    Raises:
        ValueError: one sentence, for experts outside of any model of transformers.
    """
    found = dict[int, Any]()
    for name in names:
        own, parts = model, name.split(".")
        while not hasattr(own, "set_experts_implementation") and parts:
            own = own.get_submodule(parts.pop(0))
        if not parts:
            raise ValueError(
                f"{type(model).__name__} has {name or 'experts'} outside of any model of "
                "transformers, whose set_experts_implementation chooses what computes them; call "
                "use for such a model, or for a module that holds it"
            )
        found[id(own)] = own
    return list(found.values())


def _to_be_packed(model: nn.Module, modules: dict[str, Any]) -> Packing:
    """Experts whose weights `use` rearranges, with what they are, by name."""
    adapted = {id(own) for wrapper in model.modules() if (own := adapted_by(wrapper)) is not None}
    packing = {}
    for name, module in modules.items():
        is_block = _is_block(module)
        experts = _experts_of(module) if is_block else module
        facts = facts_of(experts)
        # Adapters know the weights as they lie.
        if id(experts) not in adapted and is_to_be_packed(experts, facts):
            packing[f"{name}.experts".lstrip(".") if is_block else name] = (experts, facts)
    return packing


def _blocks_with_shared(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """By name: what holds these modules of experts, or is one of them, and has shared ones too."""
    blocks = dict(_block_of(model, name) for name in names)
    return {name: block for name, block in blocks.items() if _shared.names_of_shared(block)}


def _block_of(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Of a module of experts, around which there may be layers of peft; itself, if it is one."""
    found = model.get_submodule(name)
    if _is_block(found):
        return name, found
    while name:
        name = name.rpartition(".")[0]
        found = model.get_submodule(name)
        if adapted_by(found) is None:
            break
    return name, found


def check(model: nn.Module) -> list[str]:
    """The names of the model's modules whose experts uniep can run.

    Raises:
        NotImplementedError: the sentence that a forward would raise, as for hooks of Llama-4's
            experts, and one for a block whose forward something else has replaced.
        ValueError: for a model none of whose experts has a choice of implementation.
    """
    names = []
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate"):  # what the decorator leaves on every such class
            facts_of(module)
            names.append(name)
        elif is_quantised(module):
            facts_of(module)  # which refuses them
        elif _is_block(module):
            facts_of(_experts_of(module))
            if not _runs_uniep(module):
                check_forward(module)
            check_hooks(module, _CALLED, name)
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no experts with a choice of implementation; accepted are "
            "models whose experts are decorated with transformers' use_experts_implementation, and "
            "Llama-4"
        )
    return names


def _experts_forward(
    choices: Choices,
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    shared: Shared | None = None,
) -> Tensor:
    """The function behind `set_experts_implementation`: experts of this rank alone.

    `shared` comes from blocks whose shared experts are part of the pass.
    """
    facts = facts_of(experts)
    if getattr(experts, "_is_expert_parallel", False):
        # transformers' own EP marks slots of other ranks' experts by the number of local ones, and
        # sends one expert's rows of all ranks here: as many as the routing says, not max_tokens.
        if choices.combine_groups not in (None, 1):
            raise ValueError(
                f"combine_groups is {choices.combine_groups}, but transformers' own EP adds rows "
                "up; it must be 1 or None there, or uniep the EP implementation"
            )
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
        choices = choices.but(max_tokens=None)
    return _run(
        choices,
        experts,
        facts,
        hidden_states,
        top_k_index,
        top_k_weights,
        group=None,
        shared=shared,
    )


def _run(
    choices: Choices,
    experts: Any,
    facts: Facts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    group: Any,
    shared: Shared | None = None,
) -> Tensor:
    weights = weights_of(experts, facts)
    own = {name: getattr(experts, name) for name in facts.names}
    if shared is not None:
        own |= {"shared_w1": shared.shared_w1, "shared_w2": shared.shared_w2}
    _refuse_dtypes(experts, hidden_states, own)
    out = uniep.moe(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        weights.w1,
        weights.w2,
        group=group,
        b1=weights.b1,
        b2=weights.b2,
        w1_layout=weights.w1_layout,
        weights_layout=weights.weights_layout,
        **(choices._asdict() | {"activation": facts.activation}),
        **({} if shared is None else shared._asdict()),
    )
    return out.to(hidden_states.dtype)


def _refuse_dtypes(experts: Any, hidden_states: Tensor, weights: dict[str, Tensor]) -> None:
    if torch.is_autocast_enabled(hidden_states.device.type):
        return  # uniep.moe casts fp32 then, and refuses the rest
    for name, tensor in {"hidden_states": hidden_states, **weights}.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name} of {type(experts).__name__} is {tensor.dtype}; it must be torch.bfloat16 "
                "(from_pretrained(..., dtype=torch.bfloat16)), or the model run under "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )


# Llama-4 scales what goes into an expert, and its experts have no choice of implementation: there
# the block around them is what changes.


_CALLED = ("router", "shared_expert")  # by our forward


def _is_block(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "Llama4TextMoe" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def _experts_of(block: Any) -> Any:
    """Of a block whose forward is ours, which runs no adapter around them, nor a hook of theirs."""
    if adapted_by(block.experts) is not None:
        raise NotImplementedError(
            f"the experts of {type(block).__name__} are adapted (LoRA), which uniep does not run; "
            "adapters of other modules are accepted"
        )
    if is_offloaded(block.experts):
        raise NotImplementedError(
            f"accelerate has offloaded the experts of {type(block).__name__} (cpu_offload, "
            "device_map), and brings them where their own forward runs, which uniep's does not "
            "call; experts that stay where they compute are accepted"
        )
    return block.experts


def _runs_uniep(block: nn.Module) -> bool:
    return hasattr(type(block), "_is_uniep")


def _use_in_block(block: nn.Module, name: str) -> None:
    block._uniep_name = name  # type: ignore[assignment]
    if not _runs_uniep(block):
        own_class: Any = type(block)
        become(block, _class_with_uniep(own_class))


@functools.cache
def _class_with_uniep(block_class: Any) -> Any:
    """The same block, whose forward calls uniep."""
    return with_forward(_class_with_uniep, block_class, _block_forward, "_is_uniep")


def _block_forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama4TextMoe: an expert gets x times its score, and its output counts once.

    A token and its scores are K tokens with one expert each.
    """
    experts = _experts_of(block)
    if any(isinstance(param, DTensor) for param in experts.parameters(recurse=False)):
        raise RuntimeError(
            f"the experts of {type(block).__name__} are sharded by themselves; uniep's forward of "
            "the block reads their weights, which must be gathered with it: call fully_shard on "
            "the block or its layer"
        )
    check_hooks(block, _CALLED)  # which may have come since
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    router_scores, router_logits = block.router(hidden_states)
    scores, ids = router_scores.sort(dim=1, descending=True, stable=True)  # those not chosen are 0
    scores, ids = scores[:, : block.top_k], ids[:, : block.top_k]
    scaled = hidden_states.unsqueeze(1) * scores.unsqueeze(2)
    choices = _choices_of(block)
    if choices.max_tokens is not None:
        choices = choices.but(max_tokens=choices.max_tokens * block.top_k)
    out = _run(
        choices,
        experts,
        facts_of(experts),
        scaled.flatten(0, 1),
        ids.reshape(-1, 1),
        scores.new_ones(ids.numel(), 1),
        group=None,
    )
    routed = out.view(-1, block.top_k, block.hidden_dim).sum(1)
    return block.shared_expert(hidden_states) + routed, router_logits


def _choices_of(block: Any) -> Choices:
    name: str = block._uniep_name
    if name not in _registered:  # it was in the process that pickled the model
        raise RuntimeError(
            f"experts_implementation is '{name}', which is not registered in this process; call "
            "uniep.transformers.register() before a model runs that was pickled, with its options"
        )
    return _registered[name]


@functools.cache
def _expert_parallel_class() -> type:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import EPImplementation

    class UniepEP(EPImplementation):
        """Dispatch, experts and combine of one MoE block in `uniep.moe`, over the EP group.

        Ranks of a TP group hold the same tokens: each of them sends its slice, as AllToAllEP does.
        Without ``max_tokens`` slices are as long as the first, so that ranks have the same number.
        """

        def __init__(
            self, choices: Choices, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
        ) -> None:
            self.facts = facts_of(experts)
            super().__init__(experts, ep_mesh, tp_mesh)
            self.choices = choices
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
            own = hidden_states.shape[0]
            missing = -(-tokens // self.tp_mesh.size()) - own
            if missing and self.choices.max_tokens is None:
                hidden_states, top_k_index, top_k_weights = (
                    nn.functional.pad(tensor, (0, 0, 0, missing), value=value)
                    for tensor, value in ((hidden_states, 0), (top_k_index, -1), (top_k_weights, 0))
                )
            group = self.ep_mesh.get_group()
            out = _run(
                self.choices,
                self.experts,
                self.facts,
                hidden_states,
                top_k_index,
                top_k_weights,
                group=group,
            )[:own]
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
