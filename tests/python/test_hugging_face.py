"""Files under Hugging Face's names: saved by several ranks, loaded, refused and damaged."""

from __future__ import annotations

import errno
import json
import os
import time
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import uniep
from uniep import checkpoint

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
