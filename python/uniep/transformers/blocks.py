"""Blocks of transformers' models whose forward is uniep's.

Such a block is one of a subclass that has that forward: isinstance holds, copies and pickles keep
it, and so does what surrounds the block, such as hooks of accelerate.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

__all__ = ["become", "check_forward", "check_hooks", "with_forward"]


# A forward among the block's own attributes is called instead of the class'. accelerate's hooks
# make one, which calls what they found, kept as _old_forward; taken off, they leave that behind.


def check_forward(block: Any) -> None:
    """Looks whether :func:`become` can change what the block's forward does.

    Raises:
        NotImplementedError: the sentence that says what is in its way.
    """
    kept = vars(block)
    if "forward" not in kept:
        return
    found, own_class = kept[_kept_in(block)], type(block)
    is_bound = isinstance(found, types.MethodType) and found.__self__ is block
    if is_bound and found.__func__ is own_class.forward:
        return
    raise NotImplementedError(
        f"forward of this {own_class.__name__} is an attribute of the module, "
        f"{getattr(found, '__qualname__', type(found).__name__)}, which would run instead of "
        "uniep's or of the class' own; accepted is the forward of the class, also under a hook of "
        "accelerate (add_hook_to_module): call use before whatever sets another"
    )


def become(block: Any, own_class: Any) -> None:
    """Makes the block one of that class, whose forward then runs, under hooks of accelerate too.

    Args:
        block: that :func:`check_forward` accepts.
        own_class: with the same attributes.
    """
    block.__class__ = own_class
    if "forward" in vars(block):
        setattr(block, _kept_in(block), types.MethodType(own_class.forward, block))


def _kept_in(block: Any) -> str:
    return "_old_forward" if "_old_forward" in vars(block) else "forward"


# Hooks of modules that the block's own forward calls, and uniep's does not.

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Whose hooks gather weights, move them or choose adapters. Weights that are not there to be read
# have errors of their own, and DeepSpeed gathers those that are read outside of their module.
_KNOWN = (
    "accelerate.",
    "deepspeed.",
    "peft.",
    "torch.distributed._composable.",
    "torch.distributed.fsdp.",
    "uniep.",
)


def check_hooks(block: nn.Module, called: Collection[str], name: str = "", more: str = "") -> None:
    """Looks for hooks that would never run. While torch.compile traces, it does not look.

    Args:
        block: whose forward is to be uniep's, or is.
        called: the modules in it that uniep's forward calls.
        name: of the block in its model; empty: the error has its class instead.
        more: what else the error accepts.

    Raises:
        NotImplementedError: the sentence that names the first such hook and its module.
    """
    if torch.compiler.is_compiling():
        return
    for child_name, child in block.named_children():
        if child_name in called:
            continue
        for module in child.modules():
            for kind in _HOOKS:
                if hooks := getattr(module, kind):
                    _refuse_unknown(block, module, hooks.values(), name, more)


def _refuse_unknown(
    block: nn.Module, module: nn.Module, hooks: Collection[Any], name: str, more: str
) -> None:
    for hook in hooks:
        found = hook
        while hasattr(found, "func"):  # of functools.partial
            found = found.func
        origin = getattr(found, "__module__", "")
        if f"{origin}.".startswith(_KNOWN):
            continue
        own_name = next(own_name for own_name, own in block.named_modules() if own is module)
        own_class = type(block).__name__
        where = f"{name}.{own_name}" if name else f"{own_name} of this {own_class}"
        raise NotImplementedError(
            f"{where} has a hook, {origin}.{getattr(found, '__qualname__', type(found).__name__)}, "
            f"which would never run, since uniep's forward of {own_class} does not call that "
            f"module; accepted are hooks of the block, or of modules that it still calls{more}"
        )


def with_forward(
    maker: Callable[[Any], Any], block_class: Any, forward: Callable[..., Any], mark: str
) -> Any:
    """A subclass with that forward.

    Args:
        maker: a function of a module, which returns the same class for the same `block_class`.
        block_class: of the model's own.
        forward: of its blocks.
        mark: an attribute of the class by which such blocks are known.
    """
    own = {"forward": forward, mark: True, "_uniep_made": (maker, block_class)}
    return type(block_class.__name__, (block_class,), {**own, "__reduce_ex__": _reduce})


def _reduce(block: Any, protocol: Any) -> Any:
    """For pickle, which finds classes by name, and not those that are made while a program runs."""
    found = object.__reduce_ex__(block, protocol)
    made = vars(type(block)).get("_uniep_made")
    if made is None:  # one that FSDP2 has made of ours, which is FSDP2's to copy or to refuse
        return found
    return (_empty, made, *found[2:])


def _empty(maker: Callable[[Any], Any], block_class: Any) -> Any:
    own_class = maker(block_class)
    return own_class.__new__(own_class)
