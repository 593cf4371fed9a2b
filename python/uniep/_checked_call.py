"""A call of uniep.moe that has been checked: its passes, what crosses hosts, what runs beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._between_hosts.crossing import Crossing
from ._between_hosts.passes import from_all_hosts, to_all_hosts
from ._forms import Experts
from ._moe_in_pages import moe_in_pages
from ._moe_in_tensors import Counts, Figures, moe_in_tensors
from ._shared_apart import alone, for_both, learning_with, slots_of
from .deferred import DeferredWeights
from .offload import saving_elsewhere
from .workspace import Workspace

__all__ = ["CheckedCall"]


class CheckedCall(NamedTuple):
    """What a call is given, but for its tokens and their slots.

    Attributes:
        workspace: whose layer it is.
        weights: of its experts.
        main: what their gradients are added to; None: they are new.
        shared_probs: fp32 [T, S]; None: each is 1.
        exact_rows, exact_hosts, schedule, deferred: as :func:`uniep.moe` takes them.
        fault: int64 [2] of zeros, which becomes what ``Workspace.overflow`` is told of this call
            alone; None: nobody asks.
    """

    workspace: Workspace
    weights: Experts
    main: Experts | None
    shared_probs: Tensor | None
    exact_rows: bool
    exact_hosts: bool
    schedule: str | None
    deferred: DeferredWeights | None
    fault: Tensor | None = None

    def run(self, tokens: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """The output [T, H] of bf16 [T, H], int32 [T, K] and fp32 [T, K]; differentiable."""
        beside = self.workspace.of_shared
        if beside is None:
            return self._run_routed(tokens, ids, probs)
        main = self.main
        main_of_shared = None if main is None or main.shared_w1 is None else alone(main)
        # Not by _replace, as in Experts.routed.
        routed = CheckedCall(
            self.workspace,
            self.weights.routed(),
            None if main is None else main.routed(),
            shared_probs=None,
            exact_rows=self.exact_rows,
            exact_hosts=self.exact_hosts,
            schedule=self.schedule,
            deferred=self.deferred,
            fault=self.fault,
        )
        shared = CheckedCall(
            beside,
            alone(self.weights),
            main_of_shared,
            shared_probs=None,
            exact_rows=False,
            exact_hosts=False,
            schedule=None,
            # Else autograd has gradients in backward, for what averages them over ranks.
            deferred=None if main_of_shared is None else self.deferred,
        )
        learner = self._learner(tokens, probs)
        if learner is not None:
            probs = learning_with(learner, probs)
        tokens, mine = for_both(tokens)
        return routed._run_routed(
            tokens, ids, probs, lambda: shared._sums_of_all(mine, self.shared_probs, learner)
        )

    def _learner(self, tokens: Tensor, probs: Tensor) -> Tensor | None:
        """Whose backward adds to all main gradients, as that of one pass would; or None.

        Autograd may know of no other tensor of the call that needs a gradient.
        """
        if self.main is None or not torch.is_grad_enabled():
            return None
        of_call = (tokens, probs, self.shared_probs, *self.weights.flat())
        return next((t for t in of_call if t is not None and t.requires_grad), None)

    def _sums_of_all(self, tokens: Tensor, probs: Tensor | None, learner: Tensor | None) -> Tensor:
        """[T, H], where every token goes to every expert: of :func:`slots_of`."""
        workspace = self.workspace
        # More tokens than there is room for are refused with the routed ones', on all ranks.
        missing = max(tokens.shape[0] - workspace.max_tokens, 0)
        if missing:
            tokens = tokens[: workspace.max_tokens]
        ids, probs = slots_of(self.weights.w1[0], probs, tokens.shape[0])
        if learner is not None:
            probs = learning_with(learner, probs)
        sums = self._fused(tokens, ids, probs, workspace.flag, workspace.overflow)
        return torch.nn.functional.pad(sums, (0, 0, 0, missing)) if missing else sums

    def _run_routed(
        self,
        tokens: Tensor,
        ids: Tensor,
        probs: Tensor,
        more: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """As :meth:`run`, with what `more` computes added, while tokens cross if they do."""
        workspace = self.workspace
        over = workspace.over_hosts
        overflow = workspace.overflow if self.fault is None else self.fault
        if over is None:
            added = None if more is None else more()
            out = self._fused(tokens, ids, probs, workspace.flag, overflow)
            self._tell_workspace()
            if added is None:
                return out
            if self.fault is not None:  # backward then has nothing for these
                added = torch.where(self.fault[0] == 0, added, 0)
            return out + added
        crossing = Crossing.of(
            over.mesh,
            over.all_rows,
            in_waves=workspace.in_waves,
            in_forward=not self.exact_rows,
            in_backward=not workspace.backward_rows,
            exact_hosts=self.exact_hosts,
        )
        own = tokens.shape[0]
        learns = any(weight.requires_grad for weight in self.weights.flat())
        tokens, ids, probs, back = to_all_hosts(over, tokens, ids, probs, crossing, learns=learns)
        flag = workspace.flag
        if over.faults is not None:
            # Of this call alone: the fault that this host finds, which all then agree on.
            flag = True
            if self.fault is None:
                overflow = torch.zeros_like(overflow)
        added = None if more is None else more()
        out = self._fused(tokens, ids, probs, flag, overflow, crossing)
        collected: Tensor = from_all_hosts(over, out, own, overflow, back, added)
        self._tell_workspace()
        return collected

    def _tell_workspace(self) -> None:
        if self.fault is not None:
            whole = self.workspace.overflow
            whole.copy_(torch.maximum(whole, self.fault))

    def _fused(
        self,
        tokens: Tensor,
        ids: Tensor,
        probs: Tensor,
        flag: bool,
        overflow: Tensor,
        crossing: Crossing | None = None,
    ) -> Tensor:
        """What the workspace's layer gives, that of this host if there are several."""
        workspace, weights, main = self.workspace, self.weights, self.main
        found = overflow
        if torch.compiler.is_compiling():
            from ._in_graphs import may_run_again

            if may_run_again():
                # What runs again in backward needs its inputs as they were: not the workspace's,
                # which other calls change meanwhile.
                found = torch.zeros_like(overflow)
        if workspace.pages is not None:
            out: Tensor = moe_in_pages(
                tokens,
                ids,
                probs,
                self.shared_probs,
                weights,
                main,
                workspace.key,
                found,
                workspace.pages,
                workspace.save == "none",
                not workspace.backward_rows,
                flag,
                self.schedule,
                self.deferred,
                crossing,
                *weights.flat(),
            )
            return out
        given, of_main = weights.flat(), () if main is None else main.flat()
        over = workspace.over_hosts
        with saving_elsewhere((tokens, *given)):
            out = moe_in_tensors(
                tokens,
                ids,
                probs,
                self.shared_probs,
                workspace.key,
                found,
                Figures(
                    workspace.rows,
                    workspace.rows_of_x,
                    workspace.rows_of_h,
                    workspace.plan_bytes,
                    workspace.backward_bytes,
                ),
                not workspace.backward_rows,
                self.exact_rows,
                flag,
                self.schedule,
                self.deferred,
                crossing,
                weights.layout,
                Counts(
                    len(weights.w1),
                    len(weights.w2),
                    len(given),
                    0 if main is None else len(main.w1),
                    0 if main is None else len(main.w2),
                ),
                *given,
                *of_main,
                has_rows=over is not None and over.all_rows is not None,
                is_exact=self.exact_rows,
            )
        if flag and found is not overflow:
            overflow.copy_(torch.maximum(overflow, found))
        return out
