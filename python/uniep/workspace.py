"""The memory of layers of one shape on one group, and the layer of the library behind it."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from . import _library
from ._between_hosts.agreed_faults import AgreedFaults
from ._between_hosts.agreement import require_same
from ._between_hosts.crossing import comes_in_waves
from ._between_hosts.host_mesh import HostMesh
from ._between_hosts.passes import OverHosts
from ._between_hosts.place import all_rows_of, default_capacity, host_mesh
from ._choices import check_schedule
from ._library_layer import LibraryLayer
from ._of_process import OfProcess
from ._plain_values import check_bool, check_whole, check_whole_or_none
from ._save_choice import SAVES, Save, check_save
from ._shared_apart import are_apart, rows_of
from .arithmetic import (
    ACTIVATIONS,
    PARTIALS,
    PROBS,
    Activation,
    CombinePartials,
    ProbsPlace,
    arithmetic_of,
)
from .group import Group, GroupLike, device_of, group_of, without_mesh
from .row_pool import RowPool

__all__ = ["Workspace", "check_is_workspace"]

_PASSES = {"forward": 0, "backward": 1}


class Workspace(OfProcess):
    """What calls of one shape on one group work in. One serves all layers of a model.

    Making one, :meth:`grow` and the calls that use it are collective: all ranks of the group do the
    same in the same order. Any number of forwards may be outstanding.

    Args:
        group: what :func:`uniep.moe` takes; None: this process alone.
        hidden: H, a multiple of 8.
        intermediate: I, a multiple of 8.
        num_experts: E of all ranks together, divisible by their number.
        topk: K, 1 to 16.
        max_tokens: most tokens that a rank has in a call; the same on all ranks.
        capacity_rows: rows (copies of tokens) that a rank has room for. None: any routing of a
            small layer, twice a balanced load of a large one.
        save: what a forward keeps of x. ``"rows"``: a row for each copy of a token (2H bytes a
            row). ``"tokens"``: each token that came, once (2H bytes a token); backward makes its
            rows again. ``"none"``: nothing; x itself, which autograd has anyway, is dispatched
            again in backward. The bits are the same.
        recompute_h: a forward does not keep h either (4I bytes a row); backward computes it again,
            as one more product. The bits are the same.
        backward_rows: rows that a backward works in at a time, a multiple of 128; 0: all. With
            fewer, experts take turns in that memory, and the bits are the same. A routing that
            brings one expert more rows is refused as one beyond the capacity is. Not with
            ``deferred``.
        exact_rows: a call takes memory for the rows that come, padded to 128 an expert, instead of
            the capacity: what it keeps, and what it works in. Forward waits until the device has
            counted them, so the host gets no further ahead. Not under torch.compile, nor in a CUDA
            graph. ``exact_rows`` of a call says otherwise for that call.
        exact_hosts: over hosts, a token, its sums and their gradients go only to and from hosts
            that have an expert of it, not all. Forward waits until the device has counted such
            tokens. The bits are the same. Not in a CUDA graph; under torch.compile every token
            goes to every host. ``exact_hosts`` of a call says otherwise for that call; it is the
            same on all ranks.
        schedule: of both directions, such as ``"single"`` or ``"pipelined:4,tile_m=32"``. None:
            what was tuned on this machine, else what is shipped or predicted best.
        device: where tensors lie. None: the group's device.
        on_overflow: what a routing does that brings a rank more rows than its capacity, or that has
            an impossible id. ``"raise"``: a :class:`RuntimeError` on all ranks, on a GPU from a
            later call. ``"flag"``: the output is NaN on all ranks, gradients are NaN, 0 for
            probabilities and 0 for weights, and :attr:`overflow` says so.
        timeout_ms: limit of every wait; 0: ``UNIEP_TIMEOUT_MS``, else 30000.
        activation: what an expert computes between its products; see :func:`uniep.moe`.
        probs: where a row's probability is multiplied: ``"before"`` fc2 or ``"after"`` it.
        bias: whether experts have biases, b1 and b2.
        combine_groups: G, into how many equal runs the experts are cut, by which a token's rows are
            added up; see :func:`uniep.moe`.
        combine_partials: what the sums of runs are, ``"fp32"`` or ``"bf16"``; likewise.
        row_pool: where forwards keep rows, on all ranks or on none; not with ``exact_rows``. None:
            in tensors of their own.
        shared_experts: S, experts that every rank has and every token goes to; see
            :func:`uniep.moe`. Beside the pass, in a layer of their own, they have gradients 0 in a
            call whose routing does not fit, with ``on_overflow="flag"``.
        shared_gate: whether calls may have ``shared_probs``. False: none does, and with
            ``probs="after"`` backward takes less time.
        shared_apart: whether shared experts run beside the pass, as a layer of this rank alone, in
            one group without biases, too, as calls with ``deferred`` need it. The bits are the
            same.

    Attributes:
        group: of the ranks of this host; ``members``: what was given, of all hosts.
        of_shared: the workspace of shared experts that are no part of the pass; None: there are
            none. Its memory counts as this one's.
        overflow: int64 [2] on the device: a :class:`uniep.Overflow`, and what would have done. The
            largest of all calls since it was made, grown or cleared (``overflow.zero_()``). Stays 0
            with ``on_overflow="raise"``.
        rows: rows that there is room for.
        rows_of_x: of x, what a forward keeps for its backward: ``rows``, room for tokens, or 0;
            with ``exact_rows`` as many as come.
        rows_of_h: rows of h that it keeps: ``rows``, or 0; likewise.
        bytes: what the workspace holds as long as it is open.
        plan_bytes: what a forward keeps of its routing.
        forward_bytes: what a forward takes while it runs; with ``exact_rows`` the most.
        backward_bytes: what a backward takes while it runs; likewise.

    Raises:
        TypeError: for figures that are no int, a schedule that is no str, and a pool that is none.
        ValueError: for a device that the group is not on, an unknown ``on_overflow``, ``save``,
            ``activation``, ``probs`` or ``combine_partials``, and over hosts for numbers that
            these do not divide.
        uniep.Error: for figures out of range, or that differ by rank; the sentence says which.
    """

    def __init__(
        self,
        group: GroupLike,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        *,
        capacity_rows: int | None = None,
        save: Save = "rows",
        recompute_h: bool = False,
        backward_rows: int = 0,
        exact_rows: bool = False,
        exact_hosts: bool = False,
        schedule: str | None = None,
        device: torch.device | str | int | None = None,
        on_overflow: Literal["raise", "flag"] = "raise",
        timeout_ms: int = 0,
        activation: Activation = "swiglu",
        probs: ProbsPlace = "before",
        bias: bool = False,
        combine_groups: int = 1,
        combine_partials: CombinePartials = "fp32",
        row_pool: RowPool | None = None,
        shared_experts: int = 0,
        shared_gate: bool = True,
        shared_apart: bool = False,
    ) -> None:
        check_whole(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            topk=topk,
            max_tokens=max_tokens,
            backward_rows=backward_rows,
        )
        check_whole_or_none(capacity_rows=capacity_rows)
        check_bool(
            recompute_h=recompute_h,
            exact_rows=exact_rows,
            exact_hosts=exact_hosts,
            bias=bias,
            shared_gate=shared_gate,
            shared_apart=shared_apart,
        )
        check_schedule(schedule)
        check_save(save)
        _check_row_pool(row_pool, exact_rows)
        if on_overflow not in ("raise", "flag"):
            raise ValueError(f"on_overflow is '{on_overflow}'; it must be 'raise' or 'flag'")
        if device is None and isinstance(group, Group):
            device = group.device
        device = device_of(device)
        self.mesh = host_mesh(group, device)
        self.group = group_of(group if self.mesh is None else self.mesh.within, device)
        # Of one host its Group, which lets a process group end.
        self.members = self.group if self.mesh is None else without_mesh(group)
        self.device = self.group.device
        self.pages = None if row_pool is None else row_pool.memory
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_experts = num_experts
        self.topk = topk
        self.max_tokens = max_tokens
        self.save = save
        self.recompute_h = recompute_h
        self.backward_rows = backward_rows
        self.exact_rows = exact_rows
        self.exact_hosts = exact_hosts
        self.arithmetic = arithmetic_of(
            activation,
            probs,
            bias,
            combine_groups,
            combine_partials,
            shared_experts,
            shared_gate,
        )
        self._all_rows = None
        if self.mesh is not None:
            _check_over_hosts(self.mesh, num_experts, max_tokens)
            self._all_rows = all_rows_of(self.mesh, self.arithmetic, num_experts)
        self.flag = on_overflow == "flag"
        self._schedule = schedule
        self._timeout_ms = _library.int32(timeout_ms=timeout_ms)
        self.of_shared: Workspace | None = None
        if are_apart(self.arithmetic, self.mesh, shared_apart):
            self.of_shared = self._layer_of_shared()
        self._place()
        self._open(*self._needs(capacity_rows))

    def _layer_of_shared(self) -> Workspace:
        """Of this rank alone, whose experts are the shared ones: every token goes to each."""
        experts = self.arithmetic.shared_experts
        return Workspace(
            None,
            self.hidden,
            self.intermediate,
            experts,
            experts,
            self.max_tokens,
            capacity_rows=rows_of(experts, self.max_tokens),
            save=self.save,
            recompute_h=self.recompute_h,
            device=self.device,
            timeout_ms=self._timeout_ms,
            activation=self.arithmetic.activation,
            probs=self.arithmetic.probs,
        )

    def _place(self) -> None:
        """Figures of the layer of this host, which of a mesh sees the tokens of all hosts."""
        hosts = 1 if self.mesh is None else self.mesh.hosts
        self.local_experts = self.num_experts // (hosts * self.group.size)
        # Of a mesh: whether tokens come in waves.
        token_bytes = self.max_tokens * self.hidden * torch.bfloat16.itemsize
        self.in_waves = comes_in_waves(self.mesh, self.device, token_bytes)

    def _needs(self, capacity_rows: int | None) -> tuple[_library.Problem, _library.Needs]:
        """The layer with room for so many rows, and what it takes. Raises where it cannot be."""
        hosts = 1 if self.mesh is None else self.mesh.hosts
        if self.mesh is not None and not capacity_rows:
            figures = (self.hidden, self.intermediate, self.local_experts, self.topk)
            capacity_rows = default_capacity(self.mesh, *figures, self.max_tokens)
        if self.mesh is not None and hosts > 1:
            require_same(self.mesh, self._of_all_hosts(capacity_rows))
        problem = self._problem(hosts, capacity_rows or 0)
        needs = _library.Needs()
        backend = 1 if self.device.type == "cuda" else 0
        _library.check(
            _library.library.uniep_needs(
                ctypes.byref(problem), backend, self.group.size, ctypes.byref(needs)
            )
        )
        return problem, needs

    def _open(self, problem: _library.Problem, needs: _library.Needs) -> None:
        self.rows = needs.rows
        self.rows_of_x = needs.rows_of_x
        self.rows_of_h = 0 if self.recompute_h else needs.rows
        self.plan_bytes = needs.plan
        self.forward_bytes = needs.forward_memory
        self.backward_bytes = needs.backward_memory
        # It outlives this object, if calls still have its key.
        self.library_layer = LibraryLayer(
            self.group,
            problem,
            needs,
            self._shape_of_ops(),
            schedule=self._schedule,
            timeout_ms=self._timeout_ms,
            pages=self.pages,
        )
        self.key = self.library_layer.key
        self.overflow = self.library_layer.overflow
        self.bytes = self.library_layer.bytes
        if self.of_shared is not None:
            self.bytes += self.of_shared.bytes
        # None: no mesh.
        self.over_hosts = None if self.mesh is None else self._over(self.mesh)

    def _problem(self, hosts: int, capacity_rows: int) -> _library.Problem:
        """Of the layer of this host."""
        return _library.problem(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts // hosts,
            topk=self.topk,
            max_tokens=hosts * self.max_tokens,
            capacity_rows=capacity_rows,
            save=SAVES.index(self.save),
            recompute_h=int(self.recompute_h),
            activation=ACTIVATIONS.index(self.arithmetic.activation),
            probs=PROBS.index(self.arithmetic.probs),
            bias=int(self.arithmetic.bias),
            backward_rows=self.backward_rows,
            combine_groups=self.arithmetic.combine_groups if hosts == 1 else 1,
            combine_partials=PARTIALS.index(self.arithmetic.combine_partials),
            shared_experts=self._shared_in_pass(),
            no_shared_gate=int(not self.arithmetic.shared_gate),
            slot_rows=int(self._all_rows is not None),
            gathered_hosts=hosts,
            first_host=self.mesh.host if self.in_waves and self.mesh is not None else -1,
        )

    def _shared_in_pass(self) -> int:
        return self.arithmetic.shared_experts if self.of_shared is None else 0

    def _shape_of_ops(self) -> tuple[int, ...]:
        """The figures of LayerShape (python/ops/layer_registry.h of the sources), in its order."""
        return (
            self.hidden,
            self.intermediate,
            self.local_experts,
            self.topk,
            self.rows,
            self.plan_bytes,
            self.forward_bytes,
            self.backward_bytes,
            self.rows_of_x,
            self.rows_of_h,
            int(self.save == "tokens"),
            self.arithmetic.halves() * self.intermediate,
            int(self.arithmetic.bias),
            self._shared_in_pass(),
            int(self._all_rows is not None),
        )

    def _over(self, mesh: HostMesh) -> OverHosts:
        """What crosses between hosts, whose faults all agree on where there are several."""
        faults: AgreedFaults | None = None
        if mesh.hosts > 1:
            faults = AgreedFaults(
                mesh,
                self.overflow,
                flag=self.flag,
                rows=self.rows,
                backward_rows=self.backward_rows,
                num_experts=self.num_experts,
                max_tokens=self.max_tokens,
            )
        return OverHosts(
            mesh, self.num_experts // mesh.hosts, self.max_tokens, faults, self._all_rows
        )

    def _of_all_hosts(self, capacity_rows: int | None) -> dict[str, object]:
        """What messages between hosts, and what is done with them, depend on."""
        return {
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "num_experts": self.num_experts,
            "topk": self.topk,
            "max_tokens": self.max_tokens,
            "capacity_rows": capacity_rows or 0,
            "save": self.save,
            "recompute_h": self.recompute_h,
            "backward_rows": self.backward_rows,
            "exact_rows": self.exact_rows,
            "exact_hosts": self.exact_hosts,
            "on_overflow": "flag" if self.flag else "raise",
            "row_pool": self.pages is not None,
            **self.arithmetic._asdict(),
            "whether UNIEP_SPARE_SMS leaves any": self.in_waves,
        }

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.library_layer.closed

    @property
    def saved_bytes(self) -> int:
        """Bytes that one forward keeps for its backward, in tensors of its own.

        With ``exact_rows`` the most: :meth:`saved_bytes_of` says what so many rows take.
        """
        return self.saved_bytes_of(self.rows)

    def saved_bytes_of(self, rows: int) -> int:
        """Bytes that a forward keeps which has received `rows` rows, padding included.

        With ``save="tokens"`` the most: that of so many rows as different tokens as there can be.
        """
        rows_of_x = min(rows, self.rows_of_x)
        rows_of_h = min(rows, self.rows_of_h)
        width = self.arithmetic.halves() * self.intermediate
        elements = rows_of_x * self.hidden + rows_of_h * width
        probabilities = rows * torch.float32.itemsize
        of_shared = 0 if self.of_shared is None else self.of_shared.saved_bytes
        return self.plan_bytes + elements * torch.bfloat16.itemsize + probabilities + of_shared

    def needed_rows(self) -> int:
        """The largest capacity that any call since the beginning needed; waits for the device.

        Raises:
            ValueError: with ``on_overflow="raise"``, where the error names the capacity.
        """
        if not self.flag:
            raise ValueError(
                "needed_rows is known with on_overflow='flag'; with 'raise' the error names the "
                "capacity_rows that would do"
            )
        return int(self.overflow[1].item())

    def grow(self, *, capacity_rows: int) -> None:
        """Makes room for more rows, or fewer. Collective.

        Forwards whose backward is still to come are lost: their backward raises.

        Raises:
            TypeError: for a capacity that is no int; the workspace stays as it is.
            uniep.Error: for a capacity out of range; the workspace stays as it is. For one that
                differs by rank, and where memory is short; the workspace is closed then.
        """
        check_whole(capacity_rows=capacity_rows)
        problem, needs = self._needs(capacity_rows)
        self.library_layer.close()
        self._open(problem, needs)

    def schedule(self, direction: Literal["forward", "backward"] = "forward") -> str:
        """The schedule of calls that name none, with every axis.

        Raises:
            ValueError: for another direction, and where the workspace is closed.
        """
        if direction not in _PASSES:
            raise ValueError(f"direction is '{direction}'; it must be 'forward' or 'backward'")
        return self.library_layer.schedule(_PASSES[direction])

    def synchronize(self) -> None:
        """Waits until every call is done, and raises what went wrong on the way.

        Raises:
            uniep.Error: the error of any rank.
            ValueError: where the workspace is closed.
        """
        self.library_layer.synchronize()
        if self.over_hosts is not None and self.over_hosts.faults is not None:
            self.over_hosts.faults.raise_any()
        if self.of_shared is not None:
            self.of_shared.synchronize()

    def close(self) -> None:
        """Lets go of the memory, once calls are done. Closing again does nothing."""
        self.library_layer.close()
        if self.of_shared is not None:
            self.of_shared.close()

    def require_open(self) -> None:
        """Raises ValueError where it is closed."""
        self.library_layer.require_open()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.bytes} bytes"
        return (
            f"uniep.Workspace(hidden={self.hidden}, intermediate={self.intermediate}, "
            f"num_experts={self.num_experts}, topk={self.topk}, max_tokens={self.max_tokens}, "
            f"rows={self.rows}, device='{self.device}', {state})"
        )


def _check_row_pool(row_pool: object, exact_rows: bool) -> None:
    """Raises TypeError for what is no pool, and ValueError for one beside `exact_rows`."""
    if row_pool is None:
        return
    if not isinstance(row_pool, RowPool):
        raise TypeError(
            f"row_pool is {row_pool!r}, a {type(row_pool).__name__}; it must be a uniep.RowPool or "
            "None"
        )
    if exact_rows:
        raise ValueError("exact_rows is True, but row_pool is given; it must be one of them")


def _check_over_hosts(mesh: HostMesh, num_experts: int, max_tokens: int) -> None:
    """Raises ValueError for figures that hosts cannot share."""
    if max_tokens < 1 and mesh.hosts > 1:
        raise ValueError(f"max_tokens is {max_tokens}; over hosts 1 or more is accepted")
    if num_experts % mesh.hosts:
        raise ValueError(
            f"num_experts is {num_experts} on {mesh.hosts} hosts; a multiple of their number is "
            "accepted"
        )


def check_is_workspace(workspace: object) -> None:
    """Raises TypeError for what is no workspace."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace is a {type(workspace).__name__}; it must be a uniep.Workspace")
