"""Checkpoints: Hugging Face's names, and distributed ones that any number of ranks loads.

``state_dict()`` of a :class:`uniep.MoELayer` has this rank's experts. For one file a rank, or one
rank, that is enough.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .group import GroupLike, gather_objects, is_mesh_of_hosts, process_group_of
from .layer import MoELayer

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


@dataclass(frozen=True)
class Names:
    """How the tensors of an MoE layer are named, behind the layer's prefix.

    Attributes:
        prefix: that of layer ``{layer}`` of a model.
        gate: of expert ``{expert}``, as up and down.
        up: [I, H].
        down: [H, I].
        router: [E, H].
        bias: of the router, [E]; None: there is none.
        shared: what ``gate_proj.weight`` and so on of the shared experts stand behind, or None.
    """

    prefix: str = "model.layers.{layer}.mlp"
    gate: str = "experts.{expert}.gate_proj.weight"
    up: str = "experts.{expert}.up_proj.weight"
    down: str = "experts.{expert}.down_proj.weight"
    router: str = "gate.weight"
    bias: str | None = None
    shared: str | None = None


#: The families of models whose names are known.
FAMILIES: dict[str, Names] = {
    "mixtral": Names(
        prefix="model.layers.{layer}.block_sparse_moe",
        gate="experts.{expert}.w1.weight",
        up="experts.{expert}.w3.weight",
        down="experts.{expert}.w2.weight",
    ),
    "qwen3_moe": Names(),
    "olmoe": Names(),
    "deepseek_v3": Names(bias="gate.e_score_correction_bias", shared="shared_experts"),
}

#: Tensors by name, a safetensors file, or a folder of these with or without their index.
Source: TypeAlias = "Mapping[str, Tensor] | str | Path"

_INDEX = "model.safetensors.index.json"

# Types that are loaded, by their names in files.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_Take: TypeAlias = Callable[[Tensor], Tensor]


def hugging_face_tensors(layer: MoELayer, family: str, prefix: str) -> dict[str, Tensor]:
    """What `layer` has on this rank, by the names of Hugging Face's checkpoints.

    Router and shared experts are on every rank, experts on the rank that holds them, under their
    number among all. Tensors share memory with the layer. Of DTensors they are DTensors, which may
    be copies.

    Args:
        layer: the layer.
        family: one of :data:`FAMILIES`.
        prefix: where the layer stands in the model, such as ``"model.layers.3.mlp"``.

    Raises:
        ValueError: for an unknown family, or a layer that has what the family lacks.
    """
    tensors = _of_experts(layer, family, Tensor.detach)
    tensors.update(_replicated(layer, family, Tensor.detach))
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _of_experts(layer: MoELayer, family: str, take: _Take) -> dict[str, Tensor]:
    """What this rank alone has, by name without prefix; parts of what `take` gives for weights."""
    names = _names(family)
    if layer.arithmetic.activation != "swiglu" or layer.arithmetic.bias:
        raise ValueError(
            f"experts of {family} are SwiGLU without biases, unlike this layer's "
            f"('{layer.arithmetic.activation}', bias={layer.arithmetic.bias}); make the layer as "
            "the family's are"
        )
    tensors = {}
    w1, w2 = take(layer.w1), take(layer.w2)
    for expert in range(w1.shape[0]):
        number = layer.first_expert + expert
        gate, up = w1[expert].chunk(2)
        tensors[names.gate.format(expert=number)] = gate
        tensors[names.up.format(expert=number)] = up
        tensors[names.down.format(expert=number)] = w2[expert]
    return tensors


@torch.no_grad()
def load_hugging_face(layer: MoELayer, source: Source, family: str, prefix: str) -> None:
    """Loads this rank's experts, router and shared experts from Hugging Face's names.

    Of DTensors, such as a router that FSDP2 shards, every rank reads the whole and keeps its part.
    What FSDP2 has gathered, as between a forward and its backward, it lets go of first, as in
    ``load_state_dict``. Names, shapes and types are checked before anything is written; those of a
    mapping that is no dict, and may read what it gives, tensor by tensor.

    Args:
        layer: what is loaded into; values are cast to its dtypes.
        source: tensors by name, a safetensors file, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``. Of files only what is needed is read.
        family: one of :data:`FAMILIES`.
        prefix: where the layer stands in the model.

    Raises:
        KeyError: for a tensor that is not there.
        OSError: for a file that is not there.
        ValueError: for a tensor of another shape, one in a quantised type, a file that is no
            safetensors file or no index, an unknown family, and a layer that has what the family
            lacks, or of which a tensor is on the meta device.
    """
    own = {"w1": layer.w1, "w2": layer.w2, **dict(layer.named_parameters())}
    for what, weight in (*own.items(), *layer.named_buffers()):
        if weight.is_meta:
            raise ValueError(
                f"{what} of the layer is on 'meta', where nothing can be loaded; a layer with "
                "memory for all that it has is accepted, by layer.to_empty(device=...)"
            )
    _let_go_of_gathered(layer)
    wholes: list[tuple[DTensor, Tensor]] = []

    def take(weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight.detach()
        whole = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        wholes.append((weight, whole))
        return whole

    tensors = {**_of_experts(layer, family, take), **_replicated(layer, family, take)}
    named = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    with ExitStack() as stack:
        reader = _reader(source, stack)
        for name, tensor in named.items():
            if found := reader.form(name):
                _check_form(name, tensor, *found)
        for name, tensor in named.items():
            value = reader.read(name)
            _check_form(name, tensor, value.shape, value.dtype)
            tensor.copy_(value)
    for weight, whole in wholes:
        parts = (weight.device_mesh, weight.placements)
        weight.copy_(distribute_tensor(whole, *parts, src_data_rank=None))  # nothing is sent


def _check_form(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype | str) -> None:
    """Whether what is found by `name` can be loaded into `tensor`."""
    if list(shape) != list(tensor.shape):
        raise ValueError(f"{name} has shape {list(shape)}; the layer's is {list(tensor.shape)}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {dtype}; weights must be float32, bfloat16 or float16")


def save_hugging_face(
    folder: str | Path,
    layers: Mapping[str, MoELayer],
    family: str,
    *,
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves layers by Hugging Face's names: a safetensors file of each rank, and their index.

    Collective over the group of the layers, which is the same for all, and over the meshes of
    DTensors, such as a router that FSDP2 shards: these are saved whole. Of data-parallel replicas
    one saves, or each to a folder of its own: they would write the same files. Once it returns, on
    whichever rank, all files are there.

    Args:
        folder: made if it is not there.
        layers: by their prefix in the model; at least one.
        family: one of :data:`FAMILIES`.
        others: tensors of the rest of the model, by name, which rank 0 saves. If some are DTensors,
            all ranks pass them, in the same order.

    Raises:
        ImportError: where the package safetensors is missing.
        OSError: for a file that cannot be written; where it is the index, on all ranks.
        ValueError: for an unknown family, layers that have what the family lacks, no layers, and
            others by the name of a layer's tensor.
    """
    from safetensors.torch import save_file

    if not layers:
        raise ValueError("layers is empty; one layer or more by their prefixes are accepted")
    others = others or {}
    for prefix, layer in layers.items() if others else ():
        for name in _names_of_all(layer, family):
            if f"{prefix}.{name}" in others:
                raise ValueError(
                    f"others has {prefix}.{name}, which layer {prefix} saves by itself; tensors of "
                    "the rest of the model are accepted"
                )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for layer in layers.values():
        _let_go_of_gathered(layer)
    some = next(iter(layers.values()))
    file = f"model-{some.rank + 1:05}-of-{some.size:05}.safetensors"
    data: dict[str, Tensor] = {}
    for name, tensor in others.items():
        whole = _whole(tensor)  # on all ranks, which may have parts
        if some.rank == 0:
            data[name] = _on_host(whole)
    for prefix, layer in layers.items():
        own = _of_experts(layer, family, _whole)
        replicated = _replicated(layer, family, _whole)  # likewise
        if some.rank == 0:
            own.update(replicated)
        data.update({f"{prefix}.{name}": _on_host(tensor) for name, tensor in own.items()})
    save_file(data, str(folder / file), metadata={"format": "pt"})

    entries = (file, {name: tensor.nbytes for name, tensor in data.items()})
    parts = gather_objects(entries, some.group) if some.size > 1 else [entries]
    error: OSError | None = None
    if some.rank == 0:
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in parts)},
            "weight_map": {name: name_of for name_of, sizes in parts for name in sizes},
        }
        try:
            _write_whole(folder / _INDEX, json.dumps(index, indent=2) + "\n")
        except OSError as raised:
            error = raised
    failed = None if error is None else str(error)
    # All wait here until the index is there, and hear if it is not.
    said = gather_objects(failed, some.group) if some.size > 1 else [None]
    if error is not None:
        raise error
    if said[0] is not None:
        raise OSError(f"rank 0 could not write the index of {folder}: {said[0]}")


def _write_whole(file: Path, text: str) -> None:
    """Who reads the file finds all of it, or what was there before."""
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text)
        os.replace(part, file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _names_of_all(layer: MoELayer, family: str) -> set[str]:
    """Names, without prefix, of what the layer has on all of its ranks."""
    names = _names(family)
    found = {names.router} if names.bias is None else {names.router, names.bias}
    for name in (names.gate, names.up, names.down):
        found.update(name.format(expert=expert) for expert in range(layer.num_experts))
    if names.shared is not None:
        found.update(f"{names.shared}.{name}.weight" for name in _PROJECTIONS)
    return found


def _let_go_of_gathered(layer: MoELayer) -> None:
    """What FSDP2 has gathered is a copy, maybe in another dtype: what is written to it is lost.

    Hooks of ``state_dict`` put the sharded parameters back, whichever module FSDP2 was called for.
    """
    layer.state_dict(keep_vars=True)


def _whole(weight: Tensor) -> Tensor:
    """Of a DTensor that of all ranks; collective over its mesh."""
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _on_host(tensor: Tensor) -> Tensor:
    # Views of one tensor, such as gate and up, are saved as tensors of their own.
    return tensor.cpu().clone()


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
        optimizer: its state of an expert weight has the shape of that, or is a number.

    Raises:
        ValueError: as :func:`distributed_state_dict`, where PyTorch's dict lacks state that the
            optimizer has of experts, and for state of another shape, such as factors of moments.
        NotImplementedError: as :func:`distributed_state_dict`.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _without_gradients(optimizer) as is_new:
        found: dict[str, Any] = dict(get_optimizer_state_dict(module, optimizer))
        state = found["state"] = dict(found["state"])
        experts = _experts_of_optimizer(module, optimizer, found)
        if is_new:
            optimizer.state.clear()
            for of in state.values():  # no longer the optimizer's
                of.update(_of_no_step(of))
    meshes: dict[int, Any] = {}
    for name, (weight, layer) in experts.items():
        if name not in state:  # one that has no gradients, or an optimizer without state
            continue
        # In a dict of its own: what PyTorch gives is the optimizer's.
        state[name] = {
            what: _sharded(value, layer.group, meshes)
            if _is_of(weight, value, name, what)
            else value
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
    with _without_gradients(optimizer):
        # The groups in `state` may have been saved in another order.
        found = dict(get_optimizer_state_dict(module, optimizer))
        for name in own.keys() & _experts_of_optimizer(module, optimizer, found).keys():
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
        own = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
        for key in ("w1", "w2", "b1", "b2"):
            name = f"{prefix}.{key}" if prefix else key
            weight = own.get(key)
            if isinstance(weight, DTensor):
                raise NotImplementedError(
                    f"{name} is a DTensor, as where FSDP2 shards experts that ranks share already; "
                    "experts that are plain tensors are accepted: pass them to fully_shard as "
                    "ignored_params"
                )
            if weight is not None:
                found[id(weight)] = name, layer
            elif getattr(layer, key) is not None:
                raise ValueError(
                    f"{name} is no parameter of its layer, as where it is parametrized; a plain "
                    "parameter is accepted: remove the parametrization before you save or load"
                )
    return found


def _experts_of_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, Any]
) -> dict[str, tuple[Tensor, MoELayer]]:
    """Experts' weights that are the optimizer's, by their names in `found`, which is PyTorch's.

    Which names of wrappers it leaves out is PyTorch's to know. So names come from its groups, where
    they stand as the parameters do in the optimizer's.

    Raises:
        ValueError: where that is not so, or `found` lacks the state of one.
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
    named = {}
    for name, weight in zip(names, weights, strict=False):
        if id(weight) not in experts:
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


def _names(family: str) -> Names:
    if family not in FAMILIES:
        raise ValueError(f"family is '{family}'; it must be one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[family]


def _replicated(layer: MoELayer, family: str, take: _Take) -> dict[str, Tensor]:
    """What every rank has, by name without prefix; parts of what `take` gives for weights."""
    names = _names(family)
    tensors = {names.router: take(layer.router.weight)}
    shared = _shared(layer, take)
    for has, name, what in (
        (layer.router.bias is not None, names.bias, "a bias of its router"),
        (shared is not None, names.shared, "shared experts"),
        (layer.router.logit_bias is not None, None, "a bias of its router's logits"),
        (layer.zero_experts > 0, None, "zero experts"),
    ):
        if has != (name is not None):
            raise ValueError(
                f"layers of {family} {'never' if name is None else 'always'} have {what}, unlike "
                "this one; make the layer as the family's are"
            )
    if names.bias is not None and layer.router.bias is not None:
        tensors[names.bias] = take(layer.router.bias)
    if names.shared is not None and shared is not None:
        for name, tensor in zip(_PROJECTIONS, shared, strict=True):
            tensors[f"{names.shared}.{name}.weight"] = tensor
    return tensors


def _shared(layer: MoELayer, take: _Take) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gate, up and down of the shared experts, or None."""
    if layer.shared is not None:
        gate, up = take(layer.shared.gate_up.weight).chunk(2)
        return gate, up, take(layer.shared.down.weight)
    if layer.shared_w1 is None or layer.shared_w2 is None:
        return None
    if layer.shared_w1.shape[0] > 1 or layer.shared_gate is not None:
        raise ValueError(
            f"the layer has {layer.shared_w1.shape[0]} shared experts"
            f"{'' if layer.shared_gate is None else ' with a gate'} in its pass, and Hugging "
            "Face's families one tensor of all without a gate; one without a gate is accepted, or "
            "shared_intermediate"
        )
    gate, up = take(layer.shared_w1)[0].chunk(2)
    return gate, up, take(layer.shared_w2)[0]


@dataclass(frozen=True)
class _Reader:
    """What reads tensors by name.

    Attributes:
        form: shape and type, or None where only reading tells.
        read: the tensor.
    """

    form: Callable[[str], tuple[Sequence[int], torch.dtype | str] | None]
    read: Callable[[str], Tensor]


def _reader(source: Source, stack: ExitStack) -> _Reader:
    """Of what `source` has; files are open as long as `stack`."""
    if isinstance(source, Mapping):
        return _reader_of_mapping(source)
    path = Path(source)
    files: dict[str, Any] = {}

    def file_of(name: str) -> Any:
        if name not in files:
            files[name] = _opened(name, stack)
        return files[name]

    if path.is_dir() and (path / _INDEX).exists():
        weights = {name: str(path / file) for name, file in _weight_map(path / _INDEX).items()}
    else:
        single = str(path / "model.safetensors" if path.is_dir() else path)
        weights = dict.fromkeys(file_of(single).keys(), single)

    keys: dict[str, set[str]] = {}

    def file_with(name: str) -> Any:
        if name not in weights:
            raise KeyError(f"{name} is not in {path}, which has {len(weights)} tensors")
        file = weights[name]
        if file not in keys:
            keys[file] = set(file_of(file).keys())
        if name not in keys[file]:
            raise KeyError(f"{name} is not in {file}, where {path / _INDEX} has it")
        return file_of(file)

    def form(name: str) -> tuple[Sequence[int], torch.dtype | str]:
        part = file_with(name).get_slice(name)
        return part.get_shape(), _DTYPES.get(part.get_dtype(), part.get_dtype())

    def read(name: str) -> Tensor:
        tensor: Tensor = file_with(name).get_tensor(name)
        return tensor

    return _Reader(form, read)


def _reader_of_mapping(source: Mapping[str, Tensor]) -> _Reader:
    def check(name: str) -> None:
        if name not in source:
            raise KeyError(f"{name} is not among the {len(source)} tensors of the source")

    def form(name: str) -> tuple[Sequence[int], torch.dtype | str] | None:
        check(name)
        # Others may read a file for each.
        return (source[name].shape, source[name].dtype) if isinstance(source, dict) else None

    def read(name: str) -> Tensor:
        check(name)
        return source[name]

    return _Reader(form, read)


def _opened(file: str, stack: ExitStack) -> Any:
    """A safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except SafetensorError as error:
        raise ValueError(
            f"{file} is no whole safetensors file ({error}); one as save_file of safetensors "
            "writes is accepted"
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    """Files by the names of the tensors that they have."""
    try:
        found = json.loads(index.read_text())
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(
            f"{index} is no JSON ({error}); an index as Hugging Face writes is accepted"
        ) from error
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(
            f"{index} has no weight_map of tensors' names to files; an index as Hugging Face "
            "writes is accepted"
        )
    return files
