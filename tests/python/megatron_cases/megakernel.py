"""The seam ``moe_megakernel_backend``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_cases.support import (
    GRADIENT,
    expect_close,
    expect_raises,
    expect_same,
    make_config,
    make_layer,
    make_pair,
    make_tokens,
    of_experts,
    run_layer,
    train,
    wrapped,
)


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

    expect_raises(
        RuntimeError, "has no moe_megakernel_backend; use with_uniep", use_megakernel, make_config()
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
            config = make_config(**options)
            if kind in ("backend", "recomputed"):
                use_megakernel(config)
                use_megakernel(config, max_tokens=64)  # again changes nothing but the options
            if kind == "recomputed":
                config.recompute_granularity = "selective"
                config.recompute_modules = ["moe", "shared_experts"]
            layer = make_layer(config, layout="stacked") if kind == "spec" else make_layer(config)
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
                *run_layer(layer, make_tokens()),
                *of_experts(layer, "grad"),
                layer.router.weight.grad,
                *([p.grad for p in layer.shared_experts.parameters()] if shared else []),
            ]
        for kind in ("backend", "recomputed"):
            what = f"{kind}, {shared=}"
            for found, wanted in zip(results[kind], results["megatron"], strict=True):
                expect_close(found, wanted, GRADIENT, f"megakernel seam, {what}")
            (_, dx, *others), (_, spec_dx, *spec_others) = results[kind], results["spec"]
            expect_same([results[kind][0], *others], [results["spec"][0], *spec_others], what)
            if shared is None:
                expect_same([dx], [spec_dx], f"dx, {what}")
            else:  # a sum of three gradients in bf16, whose order is that of the two layers
                expect_close(dx, spec_dx, 5e-3, f"dx of the two seams, {what}")

    config = make_config()
    config.delay_wgrad_compute = True
    expect_raises(ValueError, "delay_wgrad_compute is True", use_megakernel, config)
    config = make_config()
    config.add_bias_linear = True
    expect_raises(ValueError, "add_bias_linear is True", use_megakernel, config)
    expect_raises(TypeError, "layout is given", use_megakernel, make_config(), layout="stacked")
    config = make_config()
    config.moe_megakernel_backend = "another"
    expect_raises(ValueError, "Unsupported MoE megakernel backend: 'another'", make_layer, config)
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
            theirs, _ = make_pair()
            config = make_config()
            use_megakernel(config)
            config.gradient_accumulation_fusion = True
            ours = Layer(config, make_pair()[0])
            hooked: list[int] = []

            def gather(*_: Any, calls: list[int] = hooked) -> None:
                calls.append(1)

            linear: Any = ours.experts.linear_fc1
            linear.register_forward_pre_hook(gather)
            train(wrapped(theirs, fp32=fp32, distributed=distributed))
            train(wrapped(ours, fp32=fp32, distributed=distributed))
            assert len(hooked) == 2, "hooks of the module that owns the parameters did not run"
            for name, wanted in zip(
                ("linear_fc1", "linear_fc2"), of_experts(theirs, "main_grad"), strict=True
            ):
                linear = getattr(ours.experts, name)
                params = [getattr(linear, f"weight{i}") for i in range(theirs.num_local_experts)]
                assert all(p.grad is None and p.grad_added_to_main_grad for p in params)
                found = torch.stack([param.main_grad for param in params])
                expect_close(
                    found, wanted, GRADIENT, f"main_grad at the seam, {distributed=} {fp32=}"
                )

    theirs, _ = make_pair()
    config = make_config()
    use_megakernel(config)
    layer = make_layer(config)
    layer.load_state_dict(theirs.state_dict())
    layer.config.gradient_accumulation_fusion = True
    model = wrapped(layer, fp32=True, distributed=False)
    train(model)  # weights of one expert lie together, those of all experts apart
    for name in ("linear_fc1", "linear_fc2"):
        for expert in layer.experts.local_experts:
            assert getattr(expert, name).weight.main_grad.any(), f"{name} has no gradient"
    return None
