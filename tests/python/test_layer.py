"""MoELayer, its checkpoints in all forms, and captures."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import make_case, relative
from command_line import uniep_command
from ranks import cpu_mesh, run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import uniep
import uniep.plain
from uniep import MoELayer, RouterConfig
from uniep.checkpoint import (
    distributed_state_dict,
    hugging_face_tensors,
    load_hugging_face,
    save_hugging_face,
)

FAMILIES = {
    "mixtral": ({}, "model.layers.1.block_sparse_moe"),
    "qwen3_moe": ({}, "model.layers.1.mlp"),
    "olmoe": ({"router": RouterConfig(normalize=False)}, "model.layers.1.mlp"),
    "deepseek_v3": (
        {
            "router": RouterConfig("sigmoid", bias=True, n_group=2, topk_group=1),
            "shared_intermediate": 48,
        },
        "model.layers.1.mlp",
    ),
}


PREFIX = FAMILIES["deepseek_v3"][1]


def make_layer(family="deepseek_v3", seed=3, **options):
    torch.manual_seed(seed)
    layer = MoELayer(64, 32, 8, 2, **{**FAMILIES[family][0], **options})
    if layer.router.bias is not None:
        layer.router.bias.normal_(std=0.1)
    return layer


def batch(rank=0, size=1):
    torch.manual_seed(11)
    x = torch.randn(32, 64).bfloat16()
    return x[rank * 32 // size : (rank + 1) * 32 // size].clone().requires_grad_()


def run(layer, x):
    layer.zero_grad()
    out, routing = layer.forward_with_routing(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, layer.w1.grad.clone(), layer.w2.grad.clone()], routing


def test_forward_and_backward():
    layer = make_layer()
    x = batch()
    (out, *_), routing = run(layer, x)
    assert torch.equal(layer(x).detach(), out)
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    plain = uniep.plain.moe(x, routing.ids, routing.probs, layer.w1, layer.w2) + layer.shared(x)
    assert relative(out, plain.detach()) < 1e-2
    assert "num_experts=8" in repr(layer)
    x3 = x.detach().view(2, 16, 64)
    assert torch.equal(layer(x3).detach().view(32, 64), out)


def test_trains():
    torch.manual_seed(0)
    layer = MoELayer(32, 64, 8, 2, router=RouterConfig(aux_loss=0.01), dtype=torch.float32)
    x, y = torch.randn(256, 32), torch.randn(256, 32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, routing = layer.forward_with_routing(x)
        loss = (out.float() - y).square().mean() + routing.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(dtype):
    layer, other = make_layer(main_grad=dtype), make_layer()
    for _ in range(2):
        layer(batch()).float().sum().backward()
        other(batch()).float().sum().backward()
    assert layer.w1.grad is None and layer.w1.main_grad.dtype == dtype
    assert relative(layer.w1.main_grad, other.w1.grad) < 0.02
    assert relative(layer.w2.main_grad, other.w2.grad) < 0.02


def test_weights_without_main_grad_beside_others_are_named():
    layer = MoELayer(64, 32, 8, 2, shared_experts=1, main_grad=torch.float32)
    given = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    layer.zero_grad()
    for names, lacking, having in ((["w1"], "w1", "w2"), (["w2", "shared_w1"], "w2", "w1")):
        part = {name: given[name] for name in names}
        with pytest.raises(ValueError, match=f"{lacking} has no main_grad, and {having} has"):
            torch.func.functional_call(layer, part, (batch(),))
    given = {name: weight.requires_grad_() for name, weight in given.items()}
    torch.func.functional_call(layer, given, (batch(),)).sum().backward()
    assert given["w1"].grad.any() and not layer.w1.main_grad.any()


def test_refuses():
    with pytest.raises(TypeError, match="group is of type int"):
        MoELayer(64, 32, 8, 2, group=3)
    with pytest.raises(ValueError, match="topk is 9"):
        MoELayer(64, 32, 8, 9)


def spread(folder):
    """The layer of one process on several: weights, results, files."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    layer = make_layer(group=group)
    found, _ = run(layer, batch(rank, size))
    other = make_layer(seed=99, group=group)
    load_hugging_face(other, f"{folder}/one", "deepseek_v3", "model.layers.1.mlp")
    loaded = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    save_hugging_face(f"{folder}/hf{size}", {"model.layers.1.mlp": layer}, "deepseek_v3")
    # One process has saved for four ranks, four for two, and two for one: what a rank saves is what
    # it has loaded, never the layer that all could have made from the seed.
    other = make_layer(seed=98, group=group)
    assert not torch.equal(other.w1, layer.w1)
    dcp.load(distributed_state_dict(other), checkpoint_id=f"{folder}/dcp{1 if size == 4 else 4}")
    for name, tensor in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    dcp.save(distributed_state_dict(other), checkpoint_id=f"{folder}/dcp{size}")
    with uniep.capture(f"{folder}/trace{size}.safetensors"):
        layer(batch(rank, size)).backward(torch.ones(32 // size, 64).bfloat16())
    return found, loaded, layer.state_dict()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    layer = make_layer()
    save_hugging_face(folder / "one", {"model.layers.1.mlp": layer}, "deepseek_v3")
    dcp.save(distributed_state_dict(layer), checkpoint_id=folder / "dcp1")
    results = {size: run_ranks(size, spread, str(folder)) for size in (4, 2)}
    return folder, layer, results


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_weights_and_bits_of_one(files, size):
    _, layer, results = files
    wanted, _ = run(layer, batch())
    for index, tensor in enumerate(wanted):
        # Not the bits: PyTorch's products, in router and shared experts, depend on how many rows
        # they have.
        parts = [found[index] for found, _, _ in results[size]]
        assert relative(torch.cat(parts), tensor) < 1e-2
    for rank, (_, loaded, own) in enumerate(results[size]):
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        for state in (loaded, own):
            for name, tensor in layer.state_dict().items():
                sharded = name in ("w1", "w2")
                assert torch.equal(state[name], tensor[part] if sharded else tensor), name


@pytest.mark.parametrize("size", [2, 4])
def test_one_process_loads_what_several_saved(files, size):
    folder, layer, _ = files
    for how in ("hf", "dcp"):
        other = make_layer(seed=97)
        assert not torch.equal(other.w1, layer.w1)
        if how == "hf":
            load_hugging_face(other, folder / f"hf{size}", "deepseek_v3", "model.layers.1.mlp")
        else:
            dcp.load(distributed_state_dict(other), checkpoint_id=folder / f"dcp{size}")
        for name, tensor in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
    files_of_ranks = sorted(p.name for p in (folder / f"hf{size}").iterdir())
    assert len(files_of_ranks) == size + 1
    index = json.loads((folder / f"hf{size}" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in hugging_face_tensors(layer, "deepseek_v3", "").values()
    )


@pytest.mark.parametrize("size", [2, 4])
def test_captures_of_several_ranks_are_layers(files, size):
    folder, _, _ = files
    path = folder / f"trace{size}.safetensors"
    text = uniep_command("validate", str(path))
    assert "T=32 H=64 I=32 E=8 K=2, with dy" in text
    text = uniep_command("run", "--input", str(path), "--ranks", "2", "--check")
    assert "check PASSED" in text


def test_made_without_memory():
    with torch.device("meta"):
        layer = MoELayer(64, 32, 8, 2, bias=True, main_grad=torch.float32)
    assert layer.w1.is_meta
    with pytest.raises(ValueError, match=r"the layer is on 'meta'.*to_empty\(device"):
        load_hugging_face(layer, {}, "mixtral", "mlp")
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    other = MoELayer(64, 32, 8, 2, bias=True, main_grad=torch.float32)
    state = other.state_dict()
    for each in (layer, MoELayer(64, 32, 8, 2, bias=True, main_grad=torch.float32)):
        each.load_state_dict(state, assign=True)
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
        run_main_grads(each)


def test_made_of_fake_tensors():
    with FakeTensorMode():
        layer = MoELayer(64, 32, 8, 2, shared_experts=1, bias=True)
        layer.reset_parameters()
    assert layer.w1.shape == (8, 64, 64)


def run_main_grads(layer):
    layer(batch()).float().square().sum().backward()
    for weight in (layer.w1, layer.w2, layer.b1, layer.b2):
        assert weight.grad is None and weight.main_grad.device == weight.device
        assert weight.main_grad.any()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.load_state_dict(layer.state_dict()),
        lambda layer: layer.load_state_dict(layer.state_dict(), assign=True),
    ],
    ids=["to", "load", "assign"],
)
def test_main_grads_outlast_changes_of_parameters(change, swap):
    """With `swap` PyTorch swaps parameters with new ones, and so their attributes."""
    layer = MoELayer(64, 32, 8, 2, bias=True, main_grad=torch.float32, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run_main_grads(layer)
    before = [weight.main_grad for weight in (layer.w1, layer.w2, layer.b1, layer.b2)]
    sums = [main.clone() for main in before]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        change(layer)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for weight, main, wanted in zip(layer._own_weights(), before, sums, strict=True):
        assert weight.main_grad is main and torch.equal(main, wanted)


def reset_sharded(dtype):
    torch.manual_seed(3)
    whole = MoELayer(64, 32, 8, 2, bias=True, dtype=dtype)
    layer = MoELayer(64, 32, 8, 2, bias=True, dtype=dtype, device="meta")
    fully_shard(layer, mesh=cpu_mesh(), ignored_params={layer.router.weight})
    layer.to_empty(device="cpu")
    for weight in layer.parameters():
        torch.nn.init.constant_(weight, 7.0)
    torch.manual_seed(3)
    layer.reset_parameters()
    return {
        name: (getattr(own, "full_tensor", own.detach)(), weight.detach())
        for (name, own), weight in zip(layer.named_parameters(), whole.parameters(), strict=True)
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_that_are_sharded_begin_as_others(ranks):
    for found in run_ranks(ranks, reset_sharded, torch.float32):
        for name, (sharded, wanted) in found.items():
            assert torch.equal(sharded, wanted), name


def capture_shared(path):
    """What a rank's layer gives, and the arguments of its capture."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    options = {"activation": "geglu", "probs": "after", "shared_experts": 2, "shared_gate": True}
    torch.manual_seed(3)
    layer = MoELayer(64, 32, 8, 2, group=group, **options)
    with uniep.capture(path) as captured:
        found, _ = run(layer, batch(rank, size))
    return found[:2], captured.arguments


def test_a_capture_says_what_its_layer_computes(tmp_path):
    from safetensors.torch import load_file

    path, out = tmp_path / "layer", str(tmp_path / "out")
    results = run_ranks(2, capture_shared, str(path))
    arguments = results[0][1]
    assert arguments == ["--input", str(path), "--activation", "geglu", "--probs", "after"]
    uniep_command("run", "--ranks", "2", "--output", out, *arguments)
    wanted = [torch.cat(parts) for parts in zip(*(found for found, _ in results), strict=True)]
    found = load_file(out)
    assert torch.equal(found["out"], wanted[0])
    uniep_command("run", "--ranks", "2", "--output", out, *arguments[:2])
    assert not torch.equal(load_file(out)["out"], wanted[0]), "flags change nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_names(family, tmp_path):
    prefix = FAMILIES[family][1]
    layer = make_layer(family)
    tensors = hugging_face_tensors(layer, family, prefix)
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    assert torch.equal(tensors[f"{prefix}.experts.5.{gate}.weight"], layer.w1[5, :32])
    assert torch.equal(tensors[f"{prefix}.experts.5.{up}.weight"], layer.w1[5, 32:])
    assert torch.equal(tensors[f"{prefix}.experts.5.{down}.weight"], layer.w2[5])
    assert torch.equal(tensors[f"{prefix}.gate.weight"], layer.router.weight)
    if family == "deepseek_v3":
        assert torch.equal(tensors[f"{prefix}.gate.e_score_correction_bias"], layer.router.bias)
        shared = tensors[f"{prefix}.shared_experts.up_proj.weight"]
        assert torch.equal(shared, layer.shared.gate_up.weight[48:])
    others = {"lm_head.weight": torch.ones(3)}
    save_hugging_face(tmp_path / "x", {prefix: layer}, family, others=others)
    for source in (tensors, tmp_path / "x", tmp_path / "x" / "model-00001-of-00001.safetensors"):
        other = make_layer(family, seed=5)
        load_hugging_face(other, source, family, prefix)
        for a, b in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(KeyError, match=r"layers\.7"):
        load_hugging_face(layer, tensors, family, "model.layers.7.mlp")
    with pytest.raises(KeyError, match=r"layers\.7"):
        load_hugging_face(layer, tmp_path / "x", family, "model.layers.7.mlp")
    name = f"{prefix}.gate.weight"
    for bad, words in (
        (tensors[name][:4], "has shape"),
        (tensors[name].to(torch.float8_e4m3fn), "float8"),
    ):
        with pytest.raises(ValueError, match=words):
            load_hugging_face(layer, {**tensors, name: bad}, family, prefix)


def test_families_are_checked():
    layer = make_layer("qwen3_moe")
    with pytest.raises(ValueError, match="family is 'gpt2'"):
        hugging_face_tensors(layer, "gpt2", "")
    with pytest.raises(ValueError, match="a bias of its router"):
        hugging_face_tensors(layer, "deepseek_v3", "")
    with pytest.raises(ValueError, match="a bias of its router"):
        hugging_face_tensors(make_layer(), "mixtral", "")
    for options, words in (
        ({"router": RouterConfig(logit_bias=True)}, "never have a bias of its router's logits"),
        ({"zero_experts": 2}, "never have zero experts"),
    ):
        with pytest.raises(ValueError, match=words):
            hugging_face_tensors(MoELayer(64, 32, 8, 2, **options), "mixtral", "")


# Shared experts apart, and one in the pass.
SHARED = ({}, {"shared_intermediate": 0, "shared_experts": 1})


def whole(layer):
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in layer.state_dict().items()
    }


def sharded_by_fsdp(folder):
    """Layers that FSDP2 has all of but the experts: saved, and those that others have saved."""
    mesh = init_device_mesh("cpu", (2,))
    lm_head = torch.arange(6.0)
    found = []
    for number, shared in enumerate(SHARED):
        layers = [make_layer(seed=seed, group=dist.group.WORLD, **shared) for seed in (3, 99)]
        for layer in layers:
            fully_shard(layer.router, mesh=mesh)
            fully_shard(layer, mesh=mesh, ignored_params={layer.w1, layer.w2})
        others = {"lm_head.weight": distribute_tensor(lm_head, mesh, [Shard(0)])}
        to = f"{folder}/sharded{number}"
        save_hugging_face(to, {PREFIX: layers[0]}, "deepseek_v3", others=others)
        load_hugging_face(layers[1], f"{folder}/one{number}", "deepseek_v3", PREFIX)
        found.append(whole(layers[1]))
    return found


def test_what_fsdp_shards_is_saved_whole_and_loaded_in_parts(tmp_path):
    layers = [make_layer(**shared) for shared in SHARED]
    for number, layer in enumerate(layers):
        save_hugging_face(tmp_path / f"one{number}", {PREFIX: layer}, "deepseek_v3")
    for rank, found in enumerate(run_ranks(2, sharded_by_fsdp, str(tmp_path))):
        for layer, state in zip(layers, found, strict=True):
            for name, tensor in layer.state_dict().items():
                own = tensor[4 * rank : 4 * rank + 4] if name in ("w1", "w2") else tensor
                assert torch.equal(state[name], own), name
    for number, (layer, shared) in enumerate(zip(layers, SHARED, strict=True)):
        folder, other = tmp_path / f"sharded{number}", make_layer(seed=5, **shared)
        load_hugging_face(other, folder, "deepseek_v3", PREFIX)
        for name, tensor in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"]["lm_head.weight"] == "model-00001-of-00002.safetensors"


def loaded_while_gathered(folder):
    """A layer behind a forward: loaded, and saved behind another, whose backward is to come."""
    layer = make_layer(seed=99, group=dist.group.WORLD)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options = {"mesh": cpu_mesh(), "reshard_after_forward": False}
    fully_shard(layer.router, mp_policy=policy, **options).set_force_sum_reduction_for_comms(True)
    fully_shard(layer, ignored_params={layer.w1, layer.w2}, **options)
    layer.set_force_sum_reduction_for_comms(True)
    layer(batch(dist.get_rank(), 2))
    assert layer.router.weight.dtype == torch.bfloat16
    load_hugging_face(layer, f"{folder}/one", "deepseek_v3", PREFIX)
    loaded = whole(layer)
    out = layer(batch(dist.get_rank(), 2))
    save_hugging_face(f"{folder}/again", {PREFIX: layer}, "deepseek_v3")
    out.float().square().sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
    return loaded


def test_what_fsdp_has_gathered_is_loaded_and_saved(tmp_path):
    layer, other = make_layer(), make_layer(seed=5)
    save_hugging_face(tmp_path / "one", {PREFIX: layer}, "deepseek_v3")
    for rank, state in enumerate(run_ranks(2, loaded_while_gathered, str(tmp_path))):
        for name, tensor in layer.state_dict().items():
            own = tensor[4 * rank : 4 * rank + 4] if name in ("w1", "w2") else tensor
            assert name == "router.load" or torch.equal(state[name], own), name
    load_hugging_face(other, tmp_path / "again", "deepseek_v3", PREFIX)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_captures(tmp_path):
    path = tmp_path / "layer.safetensors"
    case = make_case(dropped=True).requires_grad()
    other = make_case(seed=1)

    def call(c):
        return uniep.moe(
            c.x.view(4, 12, 64), c.ids.long().view(4, 12, 2), c.probs.view(4, 12, 2), c.w1, c.w2
        )

    with uniep.capture(path, call=1) as captured:
        call(other)
        call(case).backward(case.dy.view(4, 12, 64))
        call(other)
        assert not captured.done
        with pytest.raises(RuntimeError, match="another capture"), uniep.capture(path):
            pass
    assert captured.done
    from safetensors.torch import load_file

    found = load_file(path)
    for name, tensor in {
        "x": case.x,
        "topk_ids": case.ids,
        "topk_probs": case.probs,
        "w1": case.w1,
        "w2": case.w2,
        "dy": case.dy,
    }.items():
        assert torch.equal(found[name], tensor.detach()), name
    assert "is good" in uniep_command("validate", str(path))
    out = tmp_path / "out.safetensors"
    uniep_command("run", "--input", str(path), "--ranks", "2", "--output", str(out))
    results = load_file(out)
    assert torch.equal(results["dx"], case.x.grad) and torch.equal(results["dw1"], case.w1.grad)
    with pytest.raises(RuntimeError, match="is not written"), uniep.capture(path, call=5):
        call(other)
    with uniep.capture(path), torch.no_grad():
        call(other)
    assert "good for a forward pass" in uniep_command("validate", str(path))


def test_a_layer_file_is_written_by_either_name(tmp_path):
    case = make_case()
    tensors = (case.x, case.ids, case.probs, case.w1, case.w2)
    files = []
    for name in ("write_layer", "write_trace"):
        getattr(uniep, name)(tmp_path / name, *tensors, case.dy)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert "is good" in uniep_command("validate", str(tmp_path / "write_layer"))


def test_a_group_that_is_not_there_yet_is_warned_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="init_process_group"):
        MoELayer(64, 32, 8, 2, group=dist.group.WORLD)
    monkeypatch.setenv("WORLD_SIZE", "1")
    MoELayer(64, 32, 8, 2)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"hidden": 60}, ValueError, "hidden is 60; a multiple of 8"),
        ({"intermediate": 0}, ValueError, "intermediate is 0; a multiple of 8"),
        ({"dtype": torch.float16}, TypeError, "torch.float32 for calls under"),
        ({"num_experts": "8"}, TypeError, "num_experts is '8', a str; it must be an int"),
        ({"topk": 2.0}, TypeError, "topk is 2.0, a float; it must be an int"),
    ],
)
def test_what_no_call_could_take_is_refused_at_once(wrong, error, words):
    with pytest.raises(error, match=words):
        MoELayer(**{"hidden": 64, "intermediate": 32, "num_experts": 8, "topk": 2, **wrong})


def of_other_topk():
    rank = dist.get_rank()
    layer = MoELayer(64, 32, 8, 2 + rank, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="topk is 2 on rank 0 and 3 on rank 1; the same"):
        layer(torch.randn(8, 64).bfloat16())
    layer = MoELayer(64, 32, 8, 2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=f"which has {8 + rank} tokens on rank {rank}.*max_tokens"):
        layer(torch.randn(8 + rank, 64).bfloat16())
    layer(torch.randn(8, 64).bfloat16())
    with pytest.raises(RuntimeError, match=r"max_tokens=8 .* first call of this shape.*pass max_"):
        layer(torch.randn(8 + rank, 64).bfloat16())


def test_what_ranks_have_differently_is_named():
    run_ranks(2, of_other_topk)


def of_other_biases():
    """What warns of routers that differ in their bias alone, by call."""
    layer = make_layer(group=dist.group.WORLD)
    with torch.no_grad():
        layer.router.bias[3] += dist.get_rank()
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(batch(dist.get_rank(), 2))
        found.append([str(warning.message) for warning in caught])
    return found


def test_a_bias_that_differs_between_ranks_is_warned_of_once():
    for first, second in run_ranks(2, of_other_biases):
        (text,) = [text for text in first if "differs" in text]
        assert text.startswith("router.bias of rank 1 differs") and "update_bias" in text
        assert not any("differs" in text for text in second)


def of_other_ranks():
    """A group beside a workspace: of the same ranks, and of others."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row, column = rows[rank // 2], columns[rank % 2]
    figures = (64, 32, 8, 2)
    with uniep.Workspace(row, *figures, 8, device="cpu") as workspace:
        group = uniep.Group(row, device="cpu")
        for same in (None, row, group, workspace.group, DeviceMesh.from_group(row, "cpu")):
            layer = MoELayer(*figures, group=same, workspace=workspace)
            assert layer.w1.shape[0] == 4 and layer.first_expert == 4 * (rank % 2)
        own = {0: r"\[0, 1\]", 1: r"\[2, 3\]"}[rank // 2]
        for other, of in (
            (column, {0: r"\[0, 2\]", 1: r"\[1, 3\]"}[rank % 2]),
            (dist.group.WORLD, r"\[0, 1, 2, 3\]"),
        ):
            with pytest.raises(ValueError, match=f"group has ranks {of}, .* workspace has {own}"):
                MoELayer(*figures, group=other, workspace=workspace)
    with uniep.Workspace(None, *figures, 8, device="cpu") as workspace:
        with pytest.raises(ValueError, match=rf"workspace has \[{rank}\]"):
            MoELayer(*figures, group=row, workspace=workspace)
        alone = uniep.Group(device="cpu")
        assert MoELayer(*figures, group=alone, workspace=workspace).w1.shape[0] == 8


def test_a_group_of_other_ranks_than_the_workspace_is_refused():
    run_ranks(4, of_other_ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"shared_experts": 1},
        {"shared_experts": 1, "shared_gate": True},
        {"shared_intermediate": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("apart", [False, True])
def test_padding_may_hold_anything(options, apart):
    torch.manual_seed(3)
    layer = MoELayer(64, 32, 4, 2, device="cpu", bias=apart, **options)
    x = torch.randn(16, 64).bfloat16()
    mask = torch.arange(16) != 3

    def run(padding):
        layer.zero_grad()
        tokens = x.clone()
        tokens[3] = padding
        out = layer(tokens, token_mask=mask)
        out[mask].float().sum().backward()
        return [out.detach()[mask], *(p.grad for p in layer.parameters())]

    for found, wanted in zip(run(float("nan")), run(1.0), strict=True):
        assert torch.equal(found, wanted)


def test_a_loss_that_nobody_adds_is_said_once():
    layer = MoELayer(64, 32, 4, 2, device="cpu", router=RouterConfig(aux_loss=0.1))
    x = torch.randn(16, 64).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.forward_with_routing(x)
        with torch.no_grad():
            layer(x)
        layer.eval()
        layer(x)
        layer.train()
        MoELayer(64, 32, 4, 2, device="cpu")(x)
    with pytest.warns(UserWarning, match="forward_with_routing") as warned:
        layer(x)
        layer(x)
    assert len(warned) == 1
    assert warned[0].filename == __file__
