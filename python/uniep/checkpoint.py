"""Checkpoints: Hugging Face's names, and distributed ones that any number of ranks loads.

``state_dict()`` of a :class:`uniep.MoELayer` has this rank's experts. For one file a rank, or one
rank, that is enough.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._hugging_face import (
    FAMILIES,
    Names,
    hugging_face_tensors,
    load_hugging_face,
    save_hugging_face,
)
from .group import GroupLike, is_mesh_of_hosts, process_group_of
from .layer import MoELayer, expert_parameters

__all__ = [
    "FAMILIES",
    "Names",
    "distributed_optimizer_state_dict",
    "distributed_state_dict",
    "hugging_face_tensors",
    "load_hugging_face",
    "load_optimizer_state_dict",
    "save_hugging_face",
]


def distributed_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of `module` for ``torch.distributed.checkpoint``.

    Experts of every :class:`uniep.MoELayer` in it are DTensors over the layer's group, sharded by
    expert; all else is as in ``module.state_dict()``. Tensors share memory with the module, so
    loading into this dict loads the module, saved with any other number of ranks. Of what is a copy
    there, as rearranged weights behind ``uniep.transformers.use``, a warning says that
    ``module.load_state_dict`` has to follow::

        dcp.save(distributed_state_dict(model), checkpoint_id=folder)
        dcp.load(distributed_state_dict(model), checkpoint_id=folder)

    Raises:
        ValueError: for experts that are parametrized, or that ``module.state_dict()`` has only
            copies of, and where the process group of a layer has ended.
        NotImplementedError: for experts of several ranks that are DTensors already, as where FSDP2
            shards them, too.
    """
    # The parameters themselves tell experts apart. Names do not: wrappers change them, and a weight
    # may have several.
    state: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    experts = _experts(module)
    missing = experts.keys() - {id(value) for value in state.values()}
    if missing:
        names = sorted(experts[key][0] for key in missing)
        raise ValueError(
            f"state_dict() of the module lacks the parameters {', '.join(names)}, as where a hook "
            "puts copies in their place; one that has the parameters themselves is accepted"
        )
    _warn_of_copies(module, state)
    meshes: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) in experts:
            _, layer = experts[id(value)]
            state[name] = _sharded(value.detach(), layer.group, meshes)
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def _warn_of_copies(module: nn.Module, state: dict[str, Any]) -> None:
    """Where loading into `state` would not load the module."""
    own = {id(value) for value in state.values()}
    copies = [name for name, parameter in module.named_parameters() if id(parameter) not in own]
    if copies:
        warnings.warn(
            f"state_dict() of the module has copies of {len(copies)} parameters, {copies[0]} for "
            "one, which may be saved; what is loaded into them reaches the module by "
            "module.load_state_dict(...) of this dict",
            stacklevel=3,
        )


def distributed_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state of `optimizer`, by the names of parameters, for ``torch.distributed.checkpoint``.

    What it has of experts, such as moments, are DTensors as in :func:`distributed_state_dict`.
    PyTorch's own ``get_optimizer_state_dict`` has plain tensors there, of which a checkpoint keeps
    one rank's for all. Names are PyTorch's, without those of wrappers such as DDP. Of an optimizer
    that has not stepped the dict has zeros, to load into or to save. The optimizer itself stays as
    it is, as do gradients; one that loads such zeros begins anew::

        state = {"model": distributed_state_dict(model)}
        state["optimizer"] = distributed_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        load_optimizer_state_dict(model, optimizer, state["optimizer"])

    Args:
        module: has all parameters of the optimizer.
        optimizer: if it has weights of experts, its state of every weight has the shape of that, or
            is a number.

    Raises:
        ValueError: as :func:`distributed_state_dict`, where PyTorch's dict lacks state that the
            optimizer has of experts, and for state of another shape, such as factors of moments, or
            of all weights together, as LBFGS has it.
        NotImplementedError: as :func:`distributed_state_dict`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    _refuse_state_of_all(module, optimizer)
    with _without_gradients(optimizer) as is_new:
        found: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
        state = found["state"] = dict(found["state"])
        weights = _weights_by_name(module, optimizer, found)
        if is_new:
            optimizer.state.clear()
            for of in state.values():  # no longer the optimizer's
                of.update(_of_no_step(of))
    meshes: dict[int, Any] = {}
    for name, (weight, layer) in weights.items():
        if name not in state:  # one that has no gradients, or an optimizer without state
            continue
        is_split = {what: _is_of(weight, value, name, what) for what, value in state[name].items()}
        if layer is None:
            continue
        # In a dict of its own: what PyTorch gives is the optimizer's.
        state[name] = {
            what: _sharded(value, layer.group, meshes) if is_split[what] else value
            for what, value in state[name].items()
        }
    return found


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[bool]:
    """Within it PyTorch can make state of an optimizer that has none; yields whether that is so.

    PyTorch makes it by a step with gradients of zeros and a learning rate of 0, and makes none
    where there are gradients, as a plain SGD has no state either. So they are set aside. If
    anything raises, the optimizer is without state again, and has its learning rates.
    """
    # Who looks at the state of a weight leaves an empty dict there.
    is_new = not any(not isinstance(of, dict) or of for of in optimizer.state.values())
    if not is_new:
        yield False
        return
    optimizer.state.clear()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    gradients = [weight.grad for weight in weights]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for weight in weights:
            weight.grad = None
        yield True
    except BaseException:
        optimizer.state.clear()
        for group, rate in rates:
            group["lr"] = rate
        raise
    finally:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient


def _of_no_step(state: dict[str, Any]) -> dict[str, Any]:
    """Zeros in place of what a step has left, such as its count and the decay of weights.

    They are -0.0, by which :func:`_is_of_no_step` knows them: what optimizers begin with is not
    always zeros, and a momentum of zeros is damped where the first is not.
    """
    found = dict(state)
    for what, value in state.items():
        if type(value) in (Tensor, DTensor):
            found[what] = torch.full_like(value, -0.0)
        elif what == "step" and isinstance(value, int | float):
            found[what] = type(value)(0)
    return found


def _is_of_no_step(state: dict[str, Any]) -> bool:
    tensors = [v.to_local() if type(v) is DTensor else v for v in state.values()]
    tensors = [v for v in tensors if type(v) is Tensor and v.is_floating_point() and v.numel() > 0]
    # The count is first: of a state after steps no more is read.
    tensors.sort(key=Tensor.numel)
    return bool(tensors) and all(bool(((v == 0) & v.signbit()).all()) for v in tensors)


def _is_of(weight: Tensor, value: Any, name: str, what: str) -> bool:
    """Whether an optimizer's state is split over ranks as the weight is; else all have the same."""
    if not isinstance(value, Tensor) or value.numel() == 1:
        return False
    if value.shape != weight.shape:
        raise ValueError(
            f"the optimizer's {what} of {name} has shape {list(value.shape)}, and the weight "
            f"{list(weight.shape)}, so how ranks share it is not known; state of the weight's "
            "shape is accepted, and numbers"
        )
    return True


def load_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Gives `optimizer` what :func:`distributed_optimizer_state_dict` has, once it is loaded.

    Gradients stay as they are.

    Raises:
        ValueError: as :func:`distributed_optimizer_state_dict`.
        NotImplementedError: as :func:`distributed_state_dict`.
    """
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    own = dict(state["state"])
    _refuse_state_of_all(module, optimizer)
    with _without_gradients(optimizer):
        # The groups in `state` may have been saved in another order.
        found = dict(get_optimizer_state_dict(module, optimizer))
        for name, (_, layer) in _weights_by_name(module, optimizer, found).items():
            if layer is None or name not in own:
                continue
            own[name] = {
                what: value.to_local() if isinstance(value, DTensor) else value
                for what, value in own[name].items()
            }
        set_optimizer_state_dict(module, optimizer, {**state, "state": own})
    # Without state the next step is a first one.
    for weight in [weight for weight, of in optimizer.state.items() if _is_of_no_step(of)]:
        del optimizer.state[weight]


def _experts(module: nn.Module) -> dict[int, tuple[str, MoELayer]]:
    """Name and layer of weights of which ranks have different ones, by ``id`` of the weight."""
    found = {}
    for prefix, layer in module.named_modules():
        if not isinstance(layer, MoELayer) or layer.size == 1:
            continue
        for name, weight in expert_parameters(layer, prefix).items():
            if isinstance(weight, DTensor):
                raise NotImplementedError(
                    f"{name} is a DTensor, as where FSDP2 shards experts that ranks share already; "
                    "experts that are plain tensors are accepted: pass them to fully_shard as "
                    "ignored_params"
                )
            found[id(weight)] = name, layer
    return found


def _refuse_state_of_all(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for one that sees the weights, of which ranks have others, as one."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    experts = _experts(module)
    if any(id(weight) in experts for group in optimizer.param_groups for weight in group["params"]):
        raise ValueError(
            "the optimizer is an LBFGS, whose state is of all weights together, and ranks have "
            "different experts; one that has state of each weight is accepted, as AdamW is"
        )


def _weights_by_name(
    module: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, Any]
) -> dict[str, tuple[Tensor, MoELayer | None]]:
    """The optimizer's weights by their names in `found`, which is PyTorch's; {} without experts.

    With the layer that experts are of. Which names of wrappers it leaves out is PyTorch's to know.
    So names come from its groups, where they stand as the parameters do in the optimizer's.

    Raises:
        ValueError: where that is not so, or `found` lacks the state of an expert.
    """
    experts = _experts(module)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    names = [name for group in found["param_groups"] for name in group["params"]]
    if experts and len(names) != len(weights):
        raise ValueError(
            f"the optimizer has {len(weights)} parameters and its state dict names {len(names)}, "
            "as where a wrapper makes one of several; an optimizer of the module's own parameters "
            "is accepted"
        )
    if not any(id(weight) in experts for weight in weights):
        return {}
    named: dict[str, tuple[Tensor, MoELayer | None]] = {}
    for name, weight in zip(names, weights, strict=True):
        if id(weight) not in experts:
            named[name] = weight, None
            continue
        if optimizer.state.get(weight) and name not in found["state"]:
            raise ValueError(
                f"the optimizer has state of {name} that its state dict lacks, as where a hook "
                "takes it out; one that has the state of all experts is accepted"
            )
        named[name] = weight, experts[id(weight)][1]
    return named


def _sharded(local: Tensor, group: GroupLike, meshes: dict[int, Any]) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    if _has_ended(group):
        raise ValueError(
            "the process group of the layer has ended; save and load before it is destroyed"
        )
    if is_mesh_of_hosts(group):
        return DTensor.from_local(local, group, [Shard(0), Shard(0)], run_check=False)
    process_group = process_group_of(group)
    assert process_group is not None  # it would have ended
    key = id(process_group)
    if key not in meshes:
        meshes[key] = DeviceMesh.from_group(process_group, local.device.type)
    return DTensor.from_local(local, meshes[key], [Shard(0)], run_check=False)


def _has_ended(group: GroupLike) -> bool:
    """Whether PyTorch has destroyed what the layer may still hold."""
    if is_mesh_of_hosts(group):  # which knows its groups by name
        return not dist.is_initialized()
    process_group = process_group_of(group)
    try:
        return process_group is None or dist.get_rank(process_group) < 0
    except ValueError:  # an unknown group, or no default group at all
        return True
