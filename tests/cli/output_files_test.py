"""What the program writes and reads (program.py): whole files or none, none that it was given, and
only what has an end. An argument names one test class."""

import json
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import time
import unittest
import xml.etree.ElementTree
from pathlib import Path

import layer_file
from program import PROGRAM, PROFILES, ProgramTest

EARLIER = "what was there before"
RUN = ("run", "--shape", "tiny", "--schedule", "single")
OUTPUTS = ("--output", "--trace", "--plot", "--json")


class FileTest(ProgramTest):
    def profile(self, name="here.json"):
        path = self.folder / name
        shutil.copy(PROFILES / "h200.json", path)
        return path

    def linked_names(self, path):
        """The file's own name, and others by which it can be reached."""
        (self.folder / "sub").mkdir(exist_ok=True)
        hard, soft = self.folder / "hard", self.folder / "soft"
        if path.exists() and not hard.exists():
            os.link(path, hard)
        if not soft.is_symlink():
            soft.symlink_to(path.name)
        names = [path, soft, self.folder / "sub" / ".." / path.name]
        return names + [hard] * hard.exists()

    def refuse_before_work(self, *args, words=(), **environment):
        done = self.refuse(*args, words=words, **environment)
        self.assertEqual(done.stdout, "")


class Distinct(FileTest):
    def test_no_output_replaces_the_layer(self):
        layer = self.layer_path(4)
        content = layer.read_bytes()
        for name in self.linked_names(layer):
            for option in OUTPUTS:
                self.refuse_before_work("run", "--input", layer, option, name,
                                        words=["--input", option, name])
        self.assertEqual(layer.read_bytes(), content)

    def test_no_output_replaces_the_profile(self):
        profile = self.profile()
        content = profile.read_bytes()
        for name in self.linked_names(profile):
            for option in ("--json", "--plot"):
                self.refuse_before_work("simulate", "--shape", "tiny", "--profile", profile, option,
                                        name, words=["--profile", option, name])
            self.refuse_before_work("tune", "--shape", "tiny", "--profile", profile, "--json", name,
                                    words=["--profile", "--json", name])
            self.refuse_before_work("profile", "--backend", "cuda", "--like", profile, "--output",
                                    name, words=["--like", "--output", name])
        self.assertEqual(profile.read_bytes(), content)

    def test_no_output_replaces_what_was_tuned(self):
        cache = self.folder / "tuned.json"
        for path in (cache, self.folder / "tuned.json.lock",
                     self.folder / "tuned.json.session-abc"):
            path.write_text(EARLIER)
            for command in (("tune", "--shape", "tiny"), RUN, ("bench", "--shape", "tiny")):
                self.refuse_before_work(*command, "--json", path, words=["--json", path],
                                        UNIEP_TUNE_CACHE=str(cache))
            self.assertEqual(path.read_text(), EARLIER)
            path.unlink()
            if path == cache:  # nor is it made by something else
                self.refuse_before_work("tune", "--shape", "tiny", "--json", path,
                                        words=["--json", path], UNIEP_TUNE_CACHE=str(cache))

    def test_no_output_replaces_the_program(self):
        program = self.folder / "uniep"
        shutil.copy(PROGRAM, program)
        for name in (program, "/proc/self/exe"):
            done = subprocess.run([program, *RUN, "--json", name], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn("the program", done.stderr)
        self.assertEqual(program.read_bytes(), Path(PROGRAM).read_bytes())

    def test_two_outputs_are_two_files(self):
        path = self.folder / "one"
        for exists in (False, True):
            if exists:
                path.write_text(EARLIER)
            for name in self.linked_names(path):
                for first, second in (("--json", "--trace"), ("--plot", "--output")):
                    self.refuse_before_work(*RUN, first, path, second, name,
                                            words=[first, second, path])
            self.assertEqual(path.exists(), exists)
        self.assertEqual(path.read_text(), EARLIER)

    def test_a_shipped_profile_is_no_file(self):
        done = subprocess.run([PROGRAM, "simulate", "--shape", "tiny", "--ranks", "1", "--profile",
                               "h200", "--json", "h200"], cwd=self.folder, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)


class Whole(FileTest):
    def test_a_full_disk_leaves_the_earlier_file(self):
        path = self.folder / "file"
        command = 'ulimit -f 1; exec "$@"'  # in blocks of 1024 bytes
        for option in OUTPUTS:
            path.write_text(EARLIER)
            done = subprocess.run(["bash", "-c", command, "bash", PROGRAM, *RUN, "--ranks", "2",
                                   option, path], capture_output=True, text=True)
            self.assertEqual(done.returncode, 2, (option, done.stderr))
            self.assertIn(str(path), done.stderr)
            self.assertIn("kept", done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertEqual(path.read_text(), EARLIER)
            path.unlink()
            subprocess.run(["bash", "-c", command, "bash", PROGRAM, *RUN, "--ranks", "2", option,
                            path], capture_output=True)
            self.assertEqual(os.listdir(self.folder), [])

    def test_a_killed_run_leaves_the_earlier_file_and_nothing_else(self):
        path = self.folder / "step.json"
        arguments = [PROGRAM, "run", "--shape", "tiny,tokens=2048", "--ranks", "8", "--trace", path]
        for sig in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) * 3:
            path.write_text(EARLIER)
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
            while process.poll() is None and path.read_text() == EARLIER:
                pass
            process.send_signal(sig)  # as soon as anything of it is there
            process.wait()
            json.loads(path.read_text())
            self.assertEqual(os.listdir(self.folder), [path.name])

    def test_a_run_killed_at_any_time_leaves_nothing_half_done(self):
        path = self.folder / "step.json"
        for delay in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
            path.write_text(EARLIER)
            process = subprocess.Popen([PROGRAM, *RUN, "--trace", path], stdout=subprocess.DEVNULL)
            time.sleep(delay)
            process.kill()
            process.wait()
            if path.read_text() != EARLIER:
                json.loads(path.read_text())
            self.assertEqual(os.listdir(self.folder), [path.name])

    def test_links_are_followed_and_the_mode_is_kept(self):
        for option in OUTPUTS:
            target, link = self.folder / "target", self.folder / "link"
            link.symlink_to("target")
            self.succeed(*RUN, option, link)  # where nothing is yet
            target.write_text(EARLIER)
            target.chmod(0o640)
            self.succeed(*RUN, option, link)
            self.assertTrue(link.is_symlink())
            self.assertNotEqual(target.read_bytes(), EARLIER.encode())
            self.assertEqual(stat.S_IMODE(target.stat().st_mode), 0o640)
            link.unlink()
            target.unlink()

    def test_devices_and_pipes_take_any_output(self):
        for option in OUTPUTS:
            self.succeed(*RUN, option, "/dev/null")
            self.refuse(*RUN, option, "/dev/full", words=["/dev/full", "space"])
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/null").st_mode))
        text = self.succeed("run", "--shape", "tiny", "--json", "/dev/stdout")
        self.assertEqual(json.loads(text[text.index("{"):text.rindex("}") + 1])["schema"],
                         "uniep-run-1")

    def test_the_standard_output_in_a_file_keeps_what_was_printed(self):
        for name in ("/dev/stdout", self.folder / "log"):
            with open(self.folder / "log", "w") as log:
                done = subprocess.run([PROGRAM, *RUN, "--json", name], stdout=log)
            self.assertEqual(done.returncode, 0)
            text = (self.folder / "log").read_text()
            self.assertTrue(text.startswith("#"), text[:80])
            json.loads(text[text.index("{"):text.rindex("}") + 1])
            self.assertIn("# done", text[text.rindex("}"):])

    def test_a_closed_standard_output_does_not_end_up_in_a_file(self):
        path = self.folder / "figures.json"
        command = 'exec "$@" >&-'
        done = subprocess.run(["bash", "-c", command, "bash", PROGRAM, *RUN, "--json", path],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 2)
        self.assertIn("standard output", done.stderr)
        if path.exists():
            json.loads(path.read_text())

    def test_help_that_cannot_be_printed(self):
        for arguments in (["--help"], ["run", "--help"], ["--version"]):
            with open("/dev/full", "w") as full:
                done = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE,
                                      text=True)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn("standard output", done.stderr)

    def test_reasons(self):
        for option in OUTPUTS:
            self.refuse_before_work(*RUN, option, self.folder / "no" / "file",
                                    words=[option, "no folder"])
            self.refuse_before_work(*RUN, option, self.folder, words=[option, "directory"])
            done = self.refuse(*RUN, option, "/proc/version", words=[option, "/proc/version"])
            self.assertNotIn("Success", done.stderr)

    def test_a_file_that_is_a_mount_is_refused_before_the_work(self):
        path, other = self.folder / "mounted", self.folder / "other"
        path.write_text(EARLIER)
        other.write_text("")
        if subprocess.run(["mount", "--bind", other, path], capture_output=True).returncode != 0:
            self.skipTest("no file can be mounted here")
        try:
            for option in OUTPUTS:
                self.refuse_before_work(*RUN, option, path, words=[option, path, "mounted"])
        finally:
            subprocess.run(["umount", path], check=True)

    def test_a_name_that_is_not_utf8_makes_a_good_picture(self):
        layer = self.folder / "layer.safetensors"
        layer.write_bytes(layer_file.serialized(layer_file.layer(5)))
        named = os.path.join(os.fsencode(self.folder), b"lay\xffer\xc3.safetensors")
        os.rename(layer, named)
        plot, trace, figures = (self.folder / name for name in ("a.svg", "a.trace", "a.json"))
        done = subprocess.run([PROGRAM, "run", "--input", named, "--plot", plot, "--trace", trace,
                               "--json", figures], capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        xml.etree.ElementTree.parse(plot)
        json.loads(trace.read_text())
        json.loads(figures.read_text())


class Values(FileTest):
    def test_empty_values_are_refused(self):
        options = {"run": ["--output", "--trace", "--plot", "--json", "--input", "--shape",
                           "--schedule", "--ranks", "--pass"],
                   "bench": ["--json", "--shape", "--schedule"],
                   "simulate": ["--json", "--plot", "--profile", "--schedule", "--shape"],
                   "tune": ["--json", "--plot", "--profile", "--space", "--shape"],
                   "profile": ["--output", "--like"],
                   "info": ["--shape"]}
        for command, names in options.items():
            for name in names:
                shape = ["--shape", "tiny"] * (name not in ("--shape", "--input") and
                                               command != "profile")
                self.refuse_before_work(command, *shape, name, "", words=[name])
        self.refuse_before_work("validate", "", words=["FILE"])

    def test_integers(self):
        for command, option in (("run", "--ranks"), ("run", "--seed"), ("bench", "--iterations")):
            for value in ("1.5", "1e1", "x"):
                self.refuse_before_work(command, "--shape", "tiny", option, value,
                                        words=[option, value, "integer"])


class Readers(FileTest):
    """Files that people name are regular and have a size that fits."""

    def endless(self):
        pipe = self.folder / "pipe"
        if not pipe.exists():
            os.mkfifo(pipe)
        return ["/dev/zero", pipe, self.folder]

    def huge(self):
        path = self.folder / "huge.json"
        path.write_bytes(b"")
        os.truncate(path, (64 << 20) + 1)
        return path

    def call(self, *args, **environment):
        """With little memory, and little time."""
        limit = 4 << 30
        return subprocess.run(
            [PROGRAM, *map(str, args)], capture_output=True, text=True, timeout=60,
            env={**os.environ, **environment},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))

    def test_profiles(self):
        for path in [*self.endless(), self.huge()]:
            for command in (["simulate", "--shape", "tiny", "--profile"],
                            ["tune", "--shape", "tiny", "--budget", 1, "--profile"],
                            ["profile", "--backend", "cuda", "--like"]):
                self.refuse(*command, path, words=[path])

    def test_layers(self):
        for path in self.endless():
            self.refuse("run", "--input", path, words=[path, "regular file"])
            self.assertEqual(self.call("validate", path).returncode, 2)
        path = self.folder / "layer"
        bytes_ = 1 << 42
        header = json.dumps({"x": {"dtype": "BF16", "shape": [bytes_ // 2],
                                   "data_offsets": [0, bytes_]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(path, 8 + len(header) + bytes_)
        self.refuse("run", "--input", path, words=[path, "free memory"])

    def test_what_was_tuned(self):
        for path in [*self.endless(), self.huge()]:
            done = self.call("run", "--shape", "tiny", UNIEP_TUNE_CACHE=str(path))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(str(path), done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.refuse("tune", "--shape", "tiny", words=[path], UNIEP_TUNE_CACHE=str(path))

    def test_sentences_are_not_the_librarys(self):
        profile, cache = self.folder / "profile.json", self.folder / "tuned.json"
        good = json.loads((PROFILES / "h200.json").read_text())
        for text in ("", "{", "[1, 2]", "[" * 100000, '{"schema": 1e999}', '"\xff', "{}",
                     json.dumps({**good, "name": 3}), json.dumps({**good, "cores": 1.5}),
                     '{"schema": "uniep-tuned-1", "entries": [{"backend": 1}, 7, {}]}'):
            profile.write_text(text)
            cache.write_text(text)
            refused = self.refuse("simulate", "--shape", "tiny", "--profile", profile,
                                  words=[profile, "accepted" if text != "{}" else "required"])
            read = self.call("run", "--shape", "tiny", UNIEP_TUNE_CACHE=str(cache))
            self.assertEqual(read.returncode, 0, read.stderr)
            self.assertIn("ignored", read.stderr)
            for sentence in (refused.stderr, read.stderr):
                self.assertNotIn("json", sentence.replace(str(profile), "").replace(str(cache), ""))

    def test_what_another_version_tuned_stays(self):
        cache = self.folder / "tuned.json"
        newer = '{"schema": "uniep-tuned-2", "of": "the future"}'
        cache.write_text(newer)
        self.refuse_before_work("tune", "--shape", "tiny", "--profile", "none", "--budget", 1,
                                words=[cache, "uniep-tuned-2"], UNIEP_TUNE_CACHE=str(cache))
        read = self.call("run", "--shape", "tiny", UNIEP_TUNE_CACHE=str(cache))
        self.assertEqual(read.returncode, 0)
        self.assertIn("uniep-tuned-2", read.stderr)
        self.assertEqual(cache.read_text(), newer)
        self.assertEqual([name for name in os.listdir(self.folder) if "damaged" in name], [])

    def test_simulations_without_end(self):
        for shape in ("tokens=1048576,hidden=8,intermediate=8,experts=64,topk=16",
                      "tokens=67108864,hidden=8,intermediate=8,experts=65536,topk=16",
                      "tokens=1,hidden=1048576,intermediate=1048576,experts=65536,topk=1"):
            start = time.monotonic()
            self.refuse_before_work("simulate", "--shape", "custom," + shape, "--ranks", 8,
                                    words=["--shape", "at most"])
            self.assertLess(time.monotonic() - start, 20)
        self.succeed("simulate", "--shape", "deepseek-v3", "--ranks", 64)

    def test_without_a_home_nothing_is_kept(self):
        nowhere = dict(HOME="", XDG_CACHE_HOME="", UNIEP_TUNE_CACHE="")
        self.succeed("run", "--shape", "tiny", **nowhere)
        self.refuse_before_work("tune", "--shape", "tiny", "--budget", 1, "--profile", "none",
                                words=["HOME", "UNIEP_TUNE_CACHE"], **nowhere)


if __name__ == "__main__":
    unittest.main(verbosity=2)
