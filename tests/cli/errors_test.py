"""What the commands refuse, in one sentence each (program.py); an argument names one test class."""

import re
import subprocess
import unittest
from pathlib import Path

from program import COMMANDS, PROGRAM, TRACE, ProgramTest


class Errors(ProgramTest):
    def test_arguments(self):
        self.refuse(words=["subcommand"])
        self.refuse("dance", words=["'dance'", ", ".join(COMMANDS)])
        self.refuse("run", words=["--input", "--shape"])
        self.refuse("run", "--input", TRACE, "--shape", "tiny", words=["two layers"])
        self.refuse("run", "--shape", "tiny", "--loudly", words=["--loudly"])
        self.refuse("run", "--shape", "tiny", "--ranks", 0, words=["--ranks", "'0'", "1 to 64"])
        self.refuse("run", "--shape", "tiny", "--ranks", "two", words=["'two'"])
        self.refuse("run", "--shape", "tiny", "--repeat", 0, words=["--repeat"])
        for seed in (-1, 2**63, 2**64, "0x2", "1 "):
            self.refuse("run", "--shape", "tiny", "--seed", seed,
                        words=["--seed", f"'{seed}'", f"0 to {2**63 - 1}"])
        self.refuse("run", "--shape", "tiny", "--skew", "nan", words=["--skew", "0 to 100"])
        self.refuse("run", "--shape", "tiny", "--dropped", 1.5, words=["--dropped", "0 to 1"])
        self.refuse("run", "--input", TRACE, "--dropped", 0.5, words=["--dropped", "--shape"])
        self.refuse("run", "--shape", "tiny", "--pass", "sideways", words=["sideways", "forward"])
        self.refuse("run", "--input", TRACE, "--seed", 1, words=["--seed", "--shape"])
        if "cuda: not in this build" in self.succeed("info"):
            self.refuse("run", "--shape", "tiny", "--backend", "cuda", words=["no CUDA backend"])
        self.refuse("run", "--shape", "gigantic", words=["gigantic", "tiny"])
        self.refuse("run", "--shape", "tiny", "--schedule", "best", words=["best", "sequential"])
        self.refuse("run", "--shape", "tiny", "--schedule", "tile_m=48", words=["tile_m", 48])

    def test_a_mistyped_flag_is_named_first_with_the_nearest(self):
        for args, wrong, near in ((["run", "--schedul", "a", "b"], "--schedul", "--schedule"),
                                  (["simulate", "--shap=tiny"], "--shap", "--shape"),
                                  (["run", "stray", "-ranks", 2], "-ranks", "--ranks"),
                                  (["bench", "--iteratoins", 2], "--iteratoins", "--iterations")):
            done = self.refuse(*args, words=[f"{near} is the nearest", f"uniep {args[0]} --help"])
            self.assertIn(f": there is no {wrong};", done.stderr)
        done = self.refuse("run", "--shape", "tiny", "--loudly", words=["there is no --loudly"])
        self.assertNotIn("nearest", done.stderr)
        self.refuse("rnu", words=["'rnu'", "run is the nearest", ", ".join(COMMANDS)])
        self.refuse("--version-of", "run", words=["there is no --version-of"])
        self.refuse("run", "--shape", "tiny", "--pass", "forwrad", words=["forward is the nearest"])

    def test_the_nearest_value_is_named_once(self):
        for args, wrong, near in ((["--shape", "tyni"], "tyni", "tiny"),
                                  (["--shape", "tiny,tokns=4"], "tokns", "tokens"),
                                  (["--shape", "tiny", "--schedule", "sinlge"], "sinlge", "single"),
                                  (["--shape", "tiny", "--schedule", "piplined:4"], "piplined:4",
                                   "pipelined"),
                                  (["--shape", "tiny", "--schedule", "tile_k=4"], "tile_k",
                                   "tile_m"),
                                  (["--shape", "tiny", "--schedule", "rotate=own-frist"],
                                   "own-frist", "own-first")):
            done = self.refuse("run", *args, words=[f"; {near} is the nearest; "])
            self.assertEqual(done.stderr.count(f"'{wrong}'"), 1, done.stderr)
        for args in (["--shape", "gigantic"], ["--shape", "tiny", "--schedule", "best"]):
            self.assertNotIn("nearest", self.refuse("run", *args).stderr)

    def test_what_a_subcommand_needs_is_named(self):
        for args, words in ((["compare"], "two files are needed: uniep compare A B"),
                            (["compare", TRACE], "two files are needed: uniep compare A B"),
                            (["validate"], "a file is needed: uniep validate FILE"),
                            (["cache"], "list or clear is needed"),
                            (["completion"], "bash or zsh is needed"),
                            (["simulate"], "--shape is required")):
            self.refuse(*args, words=[words])

    def test_stray_arguments_are_named_in_the_order_given(self):
        self.refuse("run", "--shape", "tiny", "b", "a", "c", words=["'b', 'a', 'c'"])
        done = self.refuse("run", *(f"word{i}" for i in range(500)), words=["'word0', 'word1'"])
        self.assertLess(len(done.stderr), 300)

    def test_long_values_are_cut(self):
        long = "".join(f"{i}-" for i in range(1000))
        for args in (["run", "--shape", long], ["run", "--shape", "tiny," + long],
                     ["run", "--shape", "tiny,tokens=" + long], ["bench", "--ranks", long],
                     ["run", "--shape", "tiny", "--schedule", long], [long], ["run", long],
                     ["run", "--shape", "tiny", "--schedule", f"tile_m={long}"],
                     ["run", "--" + long],
                     ["run", "--input", long], ["validate", long], ["tune", "--space", long],
                     ["run", "--shape", "tiny", "--output", f"/none/{long}"],
                     ["run", "--shape", "tiny", "--pass", long], ["simulate", "--profile", long],
                     ["run", "--shape", "tiny", f"--check={long}"]):
            done = self.call(*args)
            self.assertEqual(done.returncode, 2, args[:3])
            line = done.stderr
            self.assertLess(len(line), 700, line)
            self.assertTrue("..." in line or long[:60] not in line, line)
        done = self.refuse("run", "--shape", "tiny", UNIEP_TIMEOUT_MS=long, words=["..."])
        self.assertLess(len(done.stderr), 300)

    def test_a_flag_takes_no_value(self):
        for value in ("maybe", "0", "0x", "-1", "false"):
            self.refuse("run", "--shape", "tiny", f"--check={value}",
                        words=["--check takes no value"])

    def test_a_value_is_said_to_be_missing_or_one_too_many(self):
        self.refuse("run", "--ranks", words=["--ranks has no value"])
        self.refuse("run", "--shape", "tiny", "--seed", 1, "--seed", 2,
                    words=["--seed is given more than once"])

    def test_unknown_variables_are_warned_of_once(self):
        unknown = {"UNIEP_TIMEOUT": "3", "UNIEP_CPU_LINK_GPS": "1", "UNIEP_SOMETHING_ELSE": "x"}
        for args in (["run", "--shape", "tiny"], ["validate", TRACE],
                     ["run", "--shape", "tiny", "--ranks", 4, "--processes"]):
            done = self.call(*args, **unknown)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            for words in (f"uniep {args[0]}: warning: ",
                          "UNIEP_TIMEOUT (nearest: UNIEP_TIMEOUT_MS)",
                          "UNIEP_CPU_LINK_GPS (nearest: UNIEP_CPU_LINK_GBPS)",
                          " UNIEP_SOMETHING_ELSE,"):
                self.assertIn(words, done.stderr)
        self.assertIn("UNIEP_TIMEOUT (nearest: UNIEP_TIMEOUT_MS)",
                      self.call("info", **unknown).stdout)
        self.assertNotIn("read by nothing", self.succeed("info"))
        self.succeed("info", UNIEP_TIMEOUT="", RANK="1")  # an empty one counts as unset

    def test_what_all_processes_refuse_is_said_once(self):
        for args, words in ((["--ranks", 3], "8 experts"), (["--ranks", 2, "--capacity", 3], "512")):
            done = self.refuse("run", "--shape", "tiny", "--processes", *args, words=[words])
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    def test_ranks_of_a_launcher(self):
        started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "29641"}
        alone = started | {"WORLD_SIZE": "1"}
        self.refuse("run", "--shape", "tiny", "--ranks", 4, words=["--ranks is 4", "2 is accepted"],
                    **started)
        self.succeed("run", "--shape", "tiny", "--ranks", 1, **alone)
        for command in (["bench", "--shape", "tiny"], ["tune", "--shape", "tiny", "--budget", 1]):
            self.refuse(*command, "--backend", "cpu", words=["2 processes", "threads of one"],
                        **started)
        self.succeed("bench", "--shape", "tiny", "--iterations", 1, "--ranks", 2, **alone)

    def test_a_call_of_its_own_for_weight_gradients_keeps_all_rows(self):
        self.refuse("run", "--shape", "tiny", "--defer-weights", "--backward-rows", 128,
                    words=["--defer-weights", "--backward-rows is 128"])

    def test_what_this_repository_sets_is_no_unknown_variable(self):
        folder = Path(__file__).parents[2]
        files = [path for part in ("tests", "benchmarks", "scripts", "python", "examples")
                 for path in (folder / part).rglob("*")
                 if path.suffix in (".py", ".sh", ".cpp", ".h") or path.name == "CMakeLists.txt"]
        reads = re.compile(r"""(?:environ\[|environ\.get\(|environ\.setdefault\(|getenv\(|"""
                           r"""ScopedEnv \w+\()["'](UNIEP_\w+)|\$\{?(UNIEP_[A-Z_]+):?-|"""
                           r"""["; ](UNIEP_[A-Z_]+)=[$1]""")
        made_up = (Path(__file__).name, "env_test.cpp")
        names = {name for path in files if path.name not in made_up
                 for found in reads.findall(path.read_text()) for name in found if name}
        self.assertLess({"UNIEP_TEST_CASES", "UNIEP_PROGRAM", "UNIEP_FUZZ_CXX", "UNIEP_OVERLAP"},
                        names)
        self.succeed("validate", TRACE, **dict.fromkeys(names - {"UNIEP_PROGRAM"}, "1"))

    def test_a_forward_pass_has_no_weight_gradients(self):
        for option in (["--defer-weights"], ["--main-grad", "fp32"]):
            self.refuse("run", "--shape", "tiny", "--pass", "forward", *option,
                        words=[" ".join(option), "--pass forward", "backward or both"])
            self.succeed("run", "--shape", "tiny", "--pass", "backward", *option)

    def test_experts_that_do_not_divide(self):
        self.refuse("run", "--input", TRACE, "--ranks", 3, words=["32 experts", "3 ranks"])

    def test_a_layer_without_dy(self):
        layer = self.layer_path(4, with_dy=False)
        self.refuse("run", "--input", layer, words=["dy", "--pass forward"])

    def test_input_files(self):
        self.refuse("run", "--input", self.folder / "none", words=["none"])
        self.refuse("run", "--input", self.folder, words=["directory"])
        self.refuse("run", "--input", __file__, words=["errors_test.py"])

    def test_output_files_are_refused_before_the_work(self):
        for option in ("--save-input", "--output", "--trace", "--plot", "--json"):
            done = self.refuse("run", "--shape", "tiny", option, self.folder / "no" / "file",
                               words=[option, "folder"])
            self.assertEqual(done.stdout, "")
            self.refuse("run", "--shape", "tiny", option, self.folder, words=[option, "directory"])

    def test_two_outputs_need_two_files(self):
        path = self.folder / "both"
        done = self.refuse("run", "--shape", "tiny", "--output", path, "--json",
                           self.folder / "." / "both", words=["--output", "--json", "a file for each"])
        self.assertEqual(done.stdout, "")
        self.assertFalse(path.exists())
        self.succeed("run", "--shape", "tiny", "--json", "/dev/null", "--plot", "/dev/null")

    def test_a_full_disk(self):
        self.refuse("run", "--shape", "tiny", "--json", "/dev/full", words=["/dev/full"])
        with open("/dev/full", "w") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output", done.stderr)

    def test_a_layer_larger_than_memory(self):
        self.refuse("run", "--shape", "deepseek-v3,hidden=1048576,experts=65536", words=["memory"])

    def test_environment(self):
        self.refuse("run", "--shape", "tiny", words=["UNIEP_TIMEOUT_MS", "soon"],
                    UNIEP_TIMEOUT_MS="soon")
        self.refuse("run", "--shape", "tiny", words=["UNIEP_CPU_ISA"], UNIEP_CPU_ISA="mmx")

    def test_a_wait_that_expires_fails_the_run(self):
        done = self.refuse("run", "--shape", "tiny", "--ranks", 2, code=1,
                           words=["rank", "stage", "tile", "expected", "seen"],
                           UNIEP_TIMEOUT_MS="50", UNIEP_CPU_LINK_GBPS="1",
                           UNIEP_CPU_LINK_LATENCY_US="1000000")
        self.assertNotIn("done", done.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
