"""That structures in Python have the members of those of c_api.h, in their order and types."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

import uniep
from uniep import _calls, _library, tuning

HEADER = Path(__file__).parents[2] / "include" / "uniep" / "c_api.h"

STRUCTURES = {
    "uniep_group_config": _library.GroupConfig,
    "uniep_problem": _library.Problem,
    "uniep_memory_needs": _library.Needs,
    "uniep_layer_config": _library.LayerConfig,
    "uniep_row_pool_state": _library.RowPoolState,
    "uniep_row_memory": _calls.RowMemory,
    "uniep_wave_events": _calls.WaveEvents,
    "uniep_forward_call": _calls.ForwardCall,
    "uniep_backward_call": _calls.BackwardCall,
    "uniep_tune_config": tuning._TuneConfig,
    "uniep_tune_result": tuning._TuneResult,
}
#: Of which only ops know, which are C++.
OF_OPS = {"uniep_rows_call"}
SIZES = {"int32_t": 4, "int64_t": 8, "double": 8, "int": 4}


def structures_of_header() -> dict[str, str]:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    return {name: body for body, name in re.findall(r"typedef struct {(.*?)} (\w+);", text, re.S)}


def members(body: str) -> list[tuple[str, int]]:
    """Name and bytes of each."""
    found = []
    for declaration in filter(None, (" ".join(part.split()) for part in body.split(";"))):
        if function := re.match(r".*\(\*(\w+)\)\(", declaration):
            found.append((function[1], 8))
            continue
        first, *more = declaration.split(",")
        kind, name = first.rsplit(maxsplit=1)
        for each in (name, *more):
            width, text = 1, each.strip()
            if array := re.match(r"(\w+)\[(\d+)\]", text):
                text, width = array[1], int(array[2])
            if kind.endswith("*") or text.startswith("*"):
                size = 8
            elif kind == "char":
                size = 1
            elif kind in STRUCTURES:
                size = ctypes.sizeof(STRUCTURES[kind])
            else:
                size = SIZES[kind]
            found.append((text.lstrip("*"), size * width))
    return found


def test_all_are_known():
    assert set(structures_of_header()) == {*STRUCTURES, *OF_OPS}


@pytest.mark.parametrize("name", STRUCTURES)
def test_members_are_those_of_the_header(name):
    fields = [(field[0], ctypes.sizeof(field[1])) for field in STRUCTURES[name]._fields_]
    assert fields == members(structures_of_header()[name])


def test_reasons_of_a_routing_that_does_not_fit_are_those_of_the_header():
    found = re.findall(r"UNIEP_OVERFLOW_(\w+) = (\d)", HEADER.read_text())
    assert dict(found) == {reason.name: str(reason.value) for reason in uniep.Overflow}
