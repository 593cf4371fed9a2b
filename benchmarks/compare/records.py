"""Result files of schema uniep-bench-1 (docs/results.md)."""
import json

SCHEMA = "uniep-bench-1"


def record(shape, ranks, direction, schedule, times, baseline_ms=None, floor_ms=None, wrong=None,
           **extras):
    return {"shape": shape.name, "tokens": shape.tokens, "skew": shape.skew, "ranks": ranks,
            "direction": direction, "schedule": schedule,
            "ms": times.ms, "p10": times.p10, "p90": times.p90, "baseline_ms": baseline_ms,
            "floor_ms": floor_ms,
            "efficiency": floor_ms / times.ms if floor_ms is not None else None,
            "wrong": wrong, **extras}


def write(path, header, records):
    """Called after every shape, so that a later failure loses nothing."""
    with open(path, "w") as file:
        json.dump({"schema": SCHEMA, **header, "records": records}, file, indent=1)
        file.write("\n")
