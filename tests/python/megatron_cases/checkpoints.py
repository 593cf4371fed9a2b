"""Distributed checkpoints and state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cases.on_cpu import OnCpu, adam_of_transformer_engine
from megatron_cases.support import (
    HIDDEN,
    draw_biases,
    expect_close,
    expect_raises,
    expect_same,
    gathered,
    make_config,
    make_groups,
    make_layer,
    make_pair,
    of_experts,
    other_experts,
    train,
    wrapped,
)


def case_distributed_checkpoints(folder: str) -> None:
    """Saved at one expert-parallel size and loaded at another, between all kinds of experts."""
    from megatron.core import dist_checkpointing

    ranks = dist.get_world_size()
    kinds = [
        ("megatron", "stacked", False),
        ("stacked", "megatron", False),
        ("per_expert", "stacked", False),
        ("stacked", "per_expert", True),
        ("megatron", "per_expert", True),
        ("megatron, gpt_oss", "stacked, gpt_oss", False),
        ("per_expert, gpt_oss", "megatron, gpt_oss", True),
        ("stacked, gelu", "megatron, gelu", True),  # no gate: fc1 is not split
    ]

    def build(kind: str, expert_parallel: int, seed: int) -> Any:
        torch.manual_seed(seed)
        kind, _, other = kind.partition(", ")
        config = make_config(
            expert_model_parallel_size=expert_parallel, **(other_experts()[other] if other else {})
        )
        layer = make_layer(config) if kind == "megatron" else make_layer(config, layout=kind)
        draw_biases(layer)
        return layer

    # Each size once: making process groups takes longer than all else, and leaves threads behind.
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    wanted = {}
    try:
        for saved in sizes:
            make_groups(saved)
            for number, (writer, _, singleton) in enumerate(kinds):
                # Ranks with other experts have other weights; those with the same have the same.
                layer = build(writer, saved, 10 * number + dist.get_rank() % saved)
                path = Path(folder) / f"checkpoint{number}_{saved}"
                if dist.get_rank() == 0:
                    path.mkdir()
                dist.barrier()
                metadata = {"singleton_local_shards": singleton}
                dist_checkpointing.save(
                    layer.sharded_state_dict("mlp.", metadata=metadata), str(path)
                )
                wanted[number, saved] = gathered(of_experts(layer, "data"))
        for loaded in sizes:
            make_groups(loaded)
            for (number, saved), experts in wanted.items():
                if saved == loaded and ranks > 1:
                    continue
                writer, reader, singleton = kinds[number]
                other = build(reader, loaded, 99)
                metadata = {"singleton_local_shards": singleton}
                entries = other.sharded_state_dict("mlp.", metadata=metadata)
                state = dist_checkpointing.load(
                    entries, str(Path(folder) / f"checkpoint{number}_{saved}")
                )
                other.load_state_dict({k.removeprefix("mlp."): v for k, v in state.items()})
                found = gathered(of_experts(other, "data"))
                expect_same(found, experts, f"{writer} at {saved} into {reader} at {loaded}")
    finally:
        make_groups(ranks)


def case_optimizer_checkpoint(folder: str) -> None:
    """States of Megatron's Adam, saved from uniep's parameters and loaded into its own experts."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )

    def build(target: str, seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        layer = (
            make_layer(make_config())
            if target == "megatron"
            else make_layer(make_config(), layout=target)
        )
        model = wrapped(layer, fp32=True, distributed=False)
        return layer, model, get_megatron_optimizer(options, [model])

    def entries(layer: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
        state = layer.sharded_state_dict("mlp.")
        again = layer.sharded_state_dict("mlp.")
        return {
            "model": state,
            "optimizer": optimizer.sharded_state_dict(again, is_loading=loading),
        }

    with OnCpu():
        layer, model, optimizer = build("stacked", 1)
        for _ in range(2):
            train(model)
            optimizer.step()
        path = Path(folder) / "optimizer"
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        dist_checkpointing.save(entries(layer, optimizer, False), str(path))
        restored = {}
        for target in ("stacked", "per_expert", "megatron"):
            other, other_model, other_optimizer = build(target, 50)
            state = dist_checkpointing.load(entries(other, other_optimizer, True), str(path))
            weights = {k.removeprefix("mlp."): v for k, v in state["model"].items()}
            other.load_state_dict(weights)
            other_optimizer.load_state_dict(state["optimizer"])
            expect_same(of_experts(other, "data"), of_experts(layer, "data"), f"into {target}")
            train(other_model)
            other_optimizer.step()
            restored[target] = of_experts(other, "data")
        train(model)
        optimizer.step()
        expect_same(restored["stacked"], of_experts(layer, "data"), "the step after, stacked")
        # Other sums of norms, which round some bf16 weights otherwise: 2.8e-5 with PyTorch 2.10.
        for target, limit in (("per_expert", 1e-4), ("megatron", 1e-2)):
            for found, wanted in zip(restored[target], of_experts(layer, "data"), strict=True):
                expect_close(found, wanted, limit, f"the step after, {target}")


def case_distributed_optimizer_checkpoint(folder: str) -> None:
    """States of the distributed optimizer between layouts, layers and expert-parallel sizes."""
    with OnCpu(), adam_of_transformer_engine():
        try:
            _move_optimizer_states(Path(folder) / "states")
        finally:
            make_groups(dist.get_world_size())


def _move_optimizer_states(folder: Path) -> None:
    from megatron.core import __version__ as version
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
        use_distributed_optimizer=True,
    )
    ranks = dist.get_world_size()

    def build(kind: str, seed: int, size: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        config = make_config(expert_model_parallel_size=size)
        layer = make_layer(config) if kind == "megatron" else make_layer(config, layout=kind)
        model = wrapped(layer, fp32=True, distributed=True, overlap=False)  # in one bucket
        return layer, model, get_megatron_optimizer(options, [model])

    def step(built: tuple[Any, Any, Any]) -> list[Tensor]:
        layer, model, optimizer = built
        train(model)
        optimizer.step()
        return gathered(of_experts(layer, "data"))

    def entries(built: tuple[Any, Any, Any], form: str, loading: bool) -> dict[str, Any]:
        layer, _, optimizer = built
        metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
        state, again = (layer.sharded_state_dict("mlp.", metadata=metadata) for _ in range(2))
        states = optimizer.sharded_state_dict(again, is_loading=loading, metadata=metadata)
        return {"model": state, "optimizer": states}

    def save(writer: str, form: str) -> list[Tensor]:
        """The weights after the step that follows."""
        built = build(writer, 1, ranks)
        step(built)
        path = folder / f"{writer}_{form}"
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(entries(built, form, False), str(path))
        return step(built)

    def load(writer: str, form: str, reader: str, size: int) -> list[Tensor]:
        built = build(reader, 50, size)
        path = str(folder / f"{writer}_{form}")
        state = dist_checkpointing.load(entries(built, form, True), path)
        weights = {k.removeprefix("mlp."): v for k, v in state["model"].items()}
        built[0].load_state_dict(weights)
        built[2].load_state_dict(state["optimizer"])
        return step(built)

    def expect_moved(found: list[Tensor], wanted: list[Tensor], limit: float, what: str) -> None:
        for own, other in zip(found, wanted, strict=True):
            expect_close(own, other, limit, f"the step after, {what}")

    after = save("stacked", "fully_reshardable")
    after_theirs = save("megatron", "fully_reshardable")
    if ranks < 4:  # four have nothing new to tell here
        expect_same(load("stacked", "fully_reshardable", "stacked", ranks), after, "stacked")
        for reader, limit in (("per_expert", 1e-4), ("megatron", 1e-2)):
            found = load("stacked", "fully_reshardable", reader, ranks)
            expect_moved(found, after, limit, f"stacked into {reader}")
        found = load("megatron", "fully_reshardable", "per_expert", ranks)
        expect_moved(found, after_theirs, 1e-2, "megatron into per_expert")
        # In order of buckets: other parameters in one of the same size are not refused.
        of_buckets = save("stacked", "dp_reshardable")
        expect_same(load("stacked", "dp_reshardable", "stacked", ranks), of_buckets, "buckets")
        found = load("stacked", "dp_reshardable", "megatron", ranks)
        wrong = "relative L2 distance"
        expect_raises(AssertionError, wrong, expect_moved, found, of_buckets, 5e-2, "buckets")
    if ranks == 1:
        return
    make_groups(ranks // 2)
    if ranks == 4:
        found = load("stacked", "fully_reshardable", "per_expert", 2)
        expect_moved(found, after, 1e-2, "stacked from 4 to 2 ranks")
        found = load("megatron", "fully_reshardable", "stacked", 2)
        expect_moved(found, after_theirs, 1e-2, "megatron from 4 to 2 ranks")
    elif version == "0.16.1":  # at EP 1 a rank has one optimizer for all parameters
        for kind in ("stacked", "megatron"):
            expect_raises(KeyError, "optimizer", load, kind, "fully_reshardable", kind, 1)


def case_state_dicts() -> None:
    """Plain state dicts with the names of each of Megatron's experts."""
    theirs, ours = make_pair()
    w1, w2 = of_experts(theirs, "data")
    dense = {k: v for k, v in theirs.state_dict().items() if "experts." not in k and v is not None}
    spellings: dict[str, dict[str, Tensor]] = {
        "SequentialMLP": dict(theirs.state_dict()),
        "TEGroupedMLP": {
            f"experts.linear_fc{n}.weight{i}": w[i]
            for n, w in ((1, w1), (2, w2))
            for i in range(len(w))
        },
        "TEGroupedMLP, one weight": {
            "experts.linear_fc1.weight": w1,
            "experts.linear_fc2.weight": w2,
            "experts.linear_fc1._extra_state": torch.empty(0),
        },
        # GroupedMLP views [H, experts * 2I] as [experts, H, 2I], [experts * I, H] as [.., I, H].
        "GroupedMLP": {
            "experts.weight1": w1.transpose(1, 2).reshape(HIDDEN, -1),
            "experts.weight2": w2.transpose(1, 2).reshape(-1, HIDDEN),
        },
    }
    for layout in ("stacked", "per_expert"):
        for name, state in spellings.items():
            torch.manual_seed(77)
            layer = make_layer(make_config(), layout=layout)
            layer.load_state_dict({**dense, **state})
            expect_same(of_experts(layer, "data"), [w1, w2], f"{name} into {layout}")
    expect_raises(RuntimeError, "Missing key(s)", ours.load_state_dict, dense)


def case_state_of_one_expert() -> None:
    """A rank's only expert has parameters of its own, or is a stack of one."""
    options = {
        "num_moe_experts": dist.get_world_size(),
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    }
    for layout in ("stacked", "per_expert"):
        torch.manual_seed(77)
        layer, other = (make_layer(make_config(**options), layout=layout) for _ in range(2))
        other.load_state_dict(layer.state_dict())
        expect_same(of_experts(other, "data"), of_experts(layer, "data"), f"one, {layout}")
