"""Distributed checkpoints of modules whose names or weights are not those of a plain model."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from training_state import load, state_of

import uniep
from uniep import checkpoint

Model = tuple[nn.Module, torch.optim.Optimizer]


def new_layer(group: Any = None) -> uniep.MoELayer:
    group = dist.group.WORLD if group is None else group
    return uniep.MoELayer(64, 32, 8, 2, group=group, bias=True)


def new_model(**group: Any) -> nn.Module:
    return nn.Sequential(OrderedDict(moe=new_layer(**group), dense=nn.Linear(64, 64)))


def plain() -> nn.Module:
    return new_model()


def with_ddp() -> nn.Module:
    model = new_model()
    experts = [f"moe.{key}" for key in ("w1", "w2", "b1", "b2")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    return DistributedDataParallel(model)


def compiled() -> nn.Module:
    return torch.compile(new_model(), backend="eager")


def compiled_ddp() -> nn.Module:
    return torch.compile(with_ddp(), backend="eager")


def compiled_child() -> nn.Module:
    model = new_model()
    model.moe = torch.compile(model.moe, backend="eager")
    return model


def with_checkpoint_wrapper() -> nn.Module:
    model = new_model()
    model.moe = checkpoint_wrapper(model.moe)
    return model


def compiled_within_checkpoint_wrapper() -> nn.Module:
    model = new_model()
    model.moe = checkpoint_wrapper(torch.compile(model.moe, backend="eager"))
    return model


def checkpoint_wrapper_around_all() -> nn.Module:
    return checkpoint_wrapper(new_model())


def in_two_places() -> nn.Module:
    layer = new_layer()
    return nn.ModuleList([layer, layer])


def tied() -> nn.Module:
    """Two layers with one parameter in common."""
    layers = nn.ModuleList([new_layer(), new_layer()])
    layers[1].w1 = layers[0].w1
    return layers


def beside_its_layer() -> nn.Module:
    """A weight that has a second name outside its layer."""
    model = new_model()
    model.of_mine = model.moe.w1
    return model


WRAPPERS = (
    plain,
    with_ddp,
    compiled,
    compiled_ddp,
    compiled_child,
    with_checkpoint_wrapper,
    compiled_within_checkpoint_wrapper,
    checkpoint_wrapper_around_all,
)
SHARED = (in_two_places, tied, beside_its_layer)


def trained(
    make: Callable[[], nn.Module],
    seed: int,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Model:
    """A model and its optimizer after a step, for which any gradients do."""
    torch.manual_seed(seed)
    model = make()
    optimizer = kind(model.parameters(), lr=0.01)
    torch.manual_seed(100 * seed)
    for name, weight in model.named_parameters():
        weight.grad = torch.randn_like(weight)
        if name.split(".")[-1] in ("w1", "w2", "b1", "b2", "of_mine"):
            weight.grad *= 1 + dist.get_rank() % 2  # two ranks share experts everywhere here
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments of this rank."""
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, weight in model.named_parameters():
        for what, value in optimizer.state[weight].items():
            found[f"{name} {what}"] = value.clone()
    return found


def assert_restored(folder: Path, make: Callable[[], nn.Module]) -> None:
    saved = trained(make, seed=3)
    state = state_of(*saved)
    assert state["model"].keys() == saved[0].state_dict().keys()
    named = {name for group in state["optimizer"]["param_groups"] for name in group["params"]}
    assert state["optimizer"]["state"].keys() == named
    dcp.save(state, checkpoint_id=folder)
    other = trained(make, seed=4)
    load(*other, folder)
    wanted, found = tensors_of(*saved), tensors_of(*other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{make.__name__}: {name}"


def restored(folder: Path, ways: tuple[Callable[[], nn.Module], ...]) -> None:
    for make in ways:
        assert_restored(folder / make.__name__, make)
        torch.compiler.reset()


def test_wrappers_change_nothing(tmp_path: Path) -> None:
    run_ranks(2, restored, tmp_path, WRAPPERS)


def test_weights_of_several_names(tmp_path: Path) -> None:
    run_ranks(2, restored, tmp_path, SHARED)


def from_one_wrapper_to_another(folder: Path) -> None:
    model, optimizer = trained(with_ddp, seed=3)
    saved = checkpoint.distributed_optimizer_state_dict(model, optimizer)
    dcp.save(saved, checkpoint_id=folder)
    wanted = optimizer.state[model.module.moe.w1]["exp_avg"]
    model, optimizer = trained(with_checkpoint_wrapper, seed=4)
    state = checkpoint.distributed_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    checkpoint.load_optimizer_state_dict(model, optimizer, state)
    assert torch.equal(optimizer.state[model.moe.w1]["exp_avg"], wanted)


def test_moments_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    run_ranks(2, from_one_wrapper_to_another, tmp_path)


def without_state(folder: Path) -> None:
    model, optimizer = trained(plain, seed=3, kind=torch.optim.SGD)
    state = state_of(model, optimizer)
    assert state["optimizer"]["state"] == {}
    dcp.save(state, checkpoint_id=folder)
    model, optimizer = trained(plain, seed=4, kind=torch.optim.SGD)
    optimizer.param_groups[0]["lr"] = 0.5
    load(model, optimizer, folder)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_an_optimizer_without_state(tmp_path: Path) -> None:
    run_ranks(2, without_state, tmp_path)


def frozen(folder: Path) -> None:
    """Experts that the optimizer has no state of."""
    torch.manual_seed(3)
    model = new_model()
    model.moe.w1.requires_grad_(False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    state = state_of(model, optimizer)
    assert "moe.w2" in state["optimizer"]["state"]
    assert "moe.w1" not in state["optimizer"]["state"]
    dcp.save(state, checkpoint_id=folder)
    load(model, optimizer, folder)


def test_frozen_experts(tmp_path: Path) -> None:
    run_ranks(2, frozen, tmp_path)


def without_first(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {key: of for key, of in state["state"].items() if key > 0}}


def with_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.update({name: tensor.detach().clone() for name, tensor in state.items()})


def all_refuse(
    error: type[Exception], words: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    with pytest.raises(error, match=words):
        checkpoint.distributed_state_dict(model)
    with pytest.raises(error, match=words):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)
    with pytest.raises(error, match=words):
        state = {"state": {}, "param_groups": []}
        checkpoint.load_optimizer_state_dict(model, optimizer, state)


def moments_that_a_hook_takes_out() -> None:
    model, optimizer = trained(plain, seed=3)
    optimizer.register_state_dict_post_hook(without_first)
    with pytest.raises(ValueError, match=r"the optimizer has state of moe\.w1 that its state dict"):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)


def factors_of_moments() -> None:
    model, optimizer = trained(plain, seed=3, kind=torch.optim.Adafactor)
    with pytest.raises(ValueError, match=r"the optimizer's row_var of moe\.w1 has shape \["):
        checkpoint.distributed_optimizer_state_dict(model, optimizer)


def copies_of_experts() -> None:
    model = new_model()
    model._register_state_dict_hook(with_copies)
    with pytest.raises(ValueError, match=r"lacks the parameters moe\.b1, moe\.b2, moe\.w1, "):
        checkpoint.distributed_state_dict(model)


def parametrized_experts() -> None:
    model = new_model()
    parametrize.register_parametrization(model.moe, "w1", nn.Identity())
    optimizer = torch.optim.AdamW(model.parameters())
    all_refuse(ValueError, r"moe\.w1 is no parameter of its layer.*a plain", model, optimizer)


def experts_of_fsdp() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model = new_model(group=mesh["ep"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    all_refuse(NotImplementedError, r"moe\.w1 is a DTensor.*ignored_params", model, optimizer)


@pytest.mark.parametrize(
    "refused",
    [
        moments_that_a_hook_takes_out,
        factors_of_moments,
        copies_of_experts,
        parametrized_experts,
        experts_of_fsdp,
    ],
)
def test_what_cannot_be_saved_is_refused(refused: Callable[[], None]) -> None:
    run_ranks(2, refused)


def sharded_but_for_experts(folder: Path) -> None:
    """What refusals point to: FSDP2 has all that is no expert's."""

    def make() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = new_model(group=mesh["ep"])
        layer = model.moe
        fully_shard(model, mesh=mesh["dp"], ignored_params={layer.w1, layer.w2, layer.b1, layer.b2})
        return model

    saved = trained(make, seed=3)
    dcp.save(state_of(*saved), checkpoint_id=folder)
    other = trained(make, seed=4)
    load(*other, folder)
    for key in ("w1", "b2"):
        mine, its = (getattr(model.moe, key) for model, _ in (saved, other))
        assert torch.equal(mine, its), key
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(saved[1].state[mine][what], other[1].state[its][what]), key
    mine, its = (optimizer.state[model.dense.weight] for model, optimizer in (saved, other))
    assert torch.equal(mine["exp_avg"].full_tensor(), its["exp_avg"].full_tensor())


def test_fsdp_beside_experts(tmp_path: Path) -> None:
    run_ranks(4, sharded_but_for_experts, tmp_path)


def new_beside_fsdp(folder: Path) -> None:
    """An optimizer that has not stepped, some of whose moments are DTensors of FSDP2."""

    def make(seed: int) -> Model:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = new_model(group=mesh["ep"])
        layer = model.moe
        fully_shard(model, mesh=mesh["dp"], ignored_params={layer.w1, layer.w2, layer.b1, layer.b2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.5)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        return model, optimizer

    saved, other = make(3), make(4)
    dcp.save(state_of(*saved), checkpoint_id=folder)
    load(*other, folder)
    for model, optimizer in (saved, other):
        assert len(optimizer.state) == 0
        optimizer.step()
        for weight in model.parameters():  # not damped, as it is the first
            buffer = optimizer.state[weight]["momentum_buffer"]
            assert torch.equal(buffer, torch.ones_like(weight))


def test_a_new_optimizer_beside_fsdp(tmp_path: Path) -> None:
    run_ranks(4, new_beside_fsdp, tmp_path)


def ended(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("hosts", "ranks"))
    layers = [new_layer(), new_layer(group=mesh)]
    dist.destroy_process_group()
    for layer in layers:
        with pytest.raises(ValueError, match="process group of the layer has ended"):
            checkpoint.distributed_state_dict(layer)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    with pytest.raises(ValueError, match="process group of the layer has ended"):
        checkpoint.distributed_state_dict(layers[0])
    checkpoint.distributed_state_dict(new_layer())


def test_a_group_that_has_ended(tmp_path: Path) -> None:
    run_ranks(2, ended, tmp_path)


PREFIX = "model.layers.0.mlp"


def of_family(seed: int = 3, **options: Any) -> uniep.MoELayer:
    torch.manual_seed(seed)
    return uniep.MoELayer(16, 16, 4, 2, **options)


def index_once_saved(folder: Path) -> None:
    """Rank 0 is slow to write it, over one of before."""
    layer = of_family(group=dist.group.WORLD)
    index = folder / "model.safetensors.index.json"
    if dist.get_rank() == 0:
        index.write_text("of before")
        replace = os.replace

        def slowly(*files: Any) -> None:
            time.sleep(1)
            assert not index.exists()  # that of before would name new files
            replace(*files)

        os.replace = slowly
    dist.barrier()
    checkpoint.save_hugging_face(folder, {PREFIX: layer}, "qwen3_moe")
    assert len(json.loads(index.read_text())["weight_map"]) == 13
    other = of_family(seed=4, group=dist.group.WORLD)
    checkpoint.load_hugging_face(other, folder, "qwen3_moe", PREFIX)
    assert torch.equal(other.w1, layer.w1)
    assert not list(folder.glob("*.part"))


def test_all_files_are_there_once_a_rank_has_saved(tmp_path: Path) -> None:
    run_ranks(2, index_once_saved, tmp_path)


def index_that_cannot_be_written(folder: Path) -> None:
    def full(_: Path, file: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    os.replace = full  # type: ignore[assignment]
    layer = of_family(group=dist.group.WORLD)
    words = r"index\.json" if dist.get_rank() == 0 else "rank 0 could not write the index of .*json"
    with pytest.raises(OSError, match=words):
        checkpoint.save_hugging_face(folder, {PREFIX: layer}, "qwen3_moe")
    assert not list(folder.glob("*.part"))


def test_all_ranks_hear_of_an_index_that_cannot_be_written(tmp_path: Path) -> None:
    run_ranks(2, index_that_cannot_be_written, tmp_path)


def file_that_cannot_be_written(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").mkdir(exist_ok=True)
    layer = of_family(group=dist.group.WORLD)
    words = "rank 1 could not write a file in" if dist.get_rank() == 0 else "directory"
    with pytest.raises(OSError, match=words):
        checkpoint.save_hugging_face(folder, {PREFIX: layer}, "qwen3_moe")
    assert not (folder / "model.safetensors.index.json").exists()


def test_all_ranks_hear_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    run_ranks(2, file_that_cannot_be_written, tmp_path)


def save_that_ends_early(folder: Path) -> None:
    layer = of_family(group=dist.group.WORLD)
    checkpoint.save_hugging_face(folder, {PREFIX: layer}, "qwen3_moe")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == 1:
        safetensors.save_file = full  # type: ignore[assignment]
    with pytest.raises(OSError, match="space"):
        checkpoint.save_hugging_face(
            folder, {PREFIX: of_family(seed=4, group=dist.group.WORLD)}, "qwen3_moe"
        )
    dist.barrier()
    with pytest.raises(OSError, match="No such file"):
        checkpoint.load_hugging_face(layer, folder, "qwen3_moe", PREFIX)


def test_nothing_is_loaded_of_a_save_that_ended_early(tmp_path: Path) -> None:
    """Over an earlier one, of which half the files are left."""
    run_ranks(2, save_that_ends_early, tmp_path)


def test_a_folder_with_all_in_one_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileExistsError, match=r"has a model\.safetensors, which transformers"):
        checkpoint.save_hugging_face(tmp_path, {PREFIX: of_family()}, "qwen3_moe")


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    for mode in (0o755, 0o770):
        tmp_path.chmod(mode)
        checkpoint.save_hugging_face(tmp_path, {PREFIX: of_family()}, "qwen3_moe")
        assert (tmp_path / FILES["data"]).stat().st_mode & 0o777 == mode & 0o666


def tensor_that_cannot_be_saved(folder: Path) -> None:
    """One without memory, which raises no OSError."""
    layer = of_family(group=dist.group.WORLD)
    others = {"lm_head.weight": torch.ones(3, device="meta")} if dist.get_rank() == 0 else None
    words = {
        0: (NotImplementedError, "meta tensor"),
        1: (OSError, "rank 0 could not write a file in .*meta tensor"),
    }
    kind, match = words[dist.get_rank()]
    with pytest.raises(kind, match=match):
        checkpoint.save_hugging_face(folder, {PREFIX: layer}, "qwen3_moe", others=others)


def test_all_ranks_hear_of_a_tensor_that_cannot_be_saved(tmp_path: Path) -> None:
    run_ranks(2, tensor_that_cannot_be_saved, tmp_path)


def test_tensors_of_any_strides_are_saved(tmp_path: Path) -> None:
    layer = of_family()
    wanted = layer.w2.detach().clone()
    layer.w2 = nn.Parameter(wanted.transpose(1, 2).contiguous().transpose(1, 2))
    image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    others = {"patches.weight": image, "lm_head.weight": torch.randn(3, 5).T}
    checkpoint.save_hugging_face(tmp_path, {PREFIX: layer}, "qwen3_moe", others=others)
    saved = safetensors.load_file(tmp_path / FILES["data"])
    for name, tensor in others.items():
        assert torch.equal(saved[name], tensor), name
    for expert in range(4):
        name = f"{PREFIX}.experts.{expert}.down_proj.weight"
        assert torch.equal(saved[name], wanted[expert]), name


def test_saving_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers is empty; one layer or more"):
        checkpoint.save_hugging_face(tmp_path / "none", {}, "qwen3_moe")
    assert not (tmp_path / "none").exists()


def others_by_names_of_layers(folder: Path) -> None:
    layer = of_family(group=dist.group.WORLD)
    for own in ("gate.weight", "experts.0.up_proj.weight", "experts.3.down_proj.weight"):
        name = f"{PREFIX}.{own}"
        others = {"lm_head.weight": torch.ones(3), name: torch.ones(3)}
        with pytest.raises(ValueError, match=rf"others has {name}, which layer {PREFIX} saves"):
            checkpoint.save_hugging_face(folder / "x", {PREFIX: layer}, "qwen3_moe", others=others)
    assert not (folder / "x").exists()


def test_others_by_names_of_layers_are_refused(tmp_path: Path) -> None:
    run_ranks(2, others_by_names_of_layers, tmp_path)


@pytest.mark.parametrize("part", ["w1", "w2", "router", "shared"])
def test_a_part_without_memory_is_refused(part: str) -> None:
    options: dict[str, Any] = {
        "router": uniep.RouterConfig(score="sigmoid", bias=True),
        "shared_intermediate": 16,
    }
    tensors = checkpoint.hugging_face_tensors(of_family(**options), "deepseek_v3", PREFIX)
    layer = of_family(seed=4, **options)
    before = layer.w1.detach().clone()
    if part in ("w1", "w2"):
        setattr(layer, part, nn.Parameter(getattr(layer, part).to("meta")))
    else:
        getattr(layer, part).to("meta")
    words = rf"{part}.* of the layer is on 'meta'.*to_empty\(device"
    with pytest.raises(ValueError, match=words):
        checkpoint.load_hugging_face(layer, tensors, "deepseek_v3", PREFIX)
    assert part == "w1" or torch.equal(layer.w1, before)


def written(folder: Path, **files: str | bytes) -> Path:
    """A checkpoint of which some files are others."""
    checkpoint.save_hugging_face(folder, {PREFIX: of_family()}, "qwen3_moe")
    for name, data in files.items():
        file = folder / FILES[name]
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


FILES = {"index": "model.safetensors.index.json", "data": "model-00001-of-00001.safetensors"}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("index", "", r"index\.json is no JSON \(.*an index as"),
        ("index", b"\xff\xfe", r"index\.json is no JSON \(.*an index as"),
        ("index", "{}", r"index\.json has no weight_map"),
        ("index", "[]", r"index\.json has no weight_map"),
        ("index", '{"weight_map": {"a": 3}}', r"index\.json has no weight_map"),
        ("data", "", r"00001\.safetensors is no whole safetensors file \("),
        ("data", "x" * 100, r"00001\.safetensors is no whole safetensors file \("),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, data: str | bytes, words: str) -> None:
    source = written(tmp_path, **{name: data})
    with pytest.raises(ValueError, match=words):
        checkpoint.load_hugging_face(of_family(), source, "qwen3_moe", PREFIX)


def test_an_index_of_what_is_not_there(tmp_path: Path) -> None:
    name = f"{PREFIX}.gate.weight"
    index = json.loads((written(tmp_path) / FILES["index"]).read_text())
    safetensors.save_file({"other": torch.ones(3)}, tmp_path / "b.safetensors")
    index["weight_map"][name] = "b.safetensors"
    source = written(tmp_path, index=json.dumps(index))
    with pytest.raises(KeyError, match=rf"{name} is not in .*b\.safetensors, where .*index\.json"):
        checkpoint.load_hugging_face(of_family(), source, "qwen3_moe", PREFIX)


@pytest.mark.parametrize("of_files", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (None, KeyError, "is not"),
        (lambda tensor: tensor[:1].clone(), ValueError, r"has shape \[1, 16\]; the layer's is \[4"),
        (lambda tensor: tensor.int(), ValueError, "is (torch.int32|I32); weights must be"),
    ],
)
def test_nothing_is_loaded_of_what_does_not_fit(
    tmp_path: Path,
    of_files: bool,
    change: Callable[[Tensor], Tensor] | None,
    error: type[Exception],
    words: str,
) -> None:
    """The router comes last."""
    tensors = dict(checkpoint.hugging_face_tensors(of_family(), "qwen3_moe", PREFIX))
    tensor = tensors.pop(f"{PREFIX}.gate.weight")
    if change is not None:
        tensors[f"{PREFIX}.gate.weight"] = change(tensor)
    if of_files:
        whole = {name: value.clone() for name, value in tensors.items()}
        safetensors.save_file(whole, tmp_path / "model.safetensors")
    layer = of_family(seed=4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    source = tmp_path if of_files else tensors
    with pytest.raises(error, match=rf"gate\.weight {words}"):
        checkpoint.load_hugging_face(layer, source, "qwen3_moe", PREFIX)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_lazy_mapping_is_read_once() -> None:
    read: list[str] = []

    class Lazy(UserDict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    wanted = of_family()
    tensors = Lazy(checkpoint.hugging_face_tensors(wanted, "qwen3_moe", PREFIX))
    layer = of_family(seed=4)
    checkpoint.load_hugging_face(layer, tensors, "qwen3_moe", PREFIX)
    assert torch.equal(layer.w2, wanted.w2)
    assert sorted(read) == sorted(tensors)
