"""What people see while uniep works, and what is left when they end it (program.py); an argument
names one test class."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
import unittest
from pathlib import Path

from program import COMMANDS, PROGRAM, TRACE, ProgramTest, unfolded

SLOW_LINK = {"UNIEP_CPU_LINK_GBPS": "0.0015"}  # more than a second for a pass of the trace
ERASE = "\r\x1b[K"


class Terminal(ProgramTest):
    """A progress bar is for people: on a terminal, and only when there is something to wait for."""

    def errors_on_a_terminal(self, *args, columns=80, **environment):
        try:
            ours, theirs = pty.openpty()
        except OSError as error:  # some containers have no /dev/pts
            self.skipTest(f"no terminal to be had: {error}")
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with subprocess.Popen([PROGRAM, *map(str, args)], stdout=subprocess.DEVNULL, stderr=theirs,
                              env={**os.environ, **environment}) as process:
            os.close(theirs)
            text = b""
            while True:
                try:
                    chunk = os.read(ours, 4096)
                except OSError:  # how Linux says that the other end has been closed
                    break
                if not chunk:
                    break
                text += chunk
            os.close(ours)
            self.assertEqual(process.wait(), 0)
        return text.decode()

    def bars(self, text):
        """What the line was, again and again."""
        self.assertTrue(text.startswith(ERASE) and text.endswith(ERASE), repr(text[-40:]))
        self.assertNotIn("\n", text)
        return text.split(ERASE)[1:-1]

    def running(self, **how):
        return self.bars(self.errors_on_a_terminal(
            "run", "--input", TRACE, "--ranks", 2, "--pass", "forward", "--repeat", 3,
            **how, **SLOW_LINK))

    def test_long_work_shows_a_bar_and_erases_it(self):
        bars = self.running()
        self.assertTrue(all(bar.startswith("running 2 ranks ") for bar in bars), bars)
        shares = [re.fullmatch(r"running 2 ranks \[#*\.*\] (\d+) %, \d+ s left", bar)
                  for bar in bars]
        shares = [int(match[1]) for match in shares if match]
        self.assertGreater(len(set(shares)), 1, bars)
        self.assertEqual(shares, sorted(shares))

    def test_a_bar_fits_the_terminal(self):
        for columns, pattern in ((20, r"run.*… \d+ %, \d+ s left"),
                                 (33, r"running 2 ranks \d+ %, \d+ s left"),
                                 (200, r"running 2 ranks \[[#.]{30}\] \d+ %, \d+ s left")):
            bars = self.running(columns=columns)
            for bar in bars:
                self.assertLess(len(bar), columns, bar)
            self.assertTrue(any(re.fullmatch(pattern, bar) for bar in bars), bars)

    def test_ranks_as_processes_show_one_bar(self):
        bars = self.bars(self.errors_on_a_terminal(
            "run", "--input", TRACE, "--ranks", 2, "--processes", "--pass", "forward", "--repeat",
            3, **SLOW_LINK))
        self.assertTrue(all(bar.startswith("running 2 processes ") for bar in bars), bars)

    def test_other_long_commands(self):
        cache = {"UNIEP_TUNE_CACHE": str(self.folder / "tuned.json")}
        for label, command in (
                ("measuring moe_lm_layer",
                 ["bench", "--input", TRACE, "--pass", "forward", "--iterations", 3, "--warmup", 0,
                  "--no-check"]),
                (r"tuning forward, round \d+, \d+ of \d+ left",
                 ["tune", "--shape", "small", "--pass", "forward", "--profile", "none", "--budget",
                  10, "--candidates", 6]),
                ("surveying forward",
                 ["tune", "--shape", "small", "--pass", "forward", "--survey", 30])):
            slow = SLOW_LINK if command[0] == "bench" else cache
            text = self.errors_on_a_terminal(*command, columns=120, **slow)
            self.assertRegex(text, label + r" \[#*\.*\] \d+ %, [0-9:]+( s)? left")
            self.assertTrue(text.endswith(ERASE))

    def test_short_work_shows_nothing(self):
        self.assertEqual(self.errors_on_a_terminal("run", "--shape", "tiny"), "")


class Lines(ProgramTest):
    """Where stderr is no terminal, long work says now and then how far it is."""

    def errors(self, *args):
        done = subprocess.run(
            [PROGRAM, "run", "--input", TRACE, "--ranks", "2", "--pass", "forward", *args],
            capture_output=True, text=True, env={**os.environ, **SLOW_LINK}, timeout=300)
        self.assertEqual(done.returncode, 0)
        return done.stderr.splitlines()

    def test_a_line_every_few_seconds(self):
        for processes in ([], ["--processes"]):
            start = time.monotonic()
            lines = self.errors("--repeat", "6", *processes)
            seconds = time.monotonic() - start
            self.assertGreater(seconds, 5.5)
            self.assertTrue(1 <= len(lines) <= 1 + (seconds - 5) / 10, lines)
            for line in lines:
                self.assertRegex(line, r"^# running 2 (ranks|processes): \d+ %, [0-9:]+( s)? left$")

    def test_short_work_prints_none(self):
        self.assertEqual(self.errors("--repeat", "1"), [])


class Interrupted(ProgramTest):
    """Ctrl-C ends long work with what there is."""

    def begun(self, *args, beginning="# ", **environment):
        """A process that has printed so much, and this."""
        process = subprocess.Popen([PROGRAM, *map(str, args)], stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, start_new_session=True,
                                   env={**os.environ, **environment})
        output = ""
        for line in process.stdout:
            output += line
            if line.startswith(beginning):
                break
        return process, output

    def seconds_of_work(self, process):
        """What it has had of the processors: on a busy machine far less than what has passed."""
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def interrupted(self, *args, after=1.5, work=0, number=signal.SIGINT, group=False, **how):
        """Stops it a while after it has printed so much, or when it has worked for a while since."""
        process, output = self.begun(*args, **how)
        if work:
            begin = self.seconds_of_work(process)
            while process.poll() is None and self.seconds_of_work(process) < begin + work:
                time.sleep(0.02)
        else:
            time.sleep(after)
        # A terminal tells all processes of a group; `kill` tells one.
        os.killpg(process.pid, number) if group else process.send_signal(number)
        rest, errors = process.communicate(timeout=100)
        self.assertEqual(process.returncode, 128 + number, output + rest + errors)
        return output + rest

    def test_a_second_signal_ends_it_at_once_without_files(self):
        path = self.folder / "run.json"
        slower = {"UNIEP_CPU_LINK_GBPS": "0.00005"}  # a pass takes a minute
        process, _ = self.begun("run", "--input", TRACE, "--ranks", 2, "--json", path, **slower)
        process.send_signal(signal.SIGINT)
        time.sleep(2.1)  # the program counts whole seconds
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
        self.assertEqual(process.returncode, -signal.SIGINT, errors)
        self.assertNotIn("interrupted", rest)
        self.assertEqual(os.listdir(self.folder), [])

    def read(self, path):
        file = json.loads(path.read_text())
        self.assertIs(file["interrupted"], True)
        return file

    def test_run(self):
        path, output = self.folder / "run.json", self.folder / "out.safetensors"
        for how in ([], ["--ranks", 2], ["--ranks", 2, "--processes"]):
            for number, group in ((signal.SIGINT, False), (signal.SIGINT, True),
                                  (signal.SIGTERM, False)):
                # On a busy machine processes may not have begun so soon, and then end without results.
                for after in (1.5, 20):
                    path.unlink(missing_ok=True)
                    text = self.interrupted("run", "--shape", "tiny", *how, "--repeat", 1000000,
                                            "--json", path, "--output", output, "--check",
                                            after=after, number=number, group=group)
                    match = re.search(r"# interrupted after (\d+) of 1000000 steps; not checked",
                                      text)
                    if match:
                        break
                self.assertTrue(match, text)
                file = self.read(path)
                self.assertEqual(file["repeat"], int(match[1]))
                self.assertGreater(file["repeat"], 1)
                self.assertIn(f"medians of {match[1]} steps", text)
                self.assertEqual({r["direction"] for r in file["records"] if "pass" not in r},
                                 {"forward", "backward"})
                self.assertTrue(output.exists())
                output.unlink()

    def test_at_once_after_the_first_line(self):
        """Who has read what is run may interrupt it, also before it has begun."""
        for command in (["run", "--repeat", 1000000], ["bench", "--iterations", 1000000]) * 10:
            self.interrupted(*command, "--shape", "tiny", "--ranks", 2, after=0)

    def test_an_ignored_signal_stays_ignored(self):
        """As shells have it for what they start in the background."""
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = subprocess.Popen([PROGRAM, "run", "--shape", "tiny", "--repeat", "20000"],
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        finally:
            signal.signal(signal.SIGINT, previous)
        process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=200)
        self.assertEqual(process.returncode, 0, output + errors)
        self.assertNotIn("interrupted", output)

    def test_run_while_it_is_checked(self):
        path, output = self.folder / "run.json", self.folder / "out.safetensors"
        text = self.interrupted("run", "--shape", "small,tokens=16384", "--check", "--json", path,
                                "--output", output, beginning="# backward", after=1)
        self.assertIn("# interrupted after 1 of 1 step; not checked\n", text)
        self.assertIsNone(self.read(path)["check"])
        self.assertTrue(output.exists())

    def test_run_before_a_step_is_measured(self):
        path = self.folder / "run.json"
        text = self.interrupted("run", "--input", TRACE, "--ranks", 2, "--repeat", 3, "--json",
                                path, after=0.7, **SLOW_LINK)
        self.assertIn("# interrupted after 0 of 3 steps", text)
        file = self.read(path)
        self.assertEqual((file["repeat"], file["plan_ms"], file["records"]), (0, None, []))

    def test_bench(self):
        path = self.folder / "bench.json"
        text = self.interrupted("bench", "--shape", "tiny", "small", "--schedule", "single",
                                "sequential", "--iterations", 1000000, "--json", path)
        match = re.search(r"# interrupted after (\d+) of 8000000 measured passes", text)
        self.assertGreater(int(match[1]), 1)
        self.assertRegex(text, r"\n  forward +all ")
        self.assertIn("# check PASSED", text)
        self.assertIn(f"# interrupted: medians of {match[1]} of 1000000 passes of forward under "
                      "schedule 0; not measured: backward under schedule 0, forward under schedule "
                      "1, backward under schedule 1\n", unfolded(text))
        self.assertIn("; 1 of 2 layers not begun\n", text)
        records = self.read(path)["records"]
        self.assertEqual({(r["shape"], r["given"]) for r in records}, {("tiny", "single")})
        self.assertEqual({r["passes"] for r in records}, {int(match[1])})

    def test_bench_before_a_pass_is_measured(self):
        path = self.folder / "bench.json"
        text = self.interrupted("bench", "--input", TRACE, "--warmup", 1000000, "--json", path,
                                after=0.5)
        self.assertIn("# nothing was checked", text)
        self.assertNotIn("PASSED", text)
        self.assertNotIn("#wrong\n", text)  # no table
        self.assertIn("# interrupted: not measured: forward under schedule 0, backward",
                      unfolded(text))
        self.assertIn("# interrupted after 0 of 30 measured passes\n", text)
        self.assertEqual(self.read(path)["records"], [])

    def test_survey(self):
        path = self.folder / "survey.json"
        text = self.interrupted("tune", "--shape", "tiny", "--survey", 3000, "--json", path,
                                beginning="# default", work=3)
        self.assertRegex(text, r"# interrupted after \d+ of 48000 passes of the forward direction")
        self.assertIn("correlation", text)
        self.assertEqual([p["direction"] for p in self.read(path)["passes"]], ["forward"])

    def test_simulate(self):
        path, plot = self.folder / "simulate.json", self.folder / "simulate.svg"
        text = self.interrupted("simulate", "--shape", "deepseek-v3,tokens=16384", "--ranks", 64,
                                "--json", path, "--plot", plot, work=1.5)
        match = re.search(r"# interrupted after (\d) of 7 numbers of ranks", text)
        self.assertEqual(len(self.read(path)["records"]), 2 * int(match[1]))
        self.assertGreater(int(match[1]), 0)

    def test_simulate_hosts(self):
        path = self.folder / "hosts.json"
        text = self.interrupted("simulate", "--shape", "deepseek-v3,tokens=16384", "--ranks", 32,
                                "--hosts", 8, "--nic-gbps", 400, "--json", path, work=1)
        match = re.search(r"# interrupted after (\d+) of \d+ ways", text)
        self.assertEqual(len(self.read(path)["records"]), 2 * int(match[1]))

    def test_what_was_not_interrupted_says_so(self):
        path = self.folder / "file.json"
        for command in (["run", "--shape", "tiny"], ["bench", "--shape", "tiny"],
                        ["simulate", "--shape", "tiny"]):
            self.succeed(*command, "--json", path)
            self.assertIs(json.loads(path.read_text())["interrupted"], False)


class Widths(ProgramTest):
    """What is printed fits 100 columns, with the longest names and many ranks."""

    LONG_SCHEDULE = ("pipelined:16,dispatch_wire=rows,expert_order=heavy-first,rotate=next-first,"
                     "raster=along-n,band=4096,lag=4096,lag_tiles=65536,token_block=256")

    def expect_narrow(self, *args, **environment):
        done = self.call(*args, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in done.stdout.splitlines():
            # Nothing folds a path, and some machines have long ones for what is temporary.
            self.assertLessEqual(len(line.replace(str(self.folder), "/tmp/tmpabcdefgh")), 100, line)
            self.assertRegex(line, r"^(#|  )")
        return done.stdout

    def test_help(self):
        for command in ([], *([name] for name in COMMANDS)):
            for line in self.succeed(*command, "--help").splitlines():
                self.assertLessEqual(len(line), 100, line)

    def test_run(self):
        layer = ("tiny,tokens=1,experts=64", "--ranks", 64, "--schedule", self.LONG_SCHEDULE)
        self.expect_narrow("run", "--shape", *layer, "--check", "--plot", self.folder / "p.svg")
        self.expect_narrow("run", "--input", TRACE, "--ranks", 32, "--repeat", 2, "--trace",
                           self.folder / "t.json")

    def test_bench(self):
        layer = "gpt-oss-120b,tokens=1,hidden=128,intermediate=128,experts=64,topk=4"
        path = self.folder / "bench.json"
        arguments = ("bench", "--shape", layer, "mixtral-8x7b,tokens=1,hidden=64,intermediate=64,"
                     "experts=64", "--ranks", 64, "--iterations", 1, "--warmup", 0, "--schedule",
                     self.LONG_SCHEDULE, "auto", "sequential")
        self.expect_narrow(*arguments, "--json", path)
        self.expect_narrow(*arguments, "--against", path)

    def test_tune(self):
        cache = {"UNIEP_TUNE_CACHE": str(self.folder / ("cache-" * 10) / "tuned.json")}
        layer = ("mixtral-8x7b,tokens=8,hidden=128,intermediate=64,experts=16", "--ranks", 16)
        self.expect_narrow("tune", "--shape", *layer, "--budget", 20, "--candidates", 6,
                           "--pass", "forward", "--profile", "none", **cache)
        self.expect_narrow("tune", "--shape", *layer, "--survey", 2, "--pass", "forward", **cache)

    def test_others(self):
        self.expect_narrow("info")
        for shape in ("deepseek-v3", "custom,tokens=1048576,hidden=16384,intermediate=16384,"
                                     "experts=4096,topk=16"):
            self.expect_narrow("info", "--shape", shape, "--ranks", 64)
        self.expect_narrow("profile", "--effort", 0.1)
        self.expect_narrow("simulate", "--shape", "gpt-oss-120b,tokens=1024", "--ranks", 64,
                           "--gpus-per-node", 8, "--nic-gbps", 400)
        self.expect_narrow("simulate", "--shape", "gpt-oss-120b,tokens=1024", "--ranks", 64,
                           "--memory", 80, "--layers", 10000, "--in-flight", 100)


if __name__ == "__main__":
    unittest.main(verbosity=2)
