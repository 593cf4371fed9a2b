"""Blocks of transformers' models whose forward is uniep's.

Such a block is one of a subclass that has that forward: isinstance holds, copies and pickles keep
it, and so does what surrounds the block, such as hooks of accelerate.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["become", "check_forward", "with_forward"]


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
