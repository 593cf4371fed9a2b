"""Tensors of a layer by the names that Hugging Face has for them, and files of these."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ._tensor_files import INDEX, SINGLE, Source, reader_of, write_whole
from .group import gather_objects
from .layer import MoELayer

__all__ = ["FAMILIES", "Names", "hugging_face_tensors", "load_hugging_face", "save_hugging_face"]


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
        reader = reader_of(source, stack)
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
    whichever rank, all files are there. If it is killed, there is no index, and nothing is loaded.

    Args:
        folder: made if it is not there.
        layers: by their prefix in the model; at least one.
        family: one of :data:`FAMILIES`.
        others: tensors of the rest of the model, by name, which rank 0 saves. If some are DTensors,
            all ranks pass them, in the same order.

    Raises:
        ImportError: where the package safetensors is missing.
        OSError: on all ranks, where one of them cannot write a file; that one raises what kept it
            from that, such as of a tensor that cannot be saved. Also if the folder has a
            ``model.safetensors``, which transformers would read instead.
        ValueError: for an unknown family, layers that have what the family lacks, no layers, and
            others by the name of a layer's tensor.
    """
    from safetensors import SafetensorError
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
    for layer in layers.values():
        _let_go_of_gathered(layer)
    some = next(iter(layers.values()))
    file = f"model-{some.rank + 1:05}-of-{some.size:05}.safetensors"
    kept = _Kept()
    for name, tensor in others.items():
        whole = _whole(tensor)  # on all ranks, which may have parts
        if some.rank == 0:
            kept.put(name, whole)
    for prefix, layer in layers.items():
        own = _of_experts(layer, family, _whole)
        replicated = _replicated(layer, family, _whole)  # likewise
        if some.rank == 0:
            own.update(replicated)
        for name, tensor in own.items():
            kept.put(f"{prefix}.{name}", tensor)

    def make_folder() -> None:
        if some.rank > 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / SINGLE).exists():
            raise FileExistsError(
                f"{folder} has a {SINGLE}, which transformers would read instead of what is saved; "
                "a folder without one is accepted"
            )
        # An earlier save's index would name a mixture of its files and new ones, if this is killed.
        (folder / INDEX).unlink(missing_ok=True)

    def write_tensors() -> None:
        data = kept.tensors()
        try:
            save_file(data, str(folder / file), metadata={"format": "pt"})
        except SafetensorError as error:  # of its own kind for what the system refuses, too
            raise OSError(str(error)) from error
        # safetensors leaves files to their owner alone.
        (folder / file).chmod(folder.stat().st_mode & 0o666)

    _on_all_ranks(some, f"the folder {folder}", make_folder)
    _on_all_ranks(some, f"a file in {folder}", write_tensors)
    entries = (file, {name: tensor.nbytes for name, tensor in kept.tensors().items()})
    parts = gather_objects(entries, some.group) if some.size > 1 else [entries]

    def write_index() -> None:
        if some.rank > 0:
            return
        index = {
            "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in parts)},
            "weight_map": {name: name_of for name_of, sizes in parts for name in sizes},
        }
        write_whole(folder / INDEX, json.dumps(index, indent=2) + "\n")

    _on_all_ranks(some, f"the index of {folder}", write_index)


def _on_all_ranks(layer: MoELayer, what: str, write: Callable[[], None]) -> None:
    """Writes, and waits for all ranks of the layer; collective.

    Raises:
        OSError: on all of them, where one could not. Itself raises what it was kept from it by.
    """
    error: Exception | None = None
    try:
        write()
    except Exception as raised:  # of whatever kind: the others wait for this rank
        error = raised
    said = None if error is None else str(error) or type(error).__name__
    sentences = gather_objects(said, layer.group) if layer.size > 1 else [said]
    if error is not None:
        raise error
    for rank, sentence in enumerate(sentences):
        if sentence is not None:
            raise OSError(f"rank {rank} could not write {what}: {sentence}")


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


class _Kept:
    """Copies of tensors on the host, as files take them: contiguous, none a view of another.

    What goes wrong with one is raised by :meth:`tensors`: meanwhile ranks gather others together.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._error: Exception | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        try:
            copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
        except Exception as error:
            self._error = self._error or error
        else:
            self._tensors[name] = copy

    def tensors(self) -> dict[str, Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


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
