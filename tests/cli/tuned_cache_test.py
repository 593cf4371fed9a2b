"""uniep cache from outside (program.py); an argument names one test class."""

import fcntl
import json
import os
import re
import subprocess
import unittest
from pathlib import Path
from typing import Any

from program import PROGRAM, ProgramTest


class Cache(ProgramTest):
    def setUp(self) -> None:
        super().setUp()
        self.cache = self.folder / "cache" / "tuned.json"
        self.session = self.cache.with_name("tuned.json.session-0123")
        self.environment = {"UNIEP_TUNE_CACHE": str(self.cache)}

    def run_cache(self, action: str) -> str:
        return str(self.succeed("cache", action, **self.environment))

    def refuse_clear(self, *words: object) -> None:
        self.refuse("cache", "clear", words=words, **self.environment)

    def fill(self) -> dict[str, Any]:
        """What a search stores, and the session of one that was interrupted."""
        self.succeed("tune", "--shape", "tiny", "--budget", 5, "--pass", "forward", "--profile",
                     "none", "--candidates", 2, **self.environment)
        # On a busy machine its budget may end before it does, and it keeps what it has measured.
        for left in self.session.parent.glob("tuned.json.session-*"):
            left.unlink()
        self.session.write_text(json.dumps(
            {"schema": "uniep-tune-session-1", "search": "backward of something",
             "date": "2026-11-24",
             "candidates": [{"schedule": "single", "predicted_s": 0, "seconds": [1, 2],
                             "rejected": False}]}))
        return dict(json.loads(self.cache.read_text()))

    def test_nothing_is_listed_and_cleared_without_a_trace(self) -> None:
        self.assertIn("# holds  0 schedules; beside it 0 sessions", self.run_cache("list"))
        self.assertIn("nothing to remove", self.run_cache("clear"))
        self.assertFalse(self.cache.parent.exists())

    def test_list(self) -> None:
        file = self.fill()
        entry, = file["entries"]
        other = {**entry, "ranks": 4, "pass": "backward", "ms": 2.0, "default_ms": 3.0,
                 "save": "none", "bias": "yes", "activation": "gpt_oss"}
        model = {**entry, "hidden": 7168, "intermediate": 2048, "experts": 256, "topk": 8,
                 "ranks": 64, "tokens": 8192, "skew": 0.5, "backend": "cuda", "device": "a GPU"}
        unknown = {**entry, "schedule": {"launch": "quantum"}}
        file["entries"] += [other, model, unknown]
        self.cache.write_text(json.dumps(file))
        text = re.sub(r"\n#  +", " ", self.run_cache("list"))
        self.assertIn("# holds    3 schedules; beside it 1 session", text)
        rows = [line.split() for line in text.splitlines() if line.startswith("  ")]
        date = entry["date"][:10]
        self.assertEqual(rows[0][:9], ["1", "64", "32", "8", "2", "64", "2", "0", "forward"])
        self.assertEqual(rows[1][6:], ["4", "0", "backward", "2.000", "3.000", date])
        self.assertEqual(rows[2][1:9], ["7168", "2048", "256", "8", "8192", "64", "0.5", "forward"])
        for words in (f"# on {entry['device']}; ", "# on a GPU; ", "\n# 1  tiny: ",
                      "\n# 2  tiny,save=none,activation=gpt_oss,bias: ",
                      "\n# 3  deepseek-v3: ", "entry 3 is ignored: ", str(self.session),
                      "2026-11-24, 2 passes of 1 schedule measured", "backward of something"):
            self.assertIn(words, text)
        for row in (line for line in text.splitlines() if line.startswith("  ")):
            self.assertLessEqual(len(row), 100, row)

    def test_run_takes_what_was_tuned_for_what_it_keeps(self) -> None:
        entry, = self.fill()["entries"]
        tile = "16" if entry["schedule"]["tile_m"] == "32" else "32"
        other = {**entry, "save": "none", "recompute_h": "yes",
                 "schedule": {**entry["schedule"], "tile_m": tile}}
        self.cache.write_text(json.dumps(
            {**json.loads(self.cache.read_text()), "entries": [entry, other]}))
        path = self.folder / "figures.json"
        for kept, wanted in (([], entry), (["--save", "none", "--recompute-h"], other)):
            self.succeed("run", "--shape", "tiny", "--ranks", 2, "--pass", "forward", *kept,
                         "--json", path, **self.environment)
            used = json.loads(path.read_text())["records"][0]["schedule"]
            self.assertEqual(dict(pair.split("=") for pair in used.split(",")), wanted["schedule"])

    def test_a_listed_schedule_is_one_that_run_takes(self) -> None:
        entry, = self.fill()["entries"]
        text = self.run_cache("list")
        schedule = text.split("\n# 1  tiny: ")[1].split("\n#\n")[0]
        schedule = re.sub(r"\n#|\s", "", schedule)
        if schedule == "thedefault":
            schedule = "tile_m=64"
        path = self.folder / "figures.json"
        self.succeed("run", "--shape", "tiny", "--ranks", 2, "--schedule", schedule, "--json", path)
        used = json.loads(path.read_text())["records"][0]["schedule"]
        self.assertEqual(dict(pair.split("=") for pair in used.split(",")), entry["schedule"])

    def test_a_search_is_listed_in_words(self) -> None:
        self.fill()
        session = json.loads(self.session.read_text())
        session["search"] = ("forward of hidden=64 on a CPU, search for the forward pass of "
                             "tiny,hidden=64; in the whole space")
        self.session.write_text(json.dumps(session))
        self.assertIn("\n# search   the forward pass of tiny,hidden=64; in the whole space\n",
                      self.run_cache("list"))

    def test_clear(self) -> None:
        self.fill()
        aside = self.cache.with_name("tuned.json.damaged")
        aside.write_text("somebody's")
        bystander = self.cache.with_name("tuned.json2.session-1")
        bystander.write_text("of another cache")
        text = self.run_cache("clear")
        self.assertEqual(text, f"removed {self.cache}, 1 schedule\nremoved {self.session}\n")
        self.assertFalse(self.cache.exists() or self.session.exists())
        self.assertTrue(aside.exists() and bystander.exists())
        self.assertIn("nothing to remove", self.run_cache("clear"))
        path = self.folder / "figures.json"
        self.succeed("run", "--shape", "tiny", "--ranks", 2, "--json", path, **self.environment)

    def test_sessions_alone_are_cleared(self) -> None:
        self.fill()
        self.cache.unlink()
        self.assertEqual(self.run_cache("clear"), f"removed {self.session}\n")

    def test_what_is_no_cache_stays(self) -> None:
        self.fill()
        for text in ("", "my thesis", '{"schema": "uniep-tuned-2"}', '{"schema": "uniep-run-1"}'):
            self.cache.write_text(text)
            self.refuse_clear(self.cache)
            self.assertEqual(self.cache.read_text(), text)
            self.assertTrue(self.session.exists())
            self.call("cache", "list", **self.environment)
        self.cache.unlink()
        self.cache.mkdir()
        self.refuse_clear("directory")
        self.assertIn("is a directory", self.run_cache("list"))

    def test_a_folder_that_may_not_be_written_to(self) -> None:
        if os.geteuid() == 0:
            self.skipTest("root may write everywhere")
        self.fill()
        self.cache.parent.chmod(0o500)
        self.addCleanup(self.cache.parent.chmod, 0o700)
        self.refuse_clear("Permission denied")
        self.assertTrue(self.cache.exists())

    def expect_clear_waits_for_the_lock(self, name: Path) -> None:
        """Of the cache, which is called by this name."""
        self.fill()
        with open(str(self.cache) + ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with subprocess.Popen([PROGRAM, "cache", "clear"], stdout=subprocess.PIPE,
                                  env={**os.environ, "UNIEP_TUNE_CACHE": str(name)}) as process:
                with self.assertRaises(subprocess.TimeoutExpired):
                    process.wait(0.3)
                self.assertTrue(self.cache.exists())
                fcntl.flock(lock, fcntl.LOCK_UN)
                self.assertEqual(process.wait(60), 0)
        self.assertFalse(self.cache.exists())

    def test_clear_waits_for_the_lock(self) -> None:
        self.expect_clear_waits_for_the_lock(self.cache)

    def test_links_to_a_cache_have_its_lock(self) -> None:
        link, folder = self.folder / "link.json", self.folder / "folder"
        link.symlink_to("cache/tuned.json")
        folder.symlink_to("cache")
        second = self.folder / "second.json"
        second.symlink_to("link.json")
        for name in (link, second, folder / "tuned.json"):
            self.expect_clear_waits_for_the_lock(name)
        self.assertEqual([p.name for p in self.folder.glob("*.lock")], [])

    def test_arguments(self) -> None:
        nowhere = {"UNIEP_TUNE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": ""}
        for action in ("list", "clear"):
            self.refuse("cache", action, words=["UNIEP_TUNE_CACHE", "HOME"], **nowhere)
        self.refuse("cache", words=["list or clear is needed", "uniep cache ACTION"])
        self.refuse("cache", "claer", words=["'claer'", "clear is the nearest"])
        self.refuse("cache", "clear", "all", words=["'all'"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
