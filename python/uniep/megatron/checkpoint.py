"""Checkpoints of experts, with the entries and names of Megatron's own experts.

In distributed checkpoints every global expert has an entry of its own, so that they load with any
expert-parallel size, into SequentialMLP, TEGroupedMLP and uniep alike. Plain state dicts that those
have written are renamed as they are read.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

__all__ = ["Place", "rename_experts", "sharded_experts"]

Offsets = tuple[tuple[int, int, int], ...]


class Place(NamedTuple):
    """Where the local experts stand among all, and what Megatron says of a checkpoint's entries."""

    first_expert: int
    num_experts: int
    offsets: Offsets  # of what is above: pipeline stages, layers
    replica: int  # this rank among those that hold the same experts
    singleton: bool  # an expert has keys of its own, instead of an offset

    def key_of(self, key: str, name: str, expert: int) -> str:
        """The key of a local expert, where `key` is that of all: `...experts.NAME`."""
        if not self.singleton:
            return key
        return f"{key.removesuffix(name)}{self.first_expert + expert}.{name}"

    def offsets_of(self, expert: int) -> Offsets:
        """The offsets of a local expert."""
        if self.singleton:
            return self.offsets
        axis = len(self.offsets)
        return (*self.offsets, (axis, self.first_expert + expert, self.num_experts))


def sharded_experts(
    linear: str,
    kind: str,
    params: dict[str, Tensor],
    place: Place,
    prefix: str,
    *,
    halves: int,
) -> dict[str, Any]:
    """The entries of the weights or biases of fc1 or fc2, by the names of their parameters.

    Args:
        linear: ``"linear_fc1"`` or ``"linear_fc2"``.
        kind: ``"weight"`` or ``"bias"``.
        params: by name: one of all local experts, or one for each, in order.
        place: where the experts stand.
        prefix: of the experts' module, with its dot.
        halves: 2 where rows of gate and up are separate entries, else 1.
    """
    name = f"{linear}.{kind}"
    dims = 2 if kind == "weight" else 1  # of what an expert has
    entries: dict[str, Any] = {}
    for i, (own_name, param) in enumerate(params.items()):
        stacked = param.dim() > dims
        experts = range(len(param)) if stacked else range(i, i + 1)
        # A factory holds the parameter itself: by that, optimizers find where their states belong.
        entries[f"{prefix}{linear}.{own_name}"] = ShardedTensorFactory(
            f"{prefix}experts.{name}",
            param,
            partial(_split, name=name, experts=experts, place=place, halves=halves, dims=dims),
            partial(_join, halves=halves, stacked=stacked),
            (0, 0, place.replica),
        )
        if kind == "bias":
            continue
        for expert in experts:  # Megatron's linear layers have such a state, empty in bf16
            state = f"{linear}._extra_state"
            entries[f"{prefix}{state}{expert or ''}"] = make_sharded_object_for_checkpoint(
                None,
                place.key_of(f"{prefix}experts.{state}", state, expert),
                place.offsets_of(expert),
                (0, 0, place.replica),
            )
    return entries


@torch.no_grad()
def _split(
    key: str,
    tensor: Tensor,
    replica_id: Any,
    flattened_range: slice | None,
    *,
    name: str,
    experts: range,
    place: Place,
    halves: int,
    dims: int,
) -> list[Any]:
    if flattened_range is not None:
        raise ValueError(f"flattened_range of {key} is {flattened_range}; it must be None")
    entries: list[Any] = []
    weights = tensor.view(len(experts), *tensor.shape[-dims:])
    for expert, weight in zip(experts, weights, strict=True):
        offsets = place.offsets_of(expert)
        axis = len(offsets)
        for half, rows in enumerate(weight.chunk(halves)):
            own_key, split = place.key_of(key, name, expert), (axis, half, halves)
            if place.singleton and halves == 2:
                own_key, split = f"{own_key}_{'wv'[half]}", (axis, 0, 1)
            entries.append(
                ShardedTensor.from_rank_offsets(
                    own_key, rows, *offsets, split, replica_id=replica_id, prepend_axis_num=axis
                )
            )
    return entries


@torch.no_grad()
def _join(parts: list[Tensor], *, halves: int, stacked: bool) -> Tensor:
    rows = torch.cat(parts)
    return rows.view(len(parts) // halves, -1, *rows.shape[1:]) if stacked else rows


def rename_experts(
    state: dict[str, Any], prefix: str, linear: str, kind: str, names: list[str], num_experts: int
) -> None:
    """Gives weights or biases in a plain state dict the names and shapes of uniep's, in place.

    Taken are ``linear_fc1.weight`` [experts, ...], ``linear_fc1.weight{i}`` (TEGroupedMLP),
    ``local_experts.{i}.linear_fc1.weight`` (SequentialMLP), biases likewise, and ``weight1`` and
    ``weight2`` (GroupedMLP of megatron-core until 0.16).

    Args:
        state: of the whole model; changed.
        prefix: of the experts' module, with its dot.
        linear: ``"linear_fc1"`` or ``"linear_fc2"``.
        kind: ``"weight"`` or ``"bias"``.
        names: of the parameters that the module has.
        num_experts: local ones.
    """
    local = range(num_experts)
    for key in [key for key in state if key.startswith(f"{prefix}{linear}._extra_state")]:
        del state[key]
    for i in local:
        state.pop(f"{prefix}local_experts.{i}.{linear}._extra_state", None)
    legacy = f"{prefix}weight{1 if linear == 'linear_fc1' else 2}"
    stacked = f"{prefix}{linear}.{kind}"
    spellings = [
        [f"{prefix}{linear}.{kind}{i}" for i in local],
        [f"{prefix}local_experts.{i}.{linear}.{kind}" for i in local],
    ]
    if kind == "weight" and legacy in state:
        weights = state.pop(legacy)
        hidden = weights.shape[0] if linear == "linear_fc1" else weights.shape[1]
        shape = (num_experts, hidden, -1) if linear == "linear_fc1" else (num_experts, -1, hidden)
        found = list(weights.view(shape).transpose(1, 2))
    elif stacked in state:
        if names == [kind]:
            return  # name and form are uniep's already; FSDP2's DTensors are not taken apart
        found = list(state.pop(stacked))
    else:
        spelling = next((keys for keys in spellings if set(keys) <= set(state)), None)
        if spelling is None:
            return  # load_state_dict names what is missing
        found = [state.pop(key) for key in spelling]
    # One parameter of all experts, rather than that of a layer with a single expert.
    whole = [torch.stack(found)] if names == [kind] else found
    for name, weight in zip(names, whole, strict=True):
        state[f"{prefix}{linear}.{name}"] = weight
