"""The experts of a whole model: which uniep can compute, and that it does."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._shared_experts import SharedChoice, check_choice
from . import shared
from .blocks import check_forward, check_hooks
from .experts import (
    Packing,
    adapted_by,
    check_packing,
    facts_of,
    is_quantised,
    is_to_be_packed,
    pack,
)
from .llama4 import CALLED, experts_of, is_block, runs_uniep, use_in_block
from .registration import is_registered, register

__all__ = ["check", "use"]


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
            shared.check_block(block, block_name)
        if fused != shared.is_fused(block):
            check_forward(block)
    modules: dict[str, Any] = {own_name: model.get_submodule(own_name) for own_name in names}
    models = _models_around(model, [n for n, module in modules.items() if not is_block(module)])
    packing = _to_be_packed(model, modules)
    check_packing(model, packing)
    if not is_registered(name):
        register(name)
    for own_model in models:
        own_model.set_experts_implementation(name)
    for own_name, module in modules.items():
        if is_block(module):
            use_in_block(module, name)
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
        (shared.fuse if fused else shared.separate)(block)
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
        in_block = is_block(module)
        experts = experts_of(module) if in_block else module
        facts = facts_of(experts)
        # Adapters know the weights as they lie.
        if id(experts) not in adapted and is_to_be_packed(experts, facts):
            packing[f"{name}.experts".lstrip(".") if in_block else name] = (experts, facts)
    return packing


def _blocks_with_shared(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """By name: what holds these modules of experts, or is one of them, and has shared ones too."""
    blocks = dict(_block_of(model, name) for name in names)
    return {name: block for name, block in blocks.items() if shared.names_of_shared(block)}


def _block_of(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """Of a module of experts, around which there may be layers of peft; itself, if it is one."""
    found = model.get_submodule(name)
    if is_block(found):
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
        elif is_block(module):
            facts_of(experts_of(module))
            if not runs_uniep(module):
                check_forward(module)
            check_hooks(module, CALLED, name)
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no experts with a choice of implementation; accepted are "
            "models whose experts are decorated with transformers' use_experts_implementation, and "
            "Llama-4"
        )
    return names
