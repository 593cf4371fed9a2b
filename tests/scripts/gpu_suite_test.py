"""scripts/gpu_suite.sh with made-up programs and GPUs: what runs, what it says, how it exits."""
import os
import pathlib
import signal
import stat
import subprocess
import tempfile
import time
import unittest

SCRIPT = os.environ["GPU_SUITE"]

UNIEP = """#!/bin/sh
echo "sharing: ${UNIEP_SHARE_DEVICE:-no}"
while [ $# -gt 0 ]; do
  [ "$1" = --ranks ] && ranks=$2
  [ "$1" = --output ] && output=$2
  [ "$1" = --check ] && echo checked
  shift
done
[ -z "$output" ] || echo "${RESULT:-the bytes}" > "$output"
[ "$ranks" != "$FAILING_RANKS" ] || exit 1
"""
TEST_PROGRAM = """#!/bin/sh
echo "sharing: ${UNIEP_SHARE_DEVICE:-no}"
echo '[  PASSED  ] 3 tests.'
[ -z "$SKIPPED" ] || echo "[  SKIPPED ] $SKIPPED tests, listed below:"
"""
TRAIN_GPU = """#!/bin/sh
[ "${UNIEP_SHARE_DEVICE:-no}" = "${SHARING:-no}" ] || exit 1
[ "$RANK" != "$FAILING_RANK" ] || exit 1
for share in 0 1 2 3; do
  [ $((share * WORLD_SIZE / 4)) != "$RANK" ] || echo "share $share: ${BITS:-bits}"
done
"""


class GpuSuite(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.layer = self.folder / "layer.safetensors"
        self.layer.write_text("a layer")
        self.program("build/bin/uniep", UNIEP)
        self.program("build/tests/cuda/cuda_plan_test", TEST_PROGRAM)
        self.program("build/tests/cuda/cuda_group_test", TEST_PROGRAM)
        self.program("path/python3", "#!/bin/sh\nexit 1\n")  # has no torch
        self.set_gpus(8)

    def program(self, path, text):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file

    def set_gpus(self, count):
        lines = "".join(f"echo GPU {i}\n" for i in range(count))
        self.program("path/nvidia-smi", f"#!/bin/sh\n{lines or 'exit 1'}\n")

    def start(self, **environment):
        outer = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        env = {**outer, "PATH": f"{self.folder / 'path'}:{os.environ['PATH']}", **environment}
        return subprocess.Popen(
            ["bash", SCRIPT, str(self.folder / "build"), str(self.layer)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run_suite(self, **environment):
        """The exit code, all that was printed, and the verdicts of the table by part."""
        process = self.start(**environment)
        return self.finished(process)

    def finished(self, process):
        output, _ = process.communicate(timeout=60)
        lines = [line for line in output.partition("\n# logs in ")[2].splitlines()[1:]
                 if not line.startswith("#")]
        verdicts = {line.split("  ")[0]: line[lines[0].index("verdict"):] for line in lines[1:]}
        return process.returncode, output, verdicts

    def test_parts_that_pass(self):
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^run|^cuda_plan")
        self.assertEqual((code, set(verdicts.values())), (0, {"passed"}), output)
        self.assertEqual(len(verdicts), 1 + 4 * 4 + 3)  # schedules at 1 to 8 ranks, shared to 4
        self.assertIn("# 20 passed, 0 failed, 0 did not run", output.splitlines()[-1])
        checked = [log for log in (self.folder / "build/gpu_suite").glob("run*.log")
                   if "checked" in log.read_text()]
        # Of the schedules one: all others are compared with its bytes.
        self.assertEqual(len(checked), 1 + 3)

    def test_a_part_that_fails(self):
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", FAILING_RANKS="2")
        self.assertEqual(code, 1, output)
        self.assertEqual([v.split(":")[0] for v in verdicts.values()],
                         ["passed", "FAILED", "passed", "passed"])

    def test_other_bytes_fail(self):
        self.run_suite(GPU_SUITE_PARTS="^run --ranks 1 single")
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run --ranks 2 single", RESULT="others")
        self.assertEqual((code, list(verdicts.values())), (1, ["FAILED: exit code 1"]))

    def test_the_example_prints_the_same_lines_on_any_number_of_gpus(self):
        self.program("build/examples/train_gpu", TRAIN_GPU)
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^example")
        self.assertEqual((code, list(verdicts.values())), (0, ["passed"] * 3), output)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^example.*2", BITS="other bits")
        self.assertEqual((code, list(verdicts.values())), (1, ["FAILED: exit code 1"]))
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^example", FAILING_RANK="1")
        self.assertEqual([v.split(":")[0] for v in verdicts.values()],
                         ["passed", "FAILED", "FAILED"])

    def test_without_a_gpu_nothing_runs(self):
        self.set_gpus(0)
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda_plan")
        self.assertEqual((code, verdicts),
                         (3, {"cuda_plan_test": "did not run: there is no GPU here"}))
        self.assertIn("# there is no GPU here", output)

    def logs_that_say(self, text):
        return {log.stem for log in (self.folder / "build/gpu_suite").glob("*.log")
                if text in log.read_text().splitlines()}

    def test_ranks_share_gpus_where_there_are_too_few(self):
        self.set_gpus(1)
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single")
        self.assertEqual((code, list(verdicts.values())),
                         (0, ["passed", "passed, 2 ranks on 1 GPU", "passed, 4 ranks on 1 GPU",
                              "passed, 8 ranks on 1 GPU"]), output)
        self.assertEqual(len(self.logs_that_say("sharing: 1")), 3)
        self.assertEqual(len(self.logs_that_say("sharing: no")), 1)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", GPU_SUITE_GPUS="1")
        self.assertEqual((code, len(verdicts)), (0, 1))

    def test_ranks_that_have_gpus_of_their_own_do_not_share(self):
        self.set_gpus(4)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", UNIEP_SHARE_DEVICE="1")
        self.assertEqual((code, list(verdicts.values())),
                         (0, ["passed"] * 3 + ["passed, 8 ranks on 4 GPUs"]))
        self.assertEqual(len(self.logs_that_say("sharing: no")), 3)

    def test_only_visible_gpus_count(self):
        for visible, verdict in (("5,7", "passed, 4 ranks on 2 GPUs"), ("0,1,2,3", "passed"),
                                 ("", "did not run: there is no GPU here")):
            _, output, verdicts = self.run_suite(
                GPU_SUITE_PARTS="^run --ranks 4 single", CUDA_VISIBLE_DEVICES=visible)
            self.assertEqual(list(verdicts.values()), [verdict], output)

    def test_the_example_runs_on_shared_gpus(self):
        self.set_gpus(2)
        self.program("build/examples/train_gpu", TRAIN_GPU)
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^example.*[12]$")
        self.assertEqual((code, list(verdicts.values())), (0, ["passed"] * 2), output)
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^example.*4$", SHARING="1")
        self.assertEqual((code, list(verdicts.values())),
                         (0, ["passed, 4 ranks on 2 GPUs"]), output)

    def test_programs_whose_tests_have_groups_share_gpus(self):
        self.set_gpus(2)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda", SKIPPED="1")
        self.assertEqual((code, verdicts), (0, {
            "cuda_group_test": "passed, 1 of 4 tests skipped, up to 8 ranks on 2 GPUs",
            "cuda_plan_test": "passed, 1 of 4 tests skipped"}))
        self.assertEqual(self.logs_that_say("sharing: no"), {"cuda_plan_test"})
        self.set_gpus(8)
        _, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda_group")
        self.assertEqual(verdicts, {"cuda_group_test": "passed"})

    def test_what_passed_on_shared_gpus_has_not_passed_on_own_ones(self):
        self.set_gpus(1)
        self.run_suite(GPU_SUITE_PARTS="^run.*single")
        self.set_gpus(2)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", GPU_SUITE_RESUME="1")
        self.assertEqual((code, list(verdicts.values())),
                         (0, ["passed, before", "passed", "passed, 4 ranks on 2 GPUs",
                              "passed, 8 ranks on 2 GPUs"]))

    def test_what_measures_needs_a_gpu_for_each_rank(self):
        self.set_gpus(1)
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^uniep bench")
        self.assertEqual((code, list(verdicts.values())), (3, [
            "passed", "did not run: it measures 2 GPUs, and the machine has 1",
            "did not run: it measures 4 GPUs, and the machine has 1"]))

    def test_tests_that_were_skipped_have_not_run(self):
        self.assertEqual(self.run_suite(GPU_SUITE_PARTS="^cuda_plan", SKIPPED="2")[::2],
                         (0, {"cuda_plan_test": "passed, 2 of 5 tests skipped"}))
        self.program("build/tests/cuda/cuda_plan_test",
                     "#!/bin/sh\necho '[  SKIPPED ] 5 tests, listed below:'\n")
        self.assertEqual(self.run_suite(GPU_SUITE_PARTS="^cuda_plan")[::2],
                         (3, {"cuda_plan_test": "did not run: all tests were skipped"}))

    def test_parts_that_passed_are_not_repeated(self):
        self.run_suite(GPU_SUITE_PARTS="^run.*single", FAILING_RANKS="2")
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", GPU_SUITE_RESUME="1")
        self.assertEqual((code, list(verdicts.values())),
                         (0, ["passed, before", "passed", "passed, before", "passed, before"]))
        self.program("build/bin/uniep", UNIEP + "# another build\n")
        _, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single", GPU_SUITE_RESUME="1")
        self.assertEqual(set(verdicts.values()), {"passed"})

    def test_another_layer_has_other_bytes_and_verdicts(self):
        self.run_suite(GPU_SUITE_PARTS="^run.*single")
        self.layer.write_text("another layer")
        code, output, verdicts = self.run_suite(GPU_SUITE_PARTS="^run.*single",
                                                GPU_SUITE_RESUME="1", RESULT="other bytes")
        self.assertEqual((code, set(verdicts.values())), (0, {"passed"}), output)

    def test_a_test_program_that_was_built_again_runs_again(self):
        self.run_suite(GPU_SUITE_PARTS="^cuda_plan")
        self.program("build/tests/cuda/cuda_plan_test", TEST_PROGRAM + "# another build\n")
        _, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda_plan", GPU_SUITE_RESUME="1")
        self.assertEqual(verdicts, {"cuda_plan_test": "passed"})

    def test_an_interrupt_still_gives_a_table(self):
        self.program("build/tests/cuda/cuda_plan_test",
                     f"#!/bin/sh\ntouch {self.folder}/begun\nexec sleep 30\n")
        process = self.start(GPU_SUITE_PARTS="^cuda_plan|^run.*single")
        while not (self.folder / "begun").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        code, output, verdicts = self.finished(process)
        self.assertEqual(code, 3, output)
        self.assertEqual(list(verdicts.values()),
                         ["did not run to its end: interrupted"] + ["did not run: interrupted"] * 4)
        self.assertIn("interrupted by SIGTERM", output.splitlines()[-1])

    def test_a_part_that_would_take_too_long_is_not_begun(self):
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda_plan", GPU_SUITE_SECONDS="20")
        self.assertEqual((code, verdicts),
                         (3, {"cuda_plan_test": "did not run: GPU_SUITE_SECONDS is 20"}))
        self.run_suite(GPU_SUITE_PARTS="^cuda_plan")  # now it is known to be faster
        code, _, _ = self.run_suite(GPU_SUITE_PARTS="^cuda_plan", GPU_SUITE_SECONDS="20")
        self.assertEqual(code, 0)

    def test_a_part_that_takes_too_long_is_ended(self):
        verdict = self.folder / "build/gpu_suite/cuda_plan_test.verdict"
        verdict.parent.mkdir()
        verdict.write_text("0 0 passed\n")  # by another build, in no time: so it is begun
        self.program("build/tests/cuda/cuda_plan_test", "#!/bin/sh\nexec sleep 60\n")
        code, _, verdicts = self.run_suite(GPU_SUITE_PARTS="^cuda_plan", GPU_SUITE_SECONDS="6")
        self.assertEqual((code, verdicts), (3, {
            "cuda_plan_test": "did not run to its end: GPU_SUITE_SECONDS is 6"}))

    def test_the_list_runs_nothing(self):
        code, output, _ = self.run_suite(GPU_SUITE_LIST="1")
        self.assertEqual(code, 0)
        self.assertIn("racecheck uniep run single", output)
        self.assertRegex(output, r"cuda_plan_test +1 +30 s")
        self.assertFalse(list((self.folder / "build/gpu_suite").iterdir()))
        code, output, _ = self.run_suite(GPU_SUITE_PARTS="nothing")
        self.assertEqual((code, output[:19]), (2, "no part is selected"))

    def test_sanitizers_have_a_minute(self):
        self.program("path/compute-sanitizer",
                     '#!/bin/sh\necho "$RANK of $WORLD_SIZE, $UNIEP_TEST_CASES cases: $*"\n')
        self.program("path/timeout", '#!/bin/sh\necho "within $2 s"\nshift 2\nexec "$@"\n')
        code, output, _ = self.run_suite(GPU_SUITE_PARTS="^racecheck uniep run")
        self.assertEqual(code, 0, output)
        log = (self.folder / "build/gpu_suite/racecheck_uniep_run_single.log").read_text()
        self.assertRegex(log, "^within 60 s\n0 of 1, 0.02 cases: "
                              "--tool racecheck --error-exitcode 99 .*uniep run")


if __name__ == "__main__":
    unittest.main()
