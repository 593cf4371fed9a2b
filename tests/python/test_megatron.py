"""uniep.megatron with the installed megatron-core, on CPUs, at EP 1 and 2; checkpoints also at 4.

The cases are in megatron_cases.py. Those of a group run in one set of processes; each is a test.
With a checkout of Megatron-LM in PYTHONPATH, that is tested.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import megatron_cases
import pytest
from ranks import run_ranks

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


class _Outcomes:
    """What the cases of one group came to, by name and rank."""

    def __init__(self, ranks: int, folder: Path, only: tuple[str, ...] = ()) -> None:
        self.ranks = ranks
        self.error = None
        try:
            run_ranks(ranks, megatron_cases.run_all, str(folder), only)
        except Exception as error:  # the case that ended it is told by the files
            self.error = error
        self.by_case: dict[str, list[str]] = {}
        for rank in range(ranks):
            file = folder / f"done{rank}"
            for entry in file.read_text().split("\0\n")[:-1] if file.exists() else []:
                name, outcome = entry.split("\0")
                self.by_case.setdefault(name, []).append(outcome)

    def of(self, case: str) -> None:
        """Passes, skips or fails the test of a case."""
        outcomes = self.by_case.get(case, [])
        failed = [o for o in outcomes if o != "passed" and not o.startswith("skipped")]
        if failed:
            pytest.fail("\n".join(failed), pytrace=False)
        if len(outcomes) < self.ranks:
            ended = f"an earlier case or a rank ended the run: {self.error}"
            pytest.fail(f"{len(outcomes)} of {self.ranks} ranks came through; {ended}", False)
        for outcome in outcomes:
            if outcome.startswith("skipped"):
                pytest.skip(outcome.removeprefix("skipped: "))


@pytest.fixture(scope="module", params=[1, 2], ids=["ep1", "ep2"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Outcomes:
    return _Outcomes(request.param, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("case", list(megatron_cases.cases()))
def test_megatron(outcomes: _Outcomes, case: str) -> None:
    outcomes.of(case)


def test_checkpoints_between_4_2_and_1_ranks(tmp_path: Path) -> None:
    cases = ("distributed_checkpoints", "distributed_optimizer_checkpoint")
    outcomes = _Outcomes(4, tmp_path, only=cases)
    for case in cases:
        outcomes.of(case)
