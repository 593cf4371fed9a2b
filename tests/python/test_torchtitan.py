"""uniep.torchtitan with the torchtitan of the package index, on CPUs: its layer and its trainer.

Trainers run in processes of their own: those of one rank in one process, those of two in two.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import Case, make_case, relative
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Modules that torchtitan's trainer imports and no test uses; and a machine without a GPU.

    torchtitan asks once, when it is imported, which device there is.
    """
    modules: dict[str, dict[str, Any]] = {
        "datasets": {"Dataset": object, "load_dataset": None},
        "datasets.distributed": {"split_dataset_by_node": None},
        "torchdata": {},
        "torchdata.stateful_dataloader": {"StatefulDataLoader": type("StatefulDataLoader", (), {})},
        "torch.utils.tensorboard": {"SummaryWriter": None},
    }
    missing = []
    for name, attributes in modules.items():
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
            missing.append(name)
    device = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        yield
    finally:
        torch._utils._get_available_device_type = device
        for name in missing:  # others look whether these packages are there
            del sys.modules[name]


with stand_ins():
    importlib.import_module("torchtitan.models.qwen3.config_registry")
    gpt_oss = importlib.import_module("torchtitan.models.gpt_oss.moe")
    gpt_oss_sharding = importlib.import_module("torchtitan.models.gpt_oss.sharding")
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_routed_experts_config  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.moe_sharding import _routed_experts_sharding_configs  # noqa: E402
from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT  # noqa: E402

import uniep.torchtitan  # noqa: E402

# Relative L2 distances from torchtitan's own layer; docs/torchtitan.md states these limits.
OUTPUT = 1e-2
GRADIENT = 1e-2
LOSS = 5e-3

EXPERTS = "uniep.torchtitan.uniep_routed_experts"
KEEP = "uniep.torchtitan.uniep_selective_ac"


# The layer.


def config_of(case: Case, *, ep: bool = False, **dispatcher: Any) -> Any:
    """torchtitan's config of routed experts of these sizes, with shardings set as its models do."""
    hidden, intermediate, experts, topk = case.shape
    initial = lambda weight: nn.init.normal_(weight, std=0.1)  # noqa: E731
    config = make_routed_experts_config(
        dim=hidden,
        hidden_dim=intermediate,
        num_experts=experts,
        top_k=topk,
        param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), initial),
        comm_backend="standard",
        **dispatcher,
    )
    config.sharding_config, config.inner_experts.sharding_config = _routed_experts_sharding_configs(
        enable_ep=ep, enable_sp=False, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT
    )
    return config


def own_layer(case: Case, dtype: torch.dtype = torch.bfloat16) -> Any:
    """torchtitan's layer with the weights of the case."""
    layer = config_of(case).build()
    gate, up = case.w1.chunk(2, 1)
    weights = {"w1_EFD": gate, "w2_EDF": case.w2, "w3_EFD": up}
    layer.inner_experts.load_state_dict(weights)
    return layer.to(dtype)


def uniep_layer(case: Case, dtype: torch.dtype = torch.bfloat16) -> Any:
    """uniep's, which loads what torchtitan's saved."""
    layer = uniep.torchtitan.uniep_routed_experts(config_of(case)).build().to(dtype)
    layer.load_state_dict(own_layer(case, dtype).state_dict())
    return layer


def layer_step(layer: Any, case: Case, batch: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Output and gradients; `batch`: leading sizes of the input, as [B, L]."""
    x, probs, ids, dy = case.x, case.probs, case.ids.long(), case.dy.to(case.x.dtype)
    if batch:
        x, probs, ids, dy = (t.reshape(*batch, -1) for t in (x, probs, ids, dy))
    x, probs = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    layer.zero_grad()
    counts = torch.bincount(ids.flatten(), minlength=case.w1.shape[0])
    out = layer(x, probs, ids, counts)
    assert out.shape == x.shape and out.dtype == x.dtype
    out.backward(dy)
    found = {"out": out.detach(), "dx": x.grad, "dprobs": probs.grad}
    for name, weight in layer.inner_experts.named_parameters():
        found[name] = weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad
    if "w13_E2FD" in found:
        found["w1_EFD"], found["w3_EFD"] = found.pop("w13_E2FD").chunk(2, 1)
    return {name: t.reshape(-1, t.shape[-1]) if name[0] in "od" else t for name, t in found.items()}


def distances(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: relative(found[name], exact[name]) for name in exact}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_layer_is_torchtitans(dtype: torch.dtype) -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    case.x = case.x.to(dtype)
    own = layer_step(own_layer(case, dtype), case, (4, 24))
    found = layer_step(uniep_layer(case, dtype), case, (4, 24))
    away = distances(found, own)
    print({name: f"{distance:.1e}" for name, distance in away.items()})
    assert away.pop("out") < OUTPUT
    assert {name: distance for name, distance in away.items() if not distance < GRADIENT} == {}
    assert all(found[name].dtype == own[name].dtype for name in own)


def test_the_limits_tell_a_wrong_layer_from_a_right_one() -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    own = layer_step(own_layer(case), case, (4, 24))
    turned = replace(case, w1=torch.cat(case.w1.chunk(2, 1)[::-1], 1))  # up, then gate
    away = distances(layer_step(uniep_layer(turned), case, (4, 24)), own)
    assert away.pop("out") > 10 * OUTPUT
    assert min(away.values()) > 10 * GRADIENT


def test_tokens_come_with_or_without_a_batch() -> None:
    case = make_case()
    layer = uniep_layer(case)
    flat, batch = layer_step(layer, case), layer_step(layer, case, (3, 16))
    assert flat.keys() == batch.keys()
    assert all(torch.equal(flat[name], batch[name]) for name in flat)


def test_the_same_seed_draws_torchtitans_weights() -> None:
    case = make_case()
    drawn = []
    for config in (config_of(case), uniep.torchtitan.uniep_routed_experts(config_of(case))):
        layer = config.build()
        torch.manual_seed(7)
        layer.init_states()
        drawn.append(layer.state_dict())
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    gate, up = drawn[1]["inner_experts.w1_EFD"], drawn[1]["inner_experts.w3_EFD"]
    assert not torch.equal(gate, up)


def test_state_dicts_have_torchtitans_names() -> None:
    case = make_case()
    own, layer = own_layer(case), uniep_layer(case)
    assert [name for name, _ in layer.named_parameters()] == [
        "inner_experts.w13_E2FD",
        "inner_experts.w2_EDF",
    ]
    assert torch.equal(layer.inner_experts.w13_E2FD, case.w1)
    saved = layer.state_dict()
    assert saved.keys() == own.state_dict().keys()
    own.load_state_dict(saved)  # strict: no name is missing, and none too many
    assert torch.equal(own.inner_experts.w1_EFD, case.w1[:, : case.w1.shape[1] // 2])
    assert torch.equal(own.inner_experts.w3_EFD, case.w1[:, case.w1.shape[1] // 2 :])
    # Saved halves are views of the parameter: a state dict takes no memory of its own.
    assert saved["inner_experts.w3_EFD"].untyped_storage().data_ptr() == (
        layer.inner_experts.w13_E2FD.untyped_storage().data_ptr()
    )
    with pytest.raises(RuntimeError, match=r"Missing key.*w13_E2FD"):
        layer.load_state_dict({name: t for name, t in saved.items() if "w3_EFD" not in name})


def test_options_reach_uniep() -> None:
    """max_tokens is one that EP 2 with uneven ranks needs, below."""

    def step(**options: Any) -> dict[str, Tensor]:
        config = uniep.torchtitan.uniep_routed_experts(config_of(case), **options)
        layer = config.build().bfloat16()
        layer.load_state_dict(own_layer(case).state_dict())
        return layer_step(layer, case)

    case = make_case()
    first, second = step(), step(schedule="sequential", max_tokens=64, capacity_rows=1024)
    assert all(torch.equal(first[name], second[name]) for name in first)
    less = step(save="none", recompute_h=True)
    assert all(torch.equal(first[name], less[name]) for name in first)
    in_turns = step(backward_rows=256)
    assert all(torch.equal(first[name], in_turns[name]) for name in first)
    with pytest.raises(RuntimeError, match="backward_rows is 100"):
        step(backward_rows=100)
    paged = step(save="tokens", row_pool=1 << 22)
    assert all(torch.equal(first[name], paged[name]) for name in first)
    (pool,) = uniep.group.group_of(None, case.x.device).row_pools.values()
    assert pool.free_pages == pool.pages > pool.fewest_free_pages
    with pytest.raises(ValueError, match="save is 'all'"):
        step(save="all")
    with pytest.raises(RuntimeError, match="no such preset"):
        step(schedule="no such preset")
    case = make_case(tokens=1500)
    with pytest.raises(RuntimeError, match="capacity"):
        step(capacity_rows=1024)


# gpt-oss: another gate, biases, and rows of gate and up that alternate.


def gpt_oss_config(case: Case, *, ep: bool = False, **options: Any) -> Any:
    hidden, intermediate, experts, _ = case.shape
    layout = gpt_oss_sharding._GPT_OSS_EXPERTS_PARAM_LAYOUT
    initial = lambda weight: nn.init.normal_(weight, std=0.1)  # noqa: E731
    inner = gpt_oss.GptOssGroupedExperts.Config(
        dim=hidden,
        hidden_dim=intermediate,
        num_experts=experts,
        param_init=dict.fromkeys(layout, initial),
        **options,
    )
    config = replace(config_of(case, ep=ep), inner_experts=inner)
    config.sharding_config, inner.sharding_config = _routed_experts_sharding_configs(
        enable_ep=ep, enable_sp=False, expert_param_layout=layout
    )
    return config


def gpt_oss_layers(case: Case) -> tuple[Any, Any]:
    """torchtitan's layer and uniep's, with the same weights and biases."""
    own = gpt_oss_config(case).build()
    torch.manual_seed(3)
    own.init_states()
    layer = uniep.torchtitan.uniep_routed_experts(gpt_oss_config(case)).build()
    layer.load_state_dict(own.state_dict())
    return own.bfloat16(), layer.bfloat16()


def alternating(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of rows in torchtitan's order."""
    turned = {
        name: grads[name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
        for name in ("mlp1_weight_EGD", "mlp1_bias_EG")
    }
    return grads | turned


def test_gpt_oss_is_torchtitans() -> None:
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    case.x = case.x * 2  # a few elements are beyond the limits of the gate, and few at a limit
    own, layer = gpt_oss_layers(case)
    wanted = layer_step(own, case, (4, 24))
    found = alternating(layer_step(layer, case, (4, 24)))
    away = distances(found, wanted)
    print({name: f"{distance:.1e}" for name, distance in away.items()})
    assert away.pop("out") < OUTPUT
    assert {name: distance for name, distance in away.items() if not distance < GRADIENT} == {}


def test_state_dicts_of_gpt_oss_have_torchtitans_names_and_order() -> None:
    case = make_case()
    own, layer = gpt_oss_layers(case)
    saved, wanted = layer.state_dict(), own.state_dict()
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)
    weight, held = wanted["inner_experts.mlp1_weight_EGD"], layer.inner_experts.mlp1_weight_EGD
    assert torch.equal(held, torch.cat([weight[:, ::2], weight[:, 1::2]], 1))  # in halves
    torch.manual_seed(3)
    layer.float().init_states()
    drawn = layer.bfloat16().state_dict()
    assert all(torch.equal(drawn[name], wanted[name]) for name in wanted)


def test_scores_before_the_second_projection() -> None:
    """The same but for roundings."""
    case = make_case(tokens=96, hidden=128, intermediate=64, topk=3)
    after = layer_step(uniep_layer(case), case)
    config = uniep.torchtitan.uniep_routed_experts(config_of(case), probs="before")
    layer = config.build().bfloat16()
    layer.load_state_dict(own_layer(case).state_dict())
    away = distances(layer_step(layer, case), after)
    assert min(away.values()) > 0 and max(away.values()) < GRADIENT


# What is refused.


def refused(config: Any, sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        uniep.torchtitan.uniep_routed_experts(config)


def test_other_experts_are_refused() -> None:
    @dataclass(kw_only=True, slots=True)
    class Quantised(GroupedExperts.Config):
        pass

    @dataclass(kw_only=True, slots=True)
    class Other(RoutedExperts.Config):
        pass

    config = config_of(make_case())
    sizes = {"dim": 64, "hidden_dim": 32, "num_experts": 8}
    refused(
        replace(config, inner_experts=Quantised(**sizes)),
        "is not torchtitan's own GroupedExperts.Config, nor that of gpt-oss",
    )
    refused(gpt_oss_config(make_case(), swiglu_limit=5.0), "swiglu_limit is 5.0; it must be 7.0")
    parts = {"inner_experts": config.inner_experts, "token_dispatcher": config.token_dispatcher}
    refused(Other(**parts), "is not torchtitan's own RoutedExperts")


def test_dropping_tokens_is_refused() -> None:
    case = make_case()
    config = config_of(case)
    dispatcher = make_routed_experts_config(
        dim=64,
        hidden_dim=32,
        num_experts=8,
        top_k=2,
        param_init={},
        comm_backend="hybridep",
        non_blocking_capacity_factor=0.5,
    ).token_dispatcher
    refused(replace(config, token_dispatcher=dispatcher), "drops tokens, which uniep never does")


def test_tensor_parallelism_inside_experts_is_refused() -> None:
    layer = uniep.torchtitan.uniep_routed_experts(config_of(make_case())).build()
    dims = types.SimpleNamespace(tp=2, ep=1)
    with pytest.raises(NotImplementedError, match="does not split an expert over ranks"):
        layer.parallelize(dims)


def test_compiled_blocks_have_the_same_bits() -> None:
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    layer = torch.compile(uniep_layer(case), fullgraph=True, backend="aot_eager")
    found = layer_step(layer, case)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_policy_of_its_own_is_refused() -> None:
    @dataclass(kw_only=True, slots=True)
    class Own(SelectiveAC.Config):
        pass

    with pytest.raises(NotImplementedError, match=r"add torch.ops.uniep.forward.default to what"):
        uniep.torchtitan.uniep_selective_ac(Own())


# The trainer.


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
        self.color = types.SimpleNamespace(blue="", red="", reset="")
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


def trainer_config(*flags: str) -> Any:
    """torchtitan's qwen3_moe_debug, from its command line, with less in it."""
    subcommands = [flag for flag in flags if flag.startswith("activation_checkpoint:")]
    config = ConfigManager().parse_args(
        ["--module", "qwen3", "--config", "qwen3_moe_debug"]
        + [flag for flag in flags if flag not in subcommands]
        + ["--training.seq_len", "16", "--training.disable_cuda_graphs", "--debug.seed", "0"]
        + ["--training.local_batch_size", str(4 // dist.get_world_size())]
        + subcommands
    )
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex has no CPU
        moe = layer.moe
        sizes = {"num_experts": 8}
        experts = replace(moe.routed_experts.inner_experts, hidden_dim=64, **sizes)
        dispatcher = replace(moe.routed_experts.token_dispatcher, top_k=2, **sizes)
        moe.num_experts = 8
        moe.router = replace(
            moe.router, top_k=2, gate=replace(moe.router.gate, out_features=8), **sizes
        )
        moe.routed_experts = replace(
            moe.routed_experts, inner_experts=experts, token_dispatcher=dispatcher
        )
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


class CountForwards(TorchDispatchMode):
    """How often uniep's forward runs; not seen is what selective checkpointing has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.forwards += func is torch.ops.uniep.forward.default
        return func(*args, **(kwargs or {}))


def load(model: nn.Module, checkpoint: Path) -> None:
    """What torchtitan's checkpointer does with a model."""
    wrapper = ModelWrapper(model)
    weights = wrapper.state_dict()
    dcp.load(weights, checkpoint_id=checkpoint)
    wrapper.load_state_dict(weights)


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
                fused = layer.moe.routed_experts.inner_experts.w13_E2FD
                fused.copy_(torch.cat(fused.chunk(2, 1)[::-1], 1))  # up, then gate
    data = trainer.batch_generator(trainer.dataloader)
    forwards = []
    for step in range(steps):
        trainer.step = step + 1
        with CountForwards() as count:
            trainer.train_step(data)
        forwards.append(count.forwards)
    experts = model.layers["0"].moe.routed_experts.inner_experts
    weight = next(experts.parameters())
    dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=Path(folder) / name)
    trainer.close()
    return {
        "losses": trainer.metrics_processor.losses,
        "norms": trainer.metrics_processor.norms,
        "forwards": forwards,  # of each step
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
ALONE: dict[str, list[str]] = {
    "torchtitan": [IN_TURN, NONE],
    "uniep": [*UNIEP, IN_TURN, NONE],
    "selective": [*UNIEP, IN_TURN, "activation_checkpoint:selective"],
    "selective, kept": [*KEPT, IN_TURN, "activation_checkpoint:selective"],
    "full": [*UNIEP, IN_TURN, "activation_checkpoint:full"],
    "typechecked": [*UNIEP, "--debug.spmd_typechecking", IN_TURN, NONE],
    "turned": [*UNIEP, IN_TURN, NONE],
}
EP2 = ["--parallelism.expert_parallel_degree", "2"]
PAIR: dict[str, list[str]] = {
    "FSDP 2": [*UNIEP, IN_TURN, NONE],
    "EP 2": [*UNIEP, *EP2, IN_TURN, NONE],
    "EP 2, kept": [*KEPT, *EP2, IN_TURN, "activation_checkpoint:selective"],
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
        for weight, part in zip(layer.inner_experts.parameters(), (case.w1, case.w2), strict=True):
            weight.to_local().copy_(part)
    found: dict[str, Any] = layer_step(layer, case)

    case = make_case()
    layer = uniep.torchtitan.uniep_routed_experts(config_of(case)).build().bfloat16()
    experts = layer.inner_experts
    mesh = dims.get_mesh("batch")
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    experts.set_force_sum_reduction_for_comms(True)
    experts.set_gradient_divide_factor(1.0)
    layer.init_states()
    drawn = experts.w13_E2FD.full_tensor().detach().float()
    own = own_layer(case).inner_experts.state_dict()
    experts.load_state_dict({n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in own.items()})
    saved = experts.state_dict()
    out = layer(case.x, case.probs, case.ids, None)
    out.backward(case.dy)
    found["rows"] = {name: weight.full_tensor() for name, weight in saved.items()} | {
        "local": list(saved["w1_EFD"].to_local().shape),
        "out": out.detach(),
        "dw13": experts.w13_E2FD.grad.full_tensor(),
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


def train_pair(folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return train_all(folder, PAIR), split_layers(), split_gpt_oss()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all trainers found; and under "folder" their weights before and after."""
    folder = tmp_path_factory.mktemp("torchtitan")
    alone = run_ranks(1, train_all, str(folder), ALONE)[0]
    (first, *one), (second, *other) = run_ranks(2, train_pair, str(folder))
    for name in PAIR:  # every rank logs the loss of all
        assert first[name]["losses"] == second[name]["losses"], name
    layers, gpt_oss_parts = zip(one, other, strict=True)
    return {**alone, **first, "folder": folder, "layers": layers, "gpt_oss": gpt_oss_parts}


def away(found: dict[str, Any], own: dict[str, Any]) -> float:
    """The largest relative distance of a loss or of a norm of gradients."""
    pairs = zip(found["losses"] + found["norms"], own["losses"] + own["norms"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def test_a_trainer_with_uniep_is_one_without(runs: dict[str, Any]) -> None:
    own = runs["torchtitan"]
    assert own["experts"] == "GroupedExperts" and own["forwards"] == [0, 0]
    for name in ("uniep", "FSDP 2", "EP 2", "torchtitan, EP 2", "turned"):
        print(f"{name}: {away(runs[name], own):.1e}")
    for name in ("uniep", "FSDP 2", "EP 2"):
        assert runs[name]["experts"] == "UniepExperts" and runs[name]["fsdp"]
        assert runs[name]["parameters"] == ["w13_E2FD", "w2_EDF"]
        assert runs[name]["forwards"] == [2, 2]
        assert away(runs[name], own) < LOSS
    assert away(runs["torchtitan, EP 2"], own) < LOSS
    assert away(runs["turned"], own) > 10 * LOSS


def test_experts_are_spread_over_ranks(runs: dict[str, Any]) -> None:
    """By expert parallelism or by FSDP2: each rank keeps 4 of 8 experts."""
    assert runs["uniep"]["local"] == [8, 128, 256]
    assert runs["FSDP 2"]["local"] == runs["EP 2"]["local"] == [4, 128, 256]


def test_the_first_loss_does_not_depend_on_ranks(runs: dict[str, Any]) -> None:
    """Losses of ranks are added up, so the last bit is PyTorch's affair; uniep's part is equal."""
    assert runs["EP 2"]["losses"][0] == runs["FSDP 2"]["losses"][0]
    assert runs["EP 2"]["losses"][0] == pytest.approx(runs["uniep"]["losses"][0], rel=1e-6)


@pytest.mark.parametrize("backend", ["typechecked", "partial_dtensor", "full_dtensor"])
def test_every_backend_of_torchtitan_has_the_same_bits(runs: dict[str, Any], backend: str) -> None:
    same_training(
        runs, f"EP 2, {backend}", "EP 2" if backend.startswith("part") else "EP 2, routed"
    )


def test_checkpointing_changes_no_bit(runs: dict[str, Any]) -> None:
    for name in ("selective", "selective, kept", "full", "typechecked"):
        same_training(runs, name, "uniep")
    same_training(runs, "EP 2, kept", "EP 2")


def test_selective_checkpointing_keeps_what_it_is_told_to(runs: dict[str, Any]) -> None:
    """Two layers: their forwards run twice a step, unless what they computed is kept."""
    forwards = {name: runs[name]["forwards"] for name in {**ALONE, **PAIR}}
    assert forwards["full"] == forwards["selective"] == [4, 4]
    assert forwards["selective, kept"] == forwards["EP 2, kept"] == [2, 2]


def weights(runs: dict[str, Any], name: str) -> dict[str, Tensor]:
    """A checkpoint, as torchtitan's own model reads it in one process."""
    return dict(read(str(runs["folder"] / name)))


@functools.cache
def read(path: str) -> tuple[tuple[str, Tensor], ...]:
    reader = dcp.FileSystemReader(path)
    found = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return tuple(found.items())


def same_training(runs: dict[str, Any], name: str, other: str) -> None:
    """Losses, norms and trained weights, bit by bit."""
    assert runs[name]["losses"] == runs[other]["losses"]
    assert runs[name]["norms"] == runs[other]["norms"]
    found, wanted = weights(runs, name), weights(runs, other)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_checkpoints_are_torchtitans(runs: dict[str, Any]) -> None:
    """Names and shapes of all weights; and those of experts have become what they do there."""
    own, start = weights(runs, "torchtitan"), weights(runs, "start")
    experts = [name for name in own if "inner_experts" in name]
    assert sorted({name.rpartition(".")[2] for name in experts}) == ["w1_EFD", "w2_EDF", "w3_EFD"]
    for run in ("uniep", "FSDP 2", "EP 2"):
        found = weights(runs, run)
        assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in own.items()}
        for name in experts:
            moved, distance = relative(found[name], start[name]), relative(found[name], own[name])
            assert 2 * distance < moved, f"{run}, {name}: {distance:.1e} of {moved:.1e}"


def test_ep_2_is_ep_1_to_the_bit(runs: dict[str, Any]) -> None:
    """The layer alone; ranks have different numbers of tokens."""
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    first, second = runs["layers"]
    for name, tensor in wanted.items():
        assert torch.equal(torch.cat([first[name], second[name]]), tensor), name


def test_gpt_oss_at_ep_2_is_at_ep_1_to_the_bit(runs: dict[str, Any]) -> None:
    case = make_case()
    own, layer = gpt_oss_layers(case)
    first, second = runs["gpt_oss"]
    for name, tensor in layer_step(layer, case).items():
        assert torch.equal(torch.cat([first[name], second[name]]), tensor), name
    for state in first["rows"] + second["rows"]:  # in torchtitan's order however rows are split
        wanted = own.inner_experts.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_experts_that_fsdp_splits_by_rows(runs: dict[str, Any]) -> None:
    """As torchtitan has it split them where experts are fewer than ranks."""
    case = make_case()
    wanted = layer_step(uniep_layer(case), case)
    gate, up = case.w1.chunk(2, 1)
    for found in (layer["rows"] for layer in runs["layers"]):
        assert torch.equal(found["w1_EFD"], gate) and torch.equal(found["w3_EFD"], up)
        assert torch.equal(found["w2_EDF"], case.w2)
        assert found["local"] == [8, 16, 64]  # of 32 rows of w1 and of w3
        assert torch.equal(found["out"], wanted["out"])
        dw13 = torch.cat([wanted["w1_EFD"], wanted["w3_EFD"]], 1)
        assert torch.equal(found["dw13"], 2 * dw13)  # both ranks have these tokens
        drawn = found["drawn"]
        assert drawn.std() == pytest.approx(0.1, rel=0.05)
        assert relative(drawn[:, :32], drawn[:, 32:]) > 1
