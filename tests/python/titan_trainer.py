"""torchtitan's trainer, with uniep and without, as test_torchtitan_trainer.py runs it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import CountPasses, make_case
from titan_cases import (
    EXPERTS,
    KEEP,
    SHARED_TOO,
    config_of,
    gpt_oss_config,
    gpt_oss_layers,
    layer_step,
    own_layer,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models import qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention

import uniep


class Tokens(BaseDataLoader):
    """Random tokens, the same for any number of ranks; each takes its part of every batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 128

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self.shape = (dp_world_size * local_batch_size, seq_len + 1)
        self.part = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.vocab_size = config.vocab_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            ids = torch.randint(self.vocab_size, self.shape, generator=generator)[self.part]
            inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
            positions = torch.arange(inputs.shape[1]).expand(inputs.shape).contiguous()
            yield {"input": inputs, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """For a trainer whose data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Recorder(MetricsProcessor):
    """Keeps losses and norms; torchtitan's asks a GPU for its memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        none = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = types.SimpleNamespace(
            device_name="cpu", get_peak_stats=lambda: none
        )
        self.color = types.SimpleNamespace(blue="", red="", reset="", yellow="")
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, max_loss: float, norm: float, **_: Any) -> None:
        self.losses.append(loss)
        self.norms.append(norm)

    def close(self) -> None:
        pass


def attend_on_cpus(model_config: Any) -> None:
    """Flex attention cannot."""
    for layer in model_config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def parsed(model: list[str], flags: tuple[str, ...], layers: int) -> Any:
    """A model of torchtitan's, from its command line, with fewer layers and on random tokens."""
    subcommands = [flag for flag in flags if flag.startswith("activation_checkpoint:")]
    config = ConfigManager().parse_args(
        model
        + [flag for flag in flags if flag not in subcommands]
        + ["--training.seq_len", "16", "--training.disable_cuda_graphs", "--debug.seed", "0"]
        + subcommands
    )
    degrees = config.parallelism
    batches = dist.get_world_size() // (
        degrees.tensor_parallel_degree * degrees.pipeline_parallel_degree
    )
    config.training.local_batch_size = 4 // batches
    model_config = config.model_spec.model
    model_config.layers = model_config.layers[:layers]
    attend_on_cpus(model_config)
    # A last bit of one gradient would become one of all weights.
    config.training.max_norm = 1e9
    config.dataloader = Tokens.Config()
    config.tokenizer = NoTokenizer.Config()
    config.metrics = Recorder.Config()
    parallelize = config.model_spec.parallelize_fn

    def plain_sums(*args: Any, **options: Any) -> nn.Module:
        model: nn.Module = parallelize(*args, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo multiplies nothing while it sums
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = plain_sums
    return config


def trainer_config(*flags: str) -> Any:
    """Qwen3-MoE's debug configuration, with less in it."""
    config = parsed(["--module", "qwen3", "--config", "qwen3_moe_debug"], flags, layers=2)
    model = config.model_spec.model
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    rope = replace(model.layers[0].attention.rope, dim=heads["head_dim"])
    model.layers = qwen3._build_qwen3_moe_layers(
        n_layers=len(model.layers),
        dim=model.dim,
        **heads,
        moe_hidden_dim=64,
        num_experts=8,
        top_k=2,
        rope=rope,
        attn_backend="flex",
        moe_comm_backend="standard",
    )
    attend_on_cpus(model)
    return config


def load(model: nn.Module, checkpoint: Path) -> None:
    """What torchtitan's checkpointer does with a model."""
    wrapper = ModelWrapper(model)
    weights = wrapper.state_dict()
    dcp.load(weights, checkpoint_id=checkpoint)
    wrapper.load_state_dict(weights)


def first(name: str) -> str:
    """Where a run's weights behind its first step are."""
    return f"{name}, first step"


def train(folder: str, name: str, flags: list[str], steps: int = 2) -> dict[str, Any]:
    """Trains from the weights in `folder`/start, which torchtitan's own model draws and saves."""
    trainer = trainer_config(*flags).build()
    model = trainer.model_parts[0]
    start = Path(folder) / "start"
    if name == "torchtitan":
        with torch.no_grad():  # so much that the experts' part of the loss is not small
            for parameter in model.layers.parameters():
                if parameter.dim() == 3:
                    parameter.mul_(32)
        dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=start)
    load(model, start)
    if name == "turned":
        with torch.no_grad():
            for layer in model.layers.values():
                experts = layer.moe.routed_experts.inner_experts
                gate = experts.w1_EFD.clone()
                experts.w1_EFD.copy_(experts.w3_EFD)
                experts.w3_EFD.copy_(gate)
    data = trainer.batch_generator(trainer.dataloader)
    forwards = []
    for step in range(steps):
        trainer.step = step + 1
        with CountPasses() if COMPILED not in flags else nullcontext() as count:
            trainer.train_step(data)
        if count is not None:  # no such mode sees into what is compiled
            forwards.append(count.ran["forward"])
        if step == 0:
            dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=Path(folder) / first(name))
    experts = model.layers["0"].moe.routed_experts.inner_experts
    weight = next(experts.parameters())
    dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=Path(folder) / name)
    trainer.close()
    return {
        "losses": trainer.metrics_processor.losses,
        "norms": trainer.metrics_processor.norms,
        "forwards": forwards,  # of each step, unless compiled
        "experts": type(experts).__name__,
        "fsdp": isinstance(model.layers["0"], FSDPModule),
        "local": list(weight.to_local().shape) if isinstance(weight, DTensor) else None,
        "parameters": [name for name, _ in experts.named_parameters()],
    }


UNIEP = ["--override.imports", EXPERTS]
KEPT = ["--override.imports", f"{EXPERTS},{KEEP}"]


# Tokens go to experts in turn: a rounding turns no router's choice between two that are close.
IN_TURN = "--debug.moe_force_load_balance"
NONE = "activation_checkpoint:none"
FULL = "activation_checkpoint:full"
COMPILED = "--compile.enable"
EAGERLY = [COMPILED, "--compile.backend", "aot_eager"]  # whose bits are those without
ALONE: dict[str, list[str]] = {
    "torchtitan": [IN_TURN, NONE],
    "uniep": [*UNIEP, IN_TURN, NONE],
    "selective": [*UNIEP, IN_TURN, "activation_checkpoint:selective"],
    "selective, kept": [*KEPT, IN_TURN, "activation_checkpoint:selective"],
    "full": [*UNIEP, IN_TURN, FULL],
    "compiled": [*UNIEP, *EAGERLY, IN_TURN, FULL],
    "inductor": [*KEPT, COMPILED, IN_TURN, "activation_checkpoint:selective"],
    "typechecked": [*UNIEP, "--debug.spmd_typechecking", IN_TURN, NONE],
    "turned": [*UNIEP, IN_TURN, NONE],
}
EP2 = ["--parallelism.expert_parallel_degree", "2"]
PAIR: dict[str, list[str]] = {
    "FSDP 2": [*UNIEP, IN_TURN, NONE],
    "EP 2": [*UNIEP, *EP2, IN_TURN, NONE],
    "EP 2, kept": [*KEPT, *EP2, IN_TURN, "activation_checkpoint:selective"],
    "EP 2, compiled": [*UNIEP, *EP2, *EAGERLY, IN_TURN, FULL],
    "EP 2, TP 2": [*UNIEP, *EP2, "--parallelism.tensor_parallel_degree", "2", IN_TURN, NONE],
    "HSDP": [
        *UNIEP,
        "--parallelism.data_parallel_replicate_degree",
        "2",
        "--parallelism.data_parallel_shard_degree",
        "1",
        IN_TURN,
        NONE,
    ],
    "EP 2, typechecked": [*UNIEP, *EP2, "--debug.spmd_typechecking", NONE],
    "EP 2, routed": [*UNIEP, *EP2, NONE],
    # With spmd_types gloo cannot do its exchange.
    "torchtitan, EP 2": [*EP2, "--parallelism.spmd_backend", "partial_dtensor", IN_TURN, NONE],
    "EP 2, partial_dtensor": [
        *UNIEP,
        *EP2,
        "--parallelism.spmd_backend",
        "partial_dtensor",
        IN_TURN,
        NONE,
    ],
    "EP 2, full_dtensor": [*UNIEP, *EP2, "--parallelism.spmd_backend", "full_dtensor", NONE],
}


def train_all(folder: str, runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """One trainer after another, in the same processes."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the group
    found = {}
    for name, flags in runs.items():
        # DTensor would hand this trainer layouts on the meshes of the one before.
        debug._clear_sharding_prop_cache()
        found[name] = train(folder, name, flags)
    return found


SHARED: dict[str, list[str]] = {
    "torchtitan": [IN_TURN, NONE],
    "in the pass": ["--override.imports", SHARED_TOO, IN_TURN, NONE],
    "compiled": ["--override.imports", SHARED_TOO, *EAGERLY, IN_TURN, FULL],
}


def fewer_heads(attention: Any, heads: int) -> Any:
    """DeepSeek-V3's: most of what its debug model computes is projections of 16 heads."""
    content, position = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    values = attention.v_head_dim
    return replace(
        attention,
        n_heads=heads,
        wq=replace(attention.wq, out_features=heads * (content + position)),
        wkv_b=replace(attention.wkv_b, out_features=heads * (content + values)),
        wo=replace(attention.wo, in_features=heads * values),
    )


def train_deepseek() -> dict[str, dict[str, Any]]:
    """DeepSeek-V3's debug configuration, which has shared experts, from the weights it draws."""
    torch.autograd.set_multithreading_enabled(False)
    found = {}
    for name, flags in SHARED.items():
        debug._clear_sharding_prop_cache()
        model = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
        config = parsed(model, tuple(flags), layers=2)  # a dense one, and one with experts
        for layer in config.model_spec.model.layers:
            layer.attention = fewer_heads(layer.attention, 2)
        trainer = config.build()
        data = trainer.batch_generator(trainer.dataloader)
        for step in range(2):
            trainer.step = step + 1
            trainer.train_step(data)
        layers = trainer.model_parts[0].layers.values()
        found[name] = {
            "losses": trainer.metrics_processor.losses,
            "norms": trainer.metrics_processor.norms,
            "layers": [type(layer.moe).__name__ for layer in layers if hasattr(layer, "moe")],
        }
        trainer.close()
    return found


def split_layers() -> dict[str, Any]:
    """This rank's results of one layer at EP 2; and "rows": of one whose rows FSDP splits."""
    whole = make_case()
    config = uniep.torchtitan.uniep_routed_experts(config_of(whole, ep=True), max_tokens=48)
    layer = config.build().bfloat16()
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2}
    dims = ParallelDims(**sizes, world_size=2, spmd_backend="partial_dtensor")
    layer.parallelize(dims)
    case = whole.part(dist.get_rank(), 2)
    with torch.no_grad():
        own = own_layer(whole).inner_experts.state_dict()
        for name, weight in layer.inner_experts.named_parameters():
            weight.to_local().copy_(own[name].chunk(2)[dist.get_rank()])
    found: dict[str, Any] = layer_step(layer, case)

    case = make_case()
    layer = uniep.torchtitan.uniep_routed_experts(config_of(case)).build().bfloat16()
    experts = layer.inner_experts
    mesh = dims.get_mesh("batch")
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    experts.set_force_sum_reduction_for_comms(True)
    experts.set_gradient_divide_factor(1.0)
    layer.init_states()
    drawn = [w.full_tensor().detach().float() for w in (experts.w1_EFD, experts.w3_EFD)]
    own = own_layer(case).inner_experts.state_dict()
    experts.load_state_dict({n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in own.items()})
    saved = experts.state_dict()
    out = layer(case.x, case.probs, case.ids, None)
    out.backward(case.dy)
    found["rows"] = {name: weight.full_tensor() for name, weight in saved.items()} | {
        "local": list(saved["w1_EFD"].to_local().shape),
        "out": out.detach(),
        "dw1": experts.w1_EFD.grad.full_tensor(),
        "dw3": experts.w3_EFD.grad.full_tensor(),
        "drawn": drawn,
    }
    return found


def split_gpt_oss() -> dict[str, Any]:
    """This rank's results of gpt-oss' layer at EP 2; and "rows", what a row-sharded one saves."""
    whole = make_case()
    config = uniep.torchtitan.uniep_routed_experts(gpt_oss_config(whole, ep=True), max_tokens=48)
    layer = config.build().bfloat16()
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2}
    dims = ParallelDims(**sizes, world_size=2, spmd_backend="partial_dtensor")
    layer.parallelize(dims)
    case = whole.part(dist.get_rank(), 2)
    alone = gpt_oss_layers(whole)[1]
    with torch.no_grad():
        for name, weight in layer.inner_experts.named_parameters():
            part = getattr(alone.inner_experts, name).chunk(2)[dist.get_rank()]
            weight.to_local().copy_(part)
    found: dict[str, Any] = layer_step(layer, case)

    mesh = dims.get_mesh("batch")
    fully_shard(alone.inner_experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    saved = alone.inner_experts.state_dict()
    alone.inner_experts.load_state_dict(saved)
    again = alone.inner_experts.state_dict()
    found["rows"] = [
        {name: weight.full_tensor() for name, weight in state.items()} for state in (saved, again)
    ]
    return found


PIPELINES: dict[str, list[str]] = {
    name: [*UNIEP, "--parallelism.pipeline_parallel_degree", "2", *flags, IN_TURN]
    for name, flags in {
        "1F1B": [NONE],
        "1F1B, full": [FULL],
        "without bubbles": ["--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", NONE],
        "without bubbles, pool": [
            *("--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
            *("--override.imports", f'{EXPERTS}={{"row_pool": 16777216}}'),
            NONE,
        ],
    }.items()
}


def train_pipelines(folder: str) -> dict[str, dict[str, Any]]:
    """Two stages, a microbatch a sequence: losses where the last stage is, and passes of a step."""
    torch.autograd.set_multithreading_enabled(False)
    found = {}
    for name, flags in PIPELINES.items():
        debug._clear_sharding_prop_cache()
        trainer = trainer_config(*flags).build()
        for part in trainer.model_parts:
            load(part, Path(folder) / "start")
        data = trainer.batch_generator(trainer.dataloader)
        for step in range(2):
            trainer.step = step + 1
            with CountPasses() as count:
                trainer.train_step(data)
        state = {}
        for part in trainer.model_parts:
            state.update(ModelWrapper(part).state_dict())
        dcp.save(state, checkpoint_id=Path(folder) / name)
        found[name] = {
            "losses": trainer.metrics_processor.losses,
            "norms": trainer.metrics_processor.norms,
            "passes": dict(count.ran),  # of the last step
            "layers": sum(len(part.layers) for part in trainer.model_parts),
        }
        trainer.close()
    return found


def train_alone(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return train_all(folder, ALONE), train_deepseek()


def train_pair(folder: str) -> tuple[dict[str, Any], ...]:
    return train_all(folder, PAIR), split_layers(), split_gpt_oss(), train_pipelines(folder)
