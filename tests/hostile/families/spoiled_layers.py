"""Layer files that are damaged, adversarial, or no files at all."""

from __future__ import annotations

import json
import os
import resource
import stat
import struct
from pathlib import Path

import commands
import isolation
import layers
from case import Case, Command, Outcome, Skipped

NO_LAYERS: tuple[str, ...] = ("/dev/zero", "/dev/null", "/dev/full", "/dev/random", "/dev/stdin")
NO_LAYERS += ("/proc/self/mem", "/proc/self/environ", "/proc/self/fd", "/", "nothing", "a" * 300)
NO_LAYERS += ("a/" * 3000, "/dev/shm/nothing", "layer\nwith\nlines", "layer\x1b[31m")
MEMORY = {resource.RLIMIT_AS: 4 << 30}


def attack(case: Case) -> None:
    kind = case.rng.choices(("spoiled", "special", "sparse", "forbidden"), (85, 6, 5, 4))[0]
    if kind == "spoiled":
        name, content = layers.spoiled(case.rng)
        case.log(name)
        _judge_both(case, case.add_input(case.path("layer.safetensors"), content))
    elif kind == "special":
        _refuse_both(case, _special(case))
    elif kind == "sparse":
        _refuse_both(case, _sparse(case))
    else:
        _forbidden(case)


def _judge_both(case: Case, path: Path) -> None:
    """`validate` accepts what `run` accepts, and `run` takes it or says why not."""
    checked = _call(case, "validate", path)
    ran = _call(case, "run", "--input", path, "--output", "result")
    if _good_for_forward_only(checked):
        case.require(ran.code == 2, "validate knows of no dy, and run went backward")
        ran = _call(case, "run", "--input", path, "--pass", "forward", "--output", "result")
    same = (checked.code == 0) == (ran.code == 0)
    case.require(same, f"validate exits with {checked.code}, and run with {ran.code}")
    case.require(checked.code != 1 and ran.code != 1, "a file is no failure of a pass")
    if any(s.name == "compare" for s in commands.subcommands(case.program)):
        code = _call(case, "compare", path, path).code
        case.require(code == 0 or (code == 2 and checked.code == 2), f"compare exits with {code}")


def _good_for_forward_only(checked: Outcome) -> bool:
    return b"good for a forward pass" in checked.stdout


def _refuse_both(case: Case, path: Path | str) -> None:
    for words in (("validate", path), ("run", "--input", path, "--output", "result")):
        code = _call(case, *words).code
        case.require(code == 2, f"exit code {code} for {path}")


def _call(case: Case, *words: str | Path) -> Outcome:
    outputs = {"result": "tensors"} if "--output" in words else {}
    return case.run(Command(words, outputs=outputs, limits=MEMORY, seconds=20))


def _special(case: Case) -> Path | str:
    path = case.path("special")
    case.expect(path)
    match case.rng.randrange(6):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("special")
        case 3:
            path.symlink_to("nothing")
        case 4:
            path.write_bytes(b"")
        case _:
            return case.rng.choice(NO_LAYERS)
    return path


def _sparse(case: Case) -> Path:
    """Large by its size, and with a header that fits."""
    elements = case.rng.choice((1 << 33, 1 << 40, 1 << 42, 1 << 20))
    header = json.dumps(
        {"x": {"dtype": "BF16", "shape": [elements, 1], "data_offsets": [0, 2 * elements]}}
    ).encode()
    path = case.path("sparse")
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    try:
        os.truncate(path, 8 + len(header) + 2 * elements)
    except OSError:
        raise Skipped("the file system has no sparse files of that size") from None
    case.expect(path)
    return path


def _forbidden(case: Case) -> None:
    """Permissions deny it to whoever is not root."""
    folder = case.path("forbidden")
    folder.mkdir()
    path = folder / "layer"
    path.write_bytes(layers.good(case.rng))
    case.expect(path)
    target = case.rng.choice((path, folder))
    target.chmod(case.rng.choice((0, stat.S_IWUSR, stat.S_IXUSR)) if target == path else 0)
    os.chmod(case.folder, 0o755)
    user = isolation.ANOTHER_USER if isolation.is_root() else None
    for words in (("validate", path), ("run", "--input", path)):
        outcome = case.run(Command(words, user=user))
        case.require(outcome.code == 2, f"exit code {outcome.code} for a forbidden file")
