"""uniep as an implementation of expert parallelism of transformers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._choices import Choices
from .calls import run
from .experts import facts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["expert_parallel_class"]


@functools.cache
def expert_parallel_class() -> type:
    """The class; transformers before 5.23 has none that it could be of."""
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
            out = run(
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
