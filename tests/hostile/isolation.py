"""What a worker asks of the system so that its cases see nobody else and leave nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 1 << 14, 1 << 18
MNT_DETACH = 2

# Whoever it is, it is not root: what permissions deny, they deny to this user.
ANOTHER_USER = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def is_root() -> bool:
    return os.geteuid() == 0


def mount_tmpfs(folder: Path, options: str) -> bool:
    return _mount(folder, 0, options.encode())


def make_read_only(folder: Path) -> bool:
    return _mount(folder, MS_REMOUNT | MS_RDONLY, None)


def _mount(folder: Path, flags: int, options: bytes | None) -> bool:
    code: int = _libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options)
    return code == 0


def unmount(folder: Path) -> None:
    _libc.umount2(os.fsencode(folder), MNT_DETACH)


class Isolation:
    """Of a worker process, for as long as it lives."""

    def __init__(self) -> None:
        adopt_orphans()
        self.can_mount = self._mounts_of_its_own()

    @staticmethod
    def _mounts_of_its_own() -> bool:
        if _libc.unshare(CLONE_NEWNS) != 0:
            return False
        if _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
            return False
        return mount_tmpfs(Path("/dev/shm"), "size=1g")


def adopt_orphans() -> None:
    """Whatever a command leaves running becomes a child of this process."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_leftover_children(patience: float) -> list[str]:
    """Waits for what is still running, and ends and names what does not end by itself."""
    until = time.monotonic() + patience
    names: list[str] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return names
        if pid != 0:
            continue
        if time.monotonic() > until:
            for child in children_of(os.getpid()):
                names.append(command_line_of(child))
                os.kill(child, signal.SIGKILL)
            until = time.monotonic() + patience
        time.sleep(0.002)


def children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def command_line_of(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return f"process {pid}"


def environment_of(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)
