"""What test_megatron.py runs in the processes of an expert-parallel group, on CPUs over gloo.

Importing Megatron-Core takes seconds, so a process runs all cases, one after another: the functions
whose names begin with `case_`. Results are compared with Megatron's own layer, which has the same
weights and the allgather dispatcher.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Largest relative L2 distances from Megatron's layer; docs/megatron.md states them.
OUTPUT = 5e-3
OTHER_OUTPUT = 1e-2  # of experts that are not SwiGLU without biases
KINK_GRADIENT = 4e-2  # of activations with a kink
GRADIENT = 1e-2
MODEL_GRADIENT = 3e-2

HIDDEN, INTERMEDIATE, EXPERTS = 64, 48, 8


# Megatron on a CPU.


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what Megatron makes on "cuda", and calls that type by its name there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):  # its optimizers ask for these
            found = found.replace("torch.", "torch.cuda.")
        return found


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils

    random.CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    # What megatron-core 0.16 lacks without TransformerEngine; later ones have the same.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # SequentialMLP adds biases in place to what this returns, and on one rank that is a view.
    reduce = layers.reduce_from_tensor_model_parallel_region
    layers.reduce_from_tensor_model_parallel_region = lambda *args, **options: reduce(
        *args, **options
    ).clone()
    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        if not hasattr(linear, "backward_dw"):  # their weight gradients do not wait
            linear.backward_dw = lambda self: None


def _groups(expert_parallel: int) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
    )


def run_all(folder: str, only: str) -> None:
    """Runs the cases; a file of this rank in `folder` has the names of those that are done."""
    warnings.simplefilter("ignore")
    _patch_cuda()
    _groups(dist.get_world_size())
    done = Path(folder) / f"done{dist.get_rank()}"
    for name, case in cases().items():
        if only and only != name:
            continue
        try:
            arguments = [folder] if case.__code__.co_argcount else []
            outcome = case(*arguments) or "passed"
        except BaseException:
            outcome = traceback.format_exc()
        with done.open("a") as file:
            file.write(f"{name}\0{outcome}\0\n")
        failed = outcome != "passed" and not outcome.startswith("skipped")
        if failed and dist.get_world_size() > 1:
            for child in multiprocessing.active_children():  # Megatron's, of checkpoints
                child.kill()
            os._exit(1)  # the other ranks wait for this one; their launcher ends them
        dist.barrier()
    lines = [f"{what} {distance}\n" for what, distance in _figures]
    (Path(folder) / f"figures{dist.get_rank()}").write_text("".join(lines))


def cases() -> dict[str, Callable[..., str | None]]:
    """All cases by name."""
    return {n.removeprefix("case_"): f for n, f in globals().items() if n.startswith("case_")}


# Layers and models.


def _config(**options: Any) -> Any:
    """A TransformerConfig; options of other versions are left out."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": INTERMEDIATE,
        "moe_ffn_hidden_size": INTERMEDIATE,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "expert_model_parallel_size": dist.get_world_size(),
        "expert_tensor_parallel_size": 1,
    }
    return TransformerConfig(**{**values, **options})


def _spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)


def _layer(config: Any, **options: Any) -> Any:
    """The MoE layer of Megatron's spec; with options, uniep's."""
    from megatron.core.transformer.spec_utils import build_module

    from uniep.megatron import with_uniep

    spec = with_uniep(_spec(), **options) if options else _spec()
    mlp = spec.submodules.mlp
    return mlp(config=config) if callable(mlp) else build_module(mlp, config=config)


def _pair(seed: int = 1, **options: Any) -> tuple[Any, Any]:
    """Megatron's layer and uniep's, with the same weights."""
    layout = options.pop("layout", "stacked")
    torch.manual_seed(seed)
    theirs, ours = _layer(_config(**options)), _layer(_config(**options), layout=layout)
    _draw_biases(theirs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def _draw_biases(layer: Any) -> None:
    """Megatron begins with zeros, which are not seen."""
    with torch.no_grad():
        for name, param in layer.experts.named_parameters():
            if "bias" in name:
                param.normal_(0, 0.2)


def _experts(layer: Any, attribute: str) -> list[Tensor]:
    """`attribute` of fc1's and fc2's weights, or the weights themselves, as [experts, ...].

    And of their biases, where they have some.
    """
    found = []
    kinds = ("weight", "bias") if layer.config.add_bias_linear else ("weight",)
    for kind, name in ((kind, name) for kind in kinds for name in ("linear_fc1", "linear_fc2")):
        if hasattr(layer.experts, "local_experts"):
            params = [getattr(getattr(e, name), kind) for e in layer.experts.local_experts]
            stacked = False
        else:
            named = getattr(layer.experts, name).named(kind)
            params, stacked = list(named.values()), kind in named
        tensors = [p.detach() if attribute == "data" else getattr(p, attribute) for p in params]
        found.append(tensors[0] if stacked else torch.stack(tensors))
    return [tensor.clone() for tensor in found]


def _tokens(seed: int = 0, length: int = 16) -> Tensor:
    torch.manual_seed(100 * seed + dist.get_rank())
    return torch.randn(length, 2, HIDDEN, dtype=torch.bfloat16)


def _run(layer: Any, x: Tensor) -> list[Tensor]:
    """Output and gradient of the input."""
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    assert bias is None
    out.backward(_gradient(x))
    assert x.grad is not None
    return [out.detach(), x.grad]


def _gradient(x: Tensor) -> Tensor:
    return (0.5 + x.detach().float().roll(1, 0)).bfloat16()


def _distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _close(found: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    distance = _distance(found, wanted)
    assert distance < limit, f"{what}: relative L2 distance {distance:.2e}, at most {limit:.0e}"
    _figures.append((what, distance))


def _same(found: Any, wanted: Any, what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), f"{what}: distance {_distance(one, other):.2e}"


_figures: list[tuple[str, float]] = []  # distances of this process, for the guide


# The layer beside Megatron's.

_ROUTERS: list[dict[str, Any]] = [
    {},
    {"moe_router_topk": 4, "moe_shared_expert_intermediate_size": 32, "moe_aux_loss_coeff": 1e-2},
    {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": False,
    },
    {"moe_router_dtype": None, "moe_router_pre_softmax": True},
]


def case_equals_megatron() -> None:
    for number, router in enumerate(_ROUTERS):
        for layout in ("stacked", "per_expert"):
            theirs, ours = _pair(number, layout=layout, **router)
            wanted, found = _run(theirs, _tokens(number)), _run(ours, _tokens(number))
            what = f"router {number}, {layout}"
            _close(found[0], wanted[0], OUTPUT, f"out, {what}")
            _close(found[1], wanted[1], GRADIENT, f"dx, {what}")
            for gradient, own in zip(_experts(theirs, "grad"), _experts(ours, "grad"), strict=True):
                _close(own, gradient, GRADIENT, f"dw, {what}")
            _close(ours.router.weight.grad, theirs.router.weight.grad, GRADIENT, f"router, {what}")
            if theirs.shared_experts is not None:
                for own, other in zip(
                    ours.shared_experts.parameters(),
                    theirs.shared_experts.parameters(),
                    strict=True,
                ):
                    _same([own.grad], [other.grad], f"shared experts, {what}")


def _other_experts() -> dict[str, dict[str, Any]]:
    """Experts that are not SwiGLU without biases, by what uniep calls their activation."""
    from megatron.core.activations import quick_gelu, squared_relu

    return {
        "gpt_oss": {
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "add_bias_linear": True,
        },
        "geglu": {"activation_func": F.gelu},
        "reglu": {"activation_func": F.relu},
        "swiglu": {"add_bias_linear": True},
        "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
        "gelu": {"activation_func": F.gelu, "gated_linear_unit": False, "add_bias_linear": True},
        "silu": {"gated_linear_unit": False},
    }


def case_other_experts() -> None:
    torch.compiler.set_stance("force_eager")  # Megatron compiles its activations
    layers = []  # all at once: none takes the workspace of another kind
    for activation, options in _other_experts().items():
        for layout in ("stacked", "per_expert"):
            theirs, ours = _pair(layout=layout, **options)
            layers.append(ours)
            wanted, found = _run(theirs, _tokens()), _run(ours, _tokens())
            what = f"{activation}, {layout}"
            workspace = ours.experts.routed.workspace.arithmetic
            bias = bool(options.get("add_bias_linear"))
            assert tuple(workspace) == (activation, "before", bias), workspace
            _close(found[0], wanted[0], OTHER_OUTPUT, f"out, {what}")
            # At relu's kink, and at gpt-oss' limits, a rounding of h decides.
            limit = KINK_GRADIENT if activation in ("reglu", "gpt_oss") else GRADIENT
            _close(found[1], wanted[1], limit, f"dx, {what}")
            theirs_grads, own_grads = _experts(theirs, "grad"), _experts(ours, "grad")
            assert len(own_grads) == (4 if bias else 2)
            for gradient, own in zip(theirs_grads, own_grads, strict=True):
                _close(own, gradient, limit, f"gradient {list(own.shape)}, {what}")
            _close(ours.router.weight.grad, theirs.router.weight.grad, limit, f"router, {what}")


def case_biases_in_main_grads() -> None:
    """Main gradients and delayed ones are those of a plain backward, for biases too."""
    for layout, delay in ((a, b) for a in ("stacked", "per_expert") for b in (False, True)):
        what = f"{layout} {delay=}"
        _, plain = _pair(layout=layout, add_bias_linear=True)
        out = _run(plain, _tokens())
        wanted = _experts(plain, "grad")
        for fused in (False, True):
            _, ours = _pair(layout=layout, add_bias_linear=True)
            ours.config.gradient_accumulation_fusion = fused
            ours.config.delay_wgrad_compute = delay
            if fused:
                for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
                    for kind in ("weight", "bias"):
                        params = list(linear.named(kind).values())
                        grads = torch.zeros(len(params), *params[0].shape, dtype=torch.bfloat16)
                        for param, grad in zip(params, grads, strict=True):
                            param.main_grad = grad
            _same(_run(ours, _tokens()), out, what)
            if delay:
                assert fused or all(param.grad is None for param in ours.experts.parameters())
                ours.experts.backward_dw()
            _same(_experts(ours, "main_grad" if fused else "grad"), wanted, f"{what} {fused=}")


def case_layouts_have_the_same_bits() -> None:
    results = []
    for layout in ("stacked", "per_expert"):
        _, ours = _pair(layout=layout)
        results.append([*_run(ours, _tokens()), *_experts(ours, "grad")])
    _same(results[0], results[1], "layouts")


def case_row_pool() -> None:
    """Layers of a shape share one; with their backward all pages are free again."""
    _, ours = _pair()
    wanted = [*_run(ours, _tokens()), *_experts(ours, "grad")]
    for save in ("rows", "tokens"):
        layers = [_layer(_config(), save=save, row_pool=1 << 21) for _ in range(2)]
        results = []
        for layer in layers:
            layer.load_state_dict(ours.state_dict())
            results.append([*_run(layer, _tokens()), *_experts(layer, "grad")])
        pool, other = (layer.experts.routed.workspace.row_pool for layer in layers)
        assert pool is other, "not shared"
        assert pool.free_pages == pool.pages > pool.fewest_free_pages
        for found in results:
            _same(found, wanted, f"save={save}")


def case_backward_rows() -> None:
    """Experts take turns in memory for fewer rows, a workspace of its own; the same bits."""
    _, ours = _pair()
    wanted = [*_run(ours, _tokens()), *_experts(ours, "grad")]
    layers = [_layer(_config(), backward_rows=rows) for rows in (0, 256)]
    for layer in layers:
        layer.load_state_dict(ours.state_dict())
        _same([*_run(layer, _tokens()), *_experts(layer, "grad")], wanted, "backward_rows")
    every, fewer = (layer.experts.routed.workspace for layer in layers)
    assert fewer.backward_rows == 256
    assert fewer.backward_bytes < every.backward_bytes
    _raises(
        ValueError,
        "backward_rows is 256; where delay_wgrad_compute is True",
        _layer,
        _config(delay_wgrad_compute=True),
        backward_rows=256,
    )


def case_dropped_routes() -> None:
    """moe_expert_capacity_factor without padding: the router drops routes, uniep takes the rest."""
    from uniep.megatron import UniepMoELayer

    config = _config(moe_token_dispatcher_type="alltoall", moe_expert_capacity_factor=0.5)
    torch.manual_seed(3)
    layer = _layer(config, layout="stacked")
    assert isinstance(layer, UniepMoELayer)
    found = _run(layer, _tokens())
    probs, routing_map = layer.route(_tokens())
    assert int((routing_map.sum(1) < config.moe_router_topk).sum()) > 0, "nothing was dropped"
    w1, w2 = _gathered(_experts(layer, "data"))
    x = _tokens().view(-1, HIDDEN)
    wanted = torch.zeros(len(x), HIDDEN)
    for expert in range(EXPERTS):
        rows = routing_map[:, expert]
        gate, up = (x[rows].float() @ w1[expert].float().t()).chunk(2, 1)
        a = probs[rows, expert, None].float() * F.silu(gate) * up
        wanted[rows] += a @ w2[expert].float().t()
    _close(found[0].view(-1, HIDDEN), wanted.detach(), 1e-2, "out with dropped routes")


def _gathered(tensors: list[Tensor]) -> list[Tensor]:
    """Of the experts of all ranks of the expert-parallel group."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    found = []
    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        found.append(torch.cat(parts))
    return found


def case_model_equals_megatron() -> None:
    """Loss and gradients of a GPTModel with dense and MoE layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from uniep.megatron import UniepMoELayer, with_uniep

    models = []
    for ours in (False, True):
        torch.manual_seed(3)
        config = _config(
            num_layers=3, moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=32
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        spec = with_uniep(spec) if ours else spec
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope").bfloat16()
        assert isinstance(model.decoder.layers[1].mlp, UniepMoELayer) == ours
        models.append(model)
    theirs, ours_model = models
    ours_model.load_state_dict(theirs.state_dict())
    losses = []
    for model in models:
        loss = model(**_text(0)).float().mean()
        loss.backward()
        losses.append(loss.detach())
    _close(losses[1], losses[0], 1e-3, "loss")
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    for name, param in ours_model.named_parameters():
        assert param.grad is not None, name
        if name in gradients:
            _close(param.grad, gradients[name], MODEL_GRADIENT, f"gradient of {name}")
    for layer, other in zip(ours_model.decoder.layers[1:], theirs.decoder.layers[1:], strict=True):
        for own, gradient in zip(
            _experts(layer.mlp, "grad"), _experts(other.mlp, "grad"), strict=True
        ):
            _close(own, gradient, MODEL_GRADIENT, "gradient of experts in a model")


def _text(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(100 * seed + dist.get_rank())
    tokens = torch.randint(0, 128, (2, 32))
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(32).expand(2, 32),
        "attention_mask": torch.ones(1, 1, 32, 32).tril() < 0.5,
        "labels": tokens.roll(-1, 1),
    }


def case_evaluation() -> None:
    _, ours = _pair()
    wanted = ours(_tokens())[0].detach()
    with torch.no_grad():
        _same([ours(_tokens())[0]], [wanted], "under no_grad")
    ours.eval()
    _same([ours(_tokens())[0].detach()], [wanted], "in eval")
    for param in ours.experts.parameters():
        param.requires_grad_(False)
    ours.train()
    _run(ours, _tokens())
    assert all(param.grad is None for param in ours.experts.parameters()), "frozen experts"


def case_recompute() -> None:
    """recompute_modules "moe" gives the bits of a layer without, and "moe_act" changes nothing."""
    results = []
    for modules in ([], ["moe"], ["moe_act"]):
        config = _config(moe_grouped_gemm=True)
        torch.manual_seed(1)
        if modules:
            config.recompute_granularity, config.recompute_modules = "selective", modules
        ours = _layer(config, layout="stacked")
        assert ours.moe_layer_recompute == (modules == ["moe"])
        results.append([*_run(ours, _tokens()), *_experts(ours, "grad"), ours.router.weight.grad])
    for recomputed in results[1:]:
        _same(recomputed, results[0], "recomputed")


# Main gradients.


def _wrapped(layer: Any, *, fp32: bool, distributed: bool, delay: bool = False) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(layer.config)
            self.mlp = layer

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mlp(x)[0]
            return out

    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=fp32,
        overlap_grad_reduce=True,  # then its hooks assert that there is a gradient
        use_distributed_optimizer=distributed,
        bucket_size=20000,
        delay_wgrad_compute=delay,
    )
    return DistributedDataParallel(layer.config, options, Model())


def _train(model: Any, *, steps: int = 2, delay: bool = False) -> None:
    """Two microbatches, into the main gradients."""
    model.zero_grad_buffer()
    for step in range(steps):
        with contextlib.nullcontext() if step == steps - 1 else model.no_sync():
            x = _tokens(step)
            out = model(x)
            out.backward(_gradient(x))
            if delay:
                model.module.mlp.backward_dw()
    model.finish_grad_sync()


def case_main_grads() -> None:
    """DDP with every mixture of options has the main gradients of Megatron's layer."""
    choices = (False, True)
    for layout in ("stacked", "per_expert"):
        plain: dict[bool, list[Tensor]] = {}
        for fused, fp32, distributed, delay in (
            (a, b, c, d) for a in choices for b in choices for c in choices for d in choices
        ):
            what = f"{layout} {fused=} {fp32=} {distributed=} {delay=}"
            theirs, ours = _pair(layout=layout)
            # After the layer was built: Megatron's linear layers want an extension for it.
            ours.config.gradient_accumulation_fusion = fused
            ours.config.delay_wgrad_compute = delay
            for param in ours.experts.parameters():
                param.skip_backward_post_hook = delay
            reference = _wrapped(theirs, fp32=fp32, distributed=distributed)
            _train(reference)
            model = _wrapped(ours, fp32=fp32, distributed=distributed, delay=delay)
            _train(model, delay=delay)
            wanted, found = _experts(theirs, "main_grad"), _experts(ours, "main_grad")
            for own, other in zip(found, wanted, strict=True):
                assert own.dtype == (torch.float32 if fp32 else torch.bfloat16)
                _close(own, other, GRADIENT, f"main_grad, {fused=} {fp32=}")
            for param in ours.experts.parameters():
                assert param.grad is None, f"{what}: the hook did not run"
                assert param.grad_added_to_main_grad == fused, what
            if fused:  # neither DDP's memory nor delay changes a bit
                _same(found, plain.setdefault(fp32, found), what)


def case_main_grad_without_ddp() -> None:
    """A main_grad without DDP is added to; param.grad reads as zeros and takes no memory."""
    for dtype in (torch.float32, torch.bfloat16):
        _, ours = _pair()
        ours.config.gradient_accumulation_fusion = True
        for param in ours.experts.parameters():
            param.main_grad = torch.ones(param.shape, dtype=dtype)
        for step in range(2):
            _run(ours, _tokens(step))
        once, twice = [], []
        for step in range(2):
            _, alone = _pair()
            _run(alone, _tokens(step))
            once.append(_experts(alone, "grad"))
        twice = [1 + a.float() + b.float() for a, b in zip(*once, strict=True)]
        for found, wanted in zip(_experts(ours, "main_grad"), twice, strict=True):
            _close(found, wanted, 5e-3, f"{dtype} main_grad added to ones")
        for param in ours.experts.parameters():
            assert param.grad is not None and not param.grad.any()
            assert param.grad.untyped_storage().nbytes() <= 2


def case_main_grad_errors() -> None:
    def refused(change: Callable[[Any], None], sentence: str) -> None:
        _, ours = _pair()
        ours.config.gradient_accumulation_fusion = True
        for param in ours.experts.parameters():
            param.main_grad = torch.zeros(param.shape)
        change(ours.experts.linear_fc1.weight)
        _raises(RuntimeError, sentence, _run, ours, _tokens())

    refused(lambda p: delattr(p, "main_grad"), "linear_fc1.weight has no main_grad")
    refused(lambda p: setattr(p, "zero_out_wgrad", True), "zero_out_wgrad=True")
    refused(lambda p: setattr(p, "main_grad", p.main_grad.half()), "is torch.float16")
    refused(lambda p: setattr(p, "main_grad", p.main_grad.transpose(1, 2)), "must be contiguous")
    refused(
        lambda p: p.register_post_accumulate_grad_hook(lambda _: None) and None,
        "post-accumulate-grad hook",
    )


def _raises(kind: type[BaseException], sentence: str, call: Any, *args: Any, **kw: Any) -> str:
    try:
        call(*args, **kw)
    except kind as error:
        assert sentence in str(error), f"{sentence!r} is not in {error}"
        return str(error)
    raise AssertionError(f"nothing was raised; wanted was {sentence!r}")


def case_per_expert_in_foreign_order() -> None:
    """Main gradients in descending order of experts, as DDP lays out Megatron's own experts."""
    from uniep.megatron.weights import stacked_view

    results = []
    for backwards in (False, True):
        _, ours = _pair(layout="per_expert")
        ours.config.gradient_accumulation_fusion = True
        for linear in (ours.experts.linear_fc1, ours.experts.linear_fc2):
            params = list(linear.named().values())
            whole = torch.zeros(len(params), *params[0].shape)
            ordered = params[::-1] if backwards else params
            for param, grad in zip(ordered, whole, strict=True):
                param.main_grad = grad
        results.append([*_run(ours, _tokens()), *_experts(ours, "main_grad")])
        found = stacked_view(list(ours.experts.linear_fc1.named().values()))
        assert found is not None and found[1] == backwards
    _same(results[0], results[1], "order of experts in memory")

    _, ours = _pair(layout="per_expert")
    ours.config.gradient_accumulation_fusion = True
    for param in ours.experts.parameters():
        param.main_grad = torch.zeros(param.shape)
    if ours.num_local_experts > 1:
        _raises(RuntimeError, "lie apart", _run, ours, _tokens())


def case_moved_parameters() -> None:
    """Parameters that are moved apart, as .cuda() does it, come together again."""
    _, ours = _pair(layout="per_expert")
    wanted = _run(ours, _tokens())
    for param in ours.experts.parameters():
        param.data = param.data.clone()
        param.grad = None
    _same(_run(ours, _tokens()), wanted, "moved parameters")
    with torch.no_grad():
        ours.experts.linear_fc2.weight0.zero_()
    assert not torch.equal(_run(ours, _tokens())[0], wanted[0]), "a parameter is not in use"


def case_optimizer_steps() -> None:
    """Megatron's mixed-precision Adam over uniep's parameters, and its checkpoint."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )
    with _OnCpu():
        norms = []
        for layout in ("megatron", "stacked", "per_expert"):
            theirs, ours = _pair(layout="stacked" if layout == "megatron" else layout)
            layer = theirs if layout == "megatron" else ours
            layer.config.gradient_accumulation_fusion = layout != "megatron"
            model = _wrapped(layer, fp32=True, distributed=False)
            optimizer = get_megatron_optimizer(options, [model])
            for _ in range(2):
                _train(model)
                succeeded, norm, _ = optimizer.step()
                assert succeeded
            norms.append(torch.tensor(norm))
        _close(norms[1], norms[0], 1e-2, "norm of all gradients")
        _close(norms[2], norms[1], 1e-6, "norm with per_expert")


# Schedules.


def case_overlapped_schedule() -> str | None:
    """Megatron's 1F1B overlap, which frees inputs, with and without delay_wgrad_compute."""
    if dist.get_world_size() == 1:
        return "skipped: overlap_moe_expert_parallel_comm needs two ranks"
    try:
        from megatron.core.models.common.model_chunk_schedule_plan import (
            TransformerModelChunkSchedulePlan as Plan,
        )
    except ImportError:
        return "skipped: this megatron-core has another module for it"
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel.utils import set_streams

    from uniep.megatron import with_uniep

    set_streams()

    def build(layout: str, overlap: bool, fused: bool, delay: bool) -> Any:
        torch.manual_seed(3)
        config = _config(
            num_layers=2,
            moe_layer_freq=[0, 1],
            moe_token_dispatcher_type="alltoall",
            overlap_moe_expert_parallel_comm=overlap,
            delay_wgrad_compute=delay,
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        spec = with_uniep(spec, layout=layout)
        model = GPTModel(config, spec, 128, 32, position_embedding_type="rope").bfloat16()
        config.gradient_accumulation_fusion = fused
        for name in ("linear_fc1", "linear_fc2") if fused else ():
            params = list(getattr(model.decoder.layers[1].mlp.experts, name).named().values())
            whole = torch.zeros(len(params), *params[0].shape)
            for param, grad in zip(params, whole, strict=True):
                param.main_grad = grad
        return model

    for layout, fused, delay in (
        ("stacked", True, True),
        ("stacked", False, True),
        ("stacked", False, False),
        ("per_expert", True, True),
        ("per_expert", False, True),
    ):
        plain = build(layout, False, fused, False)
        wanted = []
        for step in range(2):
            loss = plain(**_text(step)).float()
            loss.backward(torch.ones_like(loss))
            wanted.append(loss.detach())
        model = build(layout, True, fused, delay)
        first, second = (model.build_schedule_plan(**_text(step)) for step in range(2))
        one = Plan.run(first, None)
        other = Plan.run(second, first, b_grad=torch.ones_like(one))
        Plan.run(None, second, b_grad=torch.ones_like(other))
        what = f"{layout} {fused=} {delay=}"
        _same([one.detach(), other.detach()], wanted, f"losses, {what}")
        for (name, param), reference in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            for attribute in ("grad", "main_grad"):
                pair = [getattr(p, attribute, None) for p in (param, reference)]
                assert (pair[0] is None) == (pair[1] is None), f"{attribute} of {name}, {what}"
                if pair[0] is not None:
                    _same([pair[0]], [pair[1]], f"{attribute} of {name}, {what}")
    return None


def case_parts_of_a_captured_layer() -> None:
    """Router, experts and the rest as three calls, as Megatron's partial CUDA graphs make them."""
    _, ours = _pair(moe_shared_expert_intermediate_size=32)
    wanted = ours(_tokens())[0]
    assert ours.token_dispatcher.cudagraph_attrs == ["topk_ids"]
    ours.fwd_execution_map = ["route"]
    hidden, probs, shared = ours(_tokens(), intermediate_tensors=())
    kept = ours.token_dispatcher.topk_ids
    ours.token_dispatcher.topk_ids = None
    ours.token_dispatcher.topk_ids = kept.clone()  # as a graph's replay hands it back
    ours.fwd_execution_map = ["expert_compute"]
    out, _ = ours(None, intermediate_tensors=(hidden, probs))
    ours.fwd_execution_map = ["postprocess"]
    _same([ours(None, intermediate_tensors=(out, shared))], [wanted], "three calls")


# Checkpoints.


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
        config = _config(
            expert_model_parallel_size=expert_parallel, **(_other_experts()[other] if other else {})
        )
        layer = _layer(config) if kind == "megatron" else _layer(config, layout=kind)
        _draw_biases(layer)
        return layer

    # Each size once: making process groups takes longer than all else, and leaves threads behind.
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    wanted = {}
    try:
        for saved in sizes:
            _groups(saved)
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
                wanted[number, saved] = _gathered(_experts(layer, "data"))
        for loaded in sizes:
            _groups(loaded)
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
                found = _gathered(_experts(other, "data"))
                _same(found, experts, f"{writer} at {saved} into {reader} at {loaded}")
    finally:
        _groups(ranks)


def case_optimizer_checkpoint(folder: str) -> None:
    """States of Megatron's Adam, saved from uniep's parameters and loaded into its own experts."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )

    def build(target: str, seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        layer = _layer(_config()) if target == "megatron" else _layer(_config(), layout=target)
        model = _wrapped(layer, fp32=True, distributed=False)
        return layer, model, get_megatron_optimizer(options, [model])

    def entries(layer: Any, optimizer: Any, loading: bool) -> dict[str, Any]:
        state = layer.sharded_state_dict("mlp.")
        again = layer.sharded_state_dict("mlp.")
        return {
            "model": state,
            "optimizer": optimizer.sharded_state_dict(again, is_loading=loading),
        }

    with _OnCpu():
        layer, model, optimizer = build("stacked", 1)
        for _ in range(2):
            _train(model)
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
            _same(_experts(other, "data"), _experts(layer, "data"), f"into {target}")
            _train(other_model)
            other_optimizer.step()
            restored[target] = _experts(other, "data")
        _train(model)
        optimizer.step()
        _same(restored["stacked"], _experts(layer, "data"), "the step after, stacked")
        for target, limit in (("per_expert", 1e-5), ("megatron", 1e-2)):  # other sums of norms
            for found, wanted in zip(restored[target], _experts(layer, "data"), strict=True):
                _close(found, wanted, limit, f"the step after, {target}")


def case_state_dicts() -> None:
    """Plain state dicts with the names of each of Megatron's experts."""
    theirs, ours = _pair()
    w1, w2 = _experts(theirs, "data")
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
            layer = _layer(_config(), layout=layout)
            layer.load_state_dict({**dense, **state})
            _same(_experts(layer, "data"), [w1, w2], f"{name} into {layout}")
    _raises(RuntimeError, "Missing key(s)", ours.load_state_dict, dense)


# Options.


def case_refused_options() -> None:
    """Each gives a sentence with option, value and what is accepted, when the layer is built."""
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.transformer_config import TransformerConfig

    refused: list[tuple[dict[str, Any], list[str]]] = [
        ({"activation_func": F.mish}, ["activation_func is mish", "'silu', 'gelu', 'relu'"]),
        (
            {"activation_func": F.relu, "gated_linear_unit": False},
            ["activation_func is relu", "'squared_relu'", "gated_linear_unit is False"],
        ),
        (
            {"activation_func": quick_gelu},
            ["glu_linear_offset is 0.0", "1.0 where activation_func is quick_gelu"],
        ),
        ({"glu_linear_offset": 1.0}, ["glu_linear_offset is 1.0", "0.0"]),
        ({"activation_func_clamp_value": 7.0}, ["activation_func_clamp_value is 7.0", "None"]),
        ({"moe_mlp_glu_interleave_size": 32}, ["moe_mlp_glu_interleave_size is 32", "None"]),
        ({"fp8": "hybrid"}, ["fp8 is hybrid", "None"]),
        ({"fp4": "e2m1"}, ["fp4 is e2m1", "None"]),
        ({"params_dtype": torch.float32, "bf16": False}, ["params_dtype is torch.float32"]),
        ({"expert_tensor_parallel_size": 2}, ["expert_tensor_parallel_size is 2", "1"]),
        ({"expert_gtp_weight_remat_size": 2}, ["expert_gtp_weight_remat_size is 2", "1"]),
        ({"moe_latent_size": 32}, ["moe_latent_size is 32", "None"]),
        ({"moe_apply_probs_on_input": True}, ["moe_apply_probs_on_input is True", "False"]),
        (
            {"moe_pad_expert_input_to_capacity": True},
            ["moe_pad_expert_input_to_capacity is True", "False"],
        ),
        (
            {"moe_router_padding_for_quantization": True},
            ["moe_router_padding_for_quantization is True", "False"],
        ),
        ({"moe_shared_expert_overlap": True}, ["moe_shared_expert_overlap is True", "False"]),
        ({"moe_paged_stash": True}, ["moe_paged_stash is True", "False"]),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True},
            ["overlap_dispatch_backward_with_experts_wgrad is True", "False"],
        ),
        (
            {"transformer_impl": "inference_optimized"},
            ["transformer_impl is inference_optimized", "local or transformer_engine"],
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": [], "cuda_graph_scope": []},
            ["cuda_graph_modules is []", "cuda_graph_impl is 'local'", "full_iteration"],
        ),
        (
            {
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_modules": ["attn", "moe"],
                "cuda_graph_scope": ["attn", "moe"],
            },
            ["cuda_graph_modules is ['attn', 'moe']", "moe_router"],
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "flex"},
            ["moe_token_dispatcher_type is flex", "alltoall"],
        ),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
            ["offload_modules is ['moe_act']", "without them"],
        ),
    ]
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    tried = 0
    for options, words in refused:
        config = _config()
        options = {name: value for name, value in options.items() if name in known}
        if not options:
            continue  # another version's
        for name, value in options.items():  # as Megatron itself accepts them with other options
            setattr(config, name, value)
        message = _raises(ValueError, words[0], _layer, config, layout="stacked")
        assert all(word in message for word in words), f"{words} are not all in: {message}"
        assert "must be" in message, message
        tried += 1
    assert tried >= 15, f"{tried} options are known to this megatron-core"

    for options in (
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
        {"use_te_activation_func": True, "moe_permute_fusion": True},
    ):
        config = _config()
        for name, value in options.items():
            setattr(config, name, value)
        if "cuda_graph_modules" in options and "cuda_graph_modules" not in known:
            config.cuda_graph_scope = options["cuda_graph_modules"]
        _layer(config, layout="stacked")


def case_specs() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from uniep.megatron import UniepExperts, with_uniep

    def submodules(mlp: Any) -> Any:
        return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules

    spec = _spec()
    before = copy.deepcopy(spec.submodules.mlp)
    changed = with_uniep(spec, max_tokens=64)
    assert "UniepMoELayer" in str(changed.submodules.mlp)
    assert "Uniep" not in str(spec.submodules.mlp), "the spec itself was changed"
    assert str(before) == str(spec.submodules.mlp)
    experts = submodules(changed.submodules.mlp).experts
    assert experts.module is UniepExperts and experts.params == {"max_tokens": 64}

    config = _config(num_layers=3, moe_layer_freq=[0, 1, 0])
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    layers = with_uniep(block).layer_specs
    assert ["Uniep" in str(layer) for layer in layers] == [False, True, False]

    _raises(TypeError, "unknown", with_uniep, spec, unknown=1)
    dense = get_gpt_decoder_block_spec(
        _config(num_moe_experts=None, moe_ffn_hidden_size=None, expert_model_parallel_size=1),
        use_transformer_engine=False,
    )
    _raises(ValueError, "has no MoELayer", with_uniep, dense)
    _raises(ValueError, "derived from it", with_uniep, changed)
    other = with_uniep(spec)
    submodules(other.submodules.mlp).experts = submodules(spec.submodules.mlp).experts
    mlp = other.submodules.mlp
    from megatron.core.transformer.spec_utils import build_module

    build = mlp if callable(mlp) else lambda config: build_module(mlp, config=config)
    _raises(ValueError, "it must build UniepExperts", build, config=_config())


def case_routes() -> None:
    from uniep.megatron import routes

    torch.manual_seed(5)
    tokens, topk = 40, 3
    routing_map = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
    for token in range(tokens):
        count = token % (topk + 1)  # from none to all
        routing_map[token, torch.randperm(EXPERTS)[:count]] = True
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        probs = torch.rand(tokens, EXPERTS, dtype=dtype)
        probs[routing_map & (torch.rand(tokens, EXPERTS) < 0.2)] = 0  # a route with probability 0
        probs.requires_grad_()
        ids, weights = routes(probs, routing_map, topk)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        gradient = torch.rand(tokens, topk)
        weights.backward(gradient)  # type: ignore[no-untyped-call]
        assert probs.grad is not None
        wanted = torch.zeros(tokens, EXPERTS, dtype=dtype)
        for token in range(tokens):
            experts = routing_map[token].nonzero().flatten().tolist()
            assert ids[token].tolist() == experts + [-1] * (topk - len(experts))
            for k, expert in enumerate(experts):
                assert weights[token, k] == probs[token, expert].float()
                wanted[token, expert] = gradient[token, k].to(dtype)
            assert not weights[token, len(experts) :].any()
        _same([probs.grad], [wanted], "gradient of probabilities")

    _, ours = _pair()
    ours.route = lambda x, *_: (torch.rand(32, EXPERTS), torch.ones(32, EXPERTS, dtype=torch.bool))
    _raises(ValueError, f"a token has {EXPERTS} routes", ours, _tokens())


def case_tokens_and_capacity() -> None:
    """Room is made for the largest rank; what does not fit is told by Megatron's own names."""
    from uniep.megatron.experts import _workspaces

    layers = [_layer(_config(), layout="stacked") for _ in range(2)]
    # Every rank has another number of tokens.
    lengths = [16 - 4 * dist.get_rank(), 8]
    for length in lengths:
        for layer in layers:
            _run(layer, _tokens(length=length))
    assert layers[0].experts.routed.workspace is layers[1].experts.routed.workspace, "not shared"
    # Where Python has ended it on one rank only, as it may for layers that are no longer used, all
    # ranks make another.
    if dist.get_rank() == 0:
        _workspaces.clear()
    another = _layer(_config(), layout="stacked")
    _run(another, _tokens())
    assert another.experts.routed.workspace is not layers[0].experts.routed.workspace
    if dist.get_world_size() > 1:
        _raises(ValueError, "with_uniep(spec, max_tokens=...)", layers[0], _tokens(length=20))
    else:
        _run(layers[0], _tokens(length=20))

    torch.manual_seed(1)
    room = 128 * EXPERTS // dist.get_world_size()  # uniep rounds each expert's rows up to 128
    layer = _layer(_config(), on_overflow="flag", capacity_rows=room, max_tokens=512)
    dispatcher = layer.token_dispatcher
    assert dispatcher.check_over_budget() is None and dispatcher.check_required_capacity() is None
    with torch.no_grad():
        assert not layer(_tokens())[0].isnan().any()
        assert dispatcher.check_over_budget().tolist() == [False]
        x = _tokens(length=256)
        assert layer(x)[0].isnan().all(), "more rows than there is room for"
        assert dispatcher.check_over_budget().tolist() == [True]
        required = dispatcher.check_required_capacity()
        assert required.shape == (1,) and int(required) > room
        most = required.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dispatcher.grow_ep_recv_capacity(int(most))
        dispatcher.reset_over_budget()
        assert not layer(x)[0].isnan().any()
        assert dispatcher.check_over_budget().tolist() == [False]
        dispatcher.reset_over_budget()
        assert dispatcher.check_required_capacity().tolist() == [0]

        config = _config()
        config.moe_expert_rank_capacity_factor = 1.5
        layer = _layer(config, max_tokens=32)
        layer(_tokens())
        rows = layer.experts.routed.workspace.rows
        assert rows >= 32 * 2 * 1.5, rows
        small = _layer(_config(), capacity_rows=1, max_tokens=32)
        _raises(RuntimeError, "capacity_rows is 1", small, _tokens())


# The megakernel seam.


def _seam() -> str | None:
    try:
        import megatron.core.transformer.moe.megakernel  # noqa: F401
    except ImportError:
        from megatron.core import __version__

        return f"skipped: megatron-core {__version__} has no moe_megakernel_backend"
    return None


def case_megakernel_is_refused() -> str | None:
    if _seam() is None:
        return "skipped: this megatron-core has moe_megakernel_backend"
    from uniep.megatron import use_megakernel

    _raises(
        RuntimeError, "has no moe_megakernel_backend; use with_uniep", use_megakernel, _config()
    )
    return None


def case_megakernel() -> str | None:
    """Megatron's own MoELayer and parameters, with uniep as its backend."""
    if (reason := _seam()) is not None:
        return reason
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from uniep.megatron import UniepMegakernelBackend, UniepMoELayer, use_megakernel

    for shared in (None, 32):
        options: dict[str, Any] = {
            "moe_shared_expert_intermediate_size": shared,
            "moe_router_topk": 3,
        }
        results = {}
        for kind in ("megatron", "backend", "recomputed", "spec"):
            torch.manual_seed(1)
            config = _config(**options)
            if kind in ("backend", "recomputed"):
                use_megakernel(config)
                use_megakernel(config, max_tokens=64)  # again changes nothing but the options
            if kind == "recomputed":
                config.recompute_granularity = "selective"
                config.recompute_modules = ["moe", "shared_experts"]
            layer = _layer(config, layout="stacked") if kind == "spec" else _layer(config)
            if kind == "megatron":
                weights = layer.state_dict()
            layer.load_state_dict(weights)
            assert set(layer.state_dict()) == set(weights) or kind == "spec", "names of its state"
            assert isinstance(layer, MoELayer)
            assert isinstance(layer, UniepMoELayer) == (kind == "spec")
            backend = getattr(layer, "megakernel_experts", None)
            assert isinstance(backend, UniepMegakernelBackend) == (
                kind in ("backend", "recomputed")
            )
            results[kind] = [
                *_run(layer, _tokens()),
                *_experts(layer, "grad"),
                layer.router.weight.grad,
                *([p.grad for p in layer.shared_experts.parameters()] if shared else []),
            ]
        for kind in ("backend", "recomputed"):
            what = f"{kind}, {shared=}"
            for found, wanted in zip(results[kind], results["megatron"], strict=True):
                _close(found, wanted, GRADIENT, f"megakernel seam, {what}")
            (_, dx, *others), (_, spec_dx, *spec_others) = results[kind], results["spec"]
            _same([results[kind][0], *others], [results["spec"][0], *spec_others], what)
            if shared is None:
                _same([dx], [spec_dx], f"dx, {what}")
            else:  # a sum of three gradients in bf16, whose order is that of the two layers
                _close(dx, spec_dx, 5e-3, f"dx of the two seams, {what}")

    config = _config()
    config.delay_wgrad_compute = True
    _raises(ValueError, "delay_wgrad_compute is True", use_megakernel, config)
    config = _config()
    config.add_bias_linear = True
    _raises(ValueError, "add_bias_linear is True", use_megakernel, config)
    _raises(TypeError, "layout is given", use_megakernel, _config(), layout="stacked")
    config = _config()
    config.moe_megakernel_backend = "another"
    _raises(ValueError, "Unsupported MoE megakernel backend: 'another'", _layer, config)
    return None


class _GroupedExperts(nn.Module):
    """Parameters under the names of TEGroupedMLP, which needs a GPU."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        for name in ("linear_fc1", "linear_fc2"):
            linear = nn.Module()
            for i, expert in enumerate(source.local_experts):
                weight = getattr(expert, name).weight
                param = nn.Parameter(weight.detach().clone())
                param.allreduce = weight.allreduce  # type: ignore[attr-defined]
                linear.register_parameter(f"weight{i}", param)
            setattr(self, name, linear)


def case_megakernel_main_grads() -> str | None:
    """Parameters and main gradients where DDP has put them: experts descending."""
    if (reason := _seam()) is not None:
        return reason
    from megatron.core import parallel_state

    from uniep.megatron import UniepMegakernelBackend, use_megakernel

    class Layer(nn.Module):
        def __init__(self, config: Any, theirs: Any) -> None:
            super().__init__()
            self.config = config
            self.router = theirs.router
            self.experts = _GroupedExperts(theirs.experts)
            self.backend = UniepMegakernelBackend(
                config=config,
                ep_group=parallel_state.get_expert_model_parallel_group(),
                routed_experts=self.experts,
                shared_experts=None,
                num_local_experts=theirs.num_local_experts,
            )

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return self.backend(x, *self.router(x)), None

    for distributed in (False, True):
        for fp32 in (False, True):
            theirs, _ = _pair()
            config = _config()
            use_megakernel(config)
            config.gradient_accumulation_fusion = True
            ours = Layer(config, _pair()[0])
            hooked: list[int] = []

            def gather(*_: Any, calls: list[int] = hooked) -> None:
                calls.append(1)

            linear: Any = ours.experts.linear_fc1
            linear.register_forward_pre_hook(gather)
            _train(_wrapped(theirs, fp32=fp32, distributed=distributed))
            _train(_wrapped(ours, fp32=fp32, distributed=distributed))
            assert len(hooked) == 2, "hooks of the module that owns the parameters did not run"
            for name, wanted in zip(
                ("linear_fc1", "linear_fc2"), _experts(theirs, "main_grad"), strict=True
            ):
                linear = getattr(ours.experts, name)
                params = [getattr(linear, f"weight{i}") for i in range(theirs.num_local_experts)]
                assert all(p.grad is None and p.grad_added_to_main_grad for p in params)
                found = torch.stack([param.main_grad for param in params])
                _close(found, wanted, GRADIENT, f"main_grad at the seam, {distributed=} {fp32=}")

    theirs, _ = _pair()
    config = _config()
    use_megakernel(config)
    layer = _layer(config)
    layer.load_state_dict(theirs.state_dict())
    layer.config.gradient_accumulation_fusion = True
    model = _wrapped(layer, fp32=True, distributed=False)
    if layer.num_local_experts > 1:
        _raises(RuntimeError, "lie apart", model, _tokens())
    return None


# Figures for the guide: python tests/python/megatron_cases.py [ranks]


def _print_figures(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, run_all, folder, "")
        largest: dict[str, float] = {}
        for rank in range(ranks):
            for line in (Path(folder) / f"figures{rank}").read_text().splitlines():
                what, distance = line.rsplit(" ", 1)
                what = what.split(",")[0].split(" of ")[0]
                largest[what] = max(largest.get(what, 0), float(distance))
    print(f"# largest relative L2 distance from Megatron's layer, {ranks} ranks")
    for what, most in largest.items():
        print(f"{what:48} {most:.2e}")


if __name__ == "__main__":
    _print_figures(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
