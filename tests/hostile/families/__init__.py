"""The families of attacks, and how many of all cases each gets."""

from __future__ import annotations

from typing import NamedTuple

from case import Attack

from . import (
    api,
    concurrency,
    environment,
    flags,
    full_disks,
    kills,
    limits,
    numbers,
    outputs_and_inputs,
    pipes,
    places,
    rank_processes,
    spoiled_layers,
    tuned,
)


class Family(NamedTuple):
    name: str
    share: float
    attack: Attack


ALL = (
    Family("layers", 25, spoiled_layers.attack),
    Family("numbers", 8, numbers.attack),
    Family("flags", 22, flags.attack),
    Family("environment", 10, environment.attack),
    Family("limits", 10, limits.attack),
    Family("disks", 6, full_disks.attack),
    Family("outputs", 7, outputs_and_inputs.attack),
    Family("pipes", 5, pipes.attack),
    Family("tuned", 8, tuned.attack),
    Family("places", 5, places.attack),
    Family("kills", 6, kills.attack),
    Family("ranks", 3, rank_processes.attack),
    Family("crowd", 2, concurrency.attack),
    Family("api", 4, api.attack),
)
BY_NAME = {family.name: family for family in ALL}
