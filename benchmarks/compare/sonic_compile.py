"""Compiles the products that SonicMoE's tuner tries before it tries them, many at a time.

Its tuner compiles a product's candidates when it meets the product; those of products with routed
rows in one process, one after another, half a minute each. Here a step runs with kernels that do
nothing, which shows all candidates of all products, and processes compile these side by side. The
kernels go to the cache on disk of quack-kernels, from which the tuner takes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from typing import Any

# A module of quack, what it compiles a kernel with, and the arguments, which are the cache's key.
Kernel = tuple[str, str, tuple[Any, ...], tuple[tuple[str, Any], ...]]

_COMPILERS = {
    "quack.gemm": "_compile_gemm",
    "quack.gemm_act": "_compile_gemm_act",
    "quack.gemm_dact": "_compile_gemm_dact",
}


def compile_ahead(steps: Iterable[Callable[[], object]], workers: int | None = None) -> int:
    """Compiles what the steps would; returns the number of kernels.

    Args:
        steps: each runs layers forward and backward. Their results are not used, nor is an error
            raised, since nothing is computed.
        workers: processes; None: as many as there are cores.
    """
    kernels = _kernels_of(steps)
    context = get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=context) as pool:
        done = [pool.submit(_compile, kernel) for kernel in kernels]
        for number, one in enumerate(as_completed(done), 1):
            fault = one.result()
            print(f"# compiled {number} of {len(kernels)}{fault and f': {fault}'}", flush=True)
    return len(kernels)


def _kernels_of(steps: Iterable[Callable[[], object]]) -> list[Kernel]:
    found: dict[Kernel, None] = {}
    with _every_candidate(), _recorded(found):
        for step in steps:
            try:
                step()
            except Exception as error:
                print(f"# a step without kernels: {type(error).__name__}: {error}", flush=True)
    return list(found)


@contextmanager
def _recorded(found: dict[Kernel, None]) -> Iterator[None]:
    """What would compile a kernel notes it, and gives one that does nothing."""
    compilers = [(import_module(module), name) for module, name in _COMPILERS.items()]
    before = [getattr(module, name) for module, name in compilers]

    def noting(module: str, name: str) -> Callable[..., Callable[..., None]]:
        def note(*args: Any, **kwargs: Any) -> Callable[..., None]:
            found[module, name, args, tuple(sorted(kwargs.items()))] = None
            return lambda *args, **kwargs: None

        return note

    for module, name in compilers:
        setattr(module, name, noting(module.__name__, name))
    try:
        yield
    finally:
        for (module, name), compiler in zip(compilers, before, strict=True):
            setattr(module, name, compiler)


@contextmanager
def _every_candidate() -> Iterator[None]:
    """A product runs with every candidate of its tuner, which measures nothing."""
    from quack.autotuner import Autotuner

    before = Autotuner.__call__

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        result = None
        for candidate in tuner.prune_configs(kwargs):
            result = tuner.fn(*args, **kwargs, **candidate.all_kwargs())
        return result

    Autotuner.__call__ = run
    try:
        yield
    finally:
        Autotuner.__call__ = before


def _compile(kernel: Kernel) -> str:
    """In a process of its own; returns what went wrong, or nothing."""
    import quack.cache_utils

    quack.cache_utils.COMPILE_ONLY = True
    module, name, args, kwargs = kernel
    try:
        getattr(import_module(module), name)(*args, **dict(kwargs))
    except Exception as error:
        return f"{name}{args}: {type(error).__name__}: {error}".splitlines()[0]
    return ""
