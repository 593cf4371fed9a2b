"""--hosts: the ways between hosts that simulate compares, and what bench and tune measure on several
(program.py); an argument names one test class."""

import json
import unittest

from program import ProgramTest, unfolded

SHAPE = "custom,tokens=1024,hidden=256,intermediate=128,experts=16,topk=8"


class Hosts(ProgramTest):
    def ways(self, *args, shape=SHAPE, nic=10):
        """By pass and way: groups, ms, exposed ms, MB over network, link and within a rank, and ms
        that the network takes at least."""
        text = self.succeed("simulate", "--shape", shape, "--nic-gbps", nic, *args)
        found = {}
        for line in text.splitlines():
            words = line.split()
            if words and words[0] in ("forward", "backward"):
                *figures, wire, network, link, own = (float(word) for word in words[-7:])
                found[words[0], " ".join(words[1:-7])] = [*figures, network, link, own, wire]
        return found

    def test_less_crosses_the_network_by_relays(self):
        ways = self.ways("--ranks", 8, "--hosts", 2)
        self.assertEqual(len(ways), 2 * 12)
        for direction in ("forward", "backward"):
            direct, rows, fp32, bf16 = (
                ways[direction, name] for name in ("direct", "relayed, all rows",
                                                   "relayed, sums in fp32",
                                                   "relayed, sums in bf16"))
            network = [way[3] for way in (direct, rows, fp32, bf16)]
            self.assertEqual(network, sorted(network, reverse=True))
            self.assertEqual(len(set(network)), 4)
            self.assertEqual([way[0] for way in (direct, rows, fp32, bf16)], [1, 1, 2, 2])
            self.assertLess(bf16[1], direct[1])
            for _, ms, _, network, _, _, wire in (direct, rows, fp32, bf16):
                self.assertAlmostEqual(wire, network / 1.25, delta=2e-3 + 0.1 / 1.25)
                self.assertGreaterEqual(ms, wire)

    def test_what_is_gathered_in_waves_shows_less(self):
        ways = self.ways("--ranks", 8, "--hosts", 2)
        in_turn, in_waves = (ways["forward", way] for way in ("gathered", "gathered, in waves"))
        self.assertLess(in_waves[1], in_turn[1])
        self.assertLess(in_waves[2], in_turn[2])
        self.assertEqual(in_waves[3:], in_turn[3:])
        # A copy of each token, its sum, and 8 bytes a slot.
        self.assertAlmostEqual(in_turn[3], 1024 * (2 * 512 + 8 * 8) * 1e-6, delta=0.06)
        large = "custom,tokens=4096,hidden=1024,intermediate=2048,experts=16,topk=4"
        spared = [self.ways("--ranks", 4, "--hosts", 2, "--spare-sms", sms, shape=large, nic=1e6)
                  for sms in (0, 64)]
        few, many = ([ways["forward", way][1] for ways in spared]
                     for way in ("gathered", "gathered, in waves"))
        self.assertEqual(few[0], few[1])
        self.assertLess(many[0], many[1])
        self.assertEqual(len(self.ways("--ranks", 16, "--hosts", 16)), 2 * 8)  # none in waves

    def test_what_no_host_can_run_is_refused(self):
        how = ["simulate", "--shape", SHAPE, "--ranks", 8, "--hosts", 2, "--nic-gbps", 10]
        for schedule in ("workers=500", "workers=132", "tile_m=64"):
            self.refuse(*how, "--schedule", schedule, words=[schedule.split("=")[0]])
        self.succeed(*how, "--schedule", "workers=132", "--spare-sms", 0, "--pass", "forward")
        for flags in (["--shared-experts", 1], ["--combine-partials", "bf16"]):
            self.refuse(*how, *flags, words=["--hosts", flags[0]])

    def test_a_routing_that_does_not_fit_is_warned_of(self):
        large = "custom,tokens=4800,hidden=1024,intermediate=1024,experts=16,topk=4"
        how = ["simulate", "--shape", large, "--ranks", 4, "--hosts", 2, "--nic-gbps", 10,
               "--pass", "forward"]
        self.assertEqual(self.call(*how).stderr, "")
        warned = self.call(*how, "--skew", 4)
        self.assertEqual(warned.returncode, 0)
        self.assertRegex(warned.stderr, r"warning: at 4 ranks .* capacity_rows=\d+ would do\n$")

    def test_all_rows_are_more_than_sums(self):
        ways = self.ways("--ranks", 8, "--hosts", 2)
        for direction, slot in (("forward", 8), ("backward", 4)):
            rows, exact, sums = (ways[direction, way] for way in
                                 ("all rows", "all rows, exact_hosts", "gathered"))
            self.assertEqual([way[0] for way in (rows, exact, sums)], [1, 1, 2])
            # A copy of each token, K rows of it, and so many bytes a slot; half of the rows exist.
            self.assertAlmostEqual(rows[3], 1024 * (9 * 512 + 8 * slot) * 1e-6, delta=0.06)
            self.assertAlmostEqual(exact[3], 1024 * (5 * 512 + 8 * slot) * 1e-6, delta=0.1)
            self.assertGreater(exact[1], sums[1])
            self.assertGreater(rows[1], exact[1])
            for how in ("", ", exact_hosts"):
                in_waves = ", in waves" if how == "" else ", waves, exact"
                self.assertLess(ways[direction, "all rows" + in_waves][2],
                                ways[direction, "all rows" + how][2])

    def test_one_host_has_no_network(self):
        ways = self.ways("--ranks", 4, "--hosts", 1, "--pass", "forward")
        self.assertEqual([way[3] for way in ways.values()], [0] * 4)
        self.assertEqual(len({tuple(way) for way in ways.values()}), 1)

    def test_one_host_stands_for_many(self):
        wide = SHAPE.replace("experts=16", "experts=64").replace("tokens=1024", "tokens=256")
        path = self.folder / "hosts.json"
        how = ("--nic-gbps", 10, "--pass", "forward", "--json", path)
        text = self.succeed("simulate", "--shape", wide, "--ranks", 64, "--hosts", 16, *how)
        self.assertIn("one host stands for all", text)
        records = json.loads(path.read_text())["records"]
        self.assertEqual([r["simulated_ranks"] for r in records], [4, 4, 4, 4, 1, 4, 4, 4])
        self.assertEqual([r["combine_groups"] for r in records], [16, 16, 1, 1, 1, 1, 16, 16])
        for r in records:
            self.assertEqual((r["ranks"], r["hosts"], r["direction"]), (64, 16, "forward"))
            self.assertAlmostEqual(r["wire_ms"], r["network_bytes"] / 1.25e6)
            self.assertGreaterEqual(r["predicted_ms"], r["wire_ms"])

    def test_routing_limited_to_hosts_crosses_less(self):
        limited = SHAPE + ",n_group=4,topk_group=2"
        path = self.folder / "hosts.json"
        crossed = []
        for shape in (SHAPE, limited):
            self.succeed("simulate", "--shape", shape, "--ranks", 8, "--hosts", 4, "--nic-gbps", 10,
                         "--pass", "forward", "--json", path)
            records = json.loads(path.read_text())["records"]
            crossed.append({r["way"]: r["network_bytes"] for r in records})
        any_host, few_hosts = crossed
        relayed = "relayed, all rows"
        self.assertLess(few_hosts[relayed], 0.85 * any_host[relayed])
        self.assertEqual(few_hosts["gathered"], any_host["gathered"])
        self.assertEqual(few_hosts["gathered, in waves"], any_host["gathered"])
        self.assertLess(few_hosts["gathered, exact_hosts"], 0.8 * few_hosts["gathered"])
        # With exact hosts what relays carry, and 8 bytes of each slot to all.
        slots = 3 * 1024 * 8 * 8
        for crosses in crossed:
            for exact in ("gathered, exact_hosts", "gathered, waves, exact"):
                self.assertLess(crosses[exact], crosses["gathered"])
                self.assertAlmostEqual((crosses[exact] - slots) / crosses["relayed, sums in bf16"],
                                       1, delta=0.05)

    def test_what_is_accepted_is_said(self):
        base = ("simulate", "--shape", SHAPE, "--ranks", 8)
        nic = ("--nic-gbps", 10)
        self.refuse(*base, "--hosts", 3, *nic, words=["number of hosts is 3", "divisor"])
        self.refuse(*base, "--hosts", 2, words=["--hosts is 2", "--nic-gbps"])
        self.refuse(*base, "--spare-sms", 2, words=["--spare-sms is 2", "--hosts"])
        self.refuse(*base, "--hosts", 2, *nic, "--gpus-per-node", 4, words=["--gpus-per-node"])
        self.refuse(*base, "--hosts", 2, *nic, "--combine-groups", 2, words=["--combine-groups"])


class MeasuredHosts(ProgramTest):
    def setUp(self):
        super().setUp()
        probe = self.call("run", "--shape", "tiny,tokens=8", "--ranks", 2, "--hosts", 2)
        if "libfabric" in probe.stderr:
            self.skipTest(probe.stderr)
        self.cache = self.folder / "tuned.json"

    def bench(self, *args, **environment):
        """What it prints, and the file that it writes."""
        path = self.folder / "bench.json"
        text = self.succeed("bench", "--shape", "tiny,tokens=16", "--iterations", 2, "--warmup", 0,
                            *args, "--json", path, UNIEP_TUNE_CACHE=str(self.cache), **environment)
        self.assertIn("# check PASSED: 0 of", text)
        return unfolded(text), json.loads(path.read_text())

    def tune(self, *args, **environment):
        return self.succeed("tune", "--shape", "tiny,tokens=16", "--ranks", 4, "--candidates", 2,
                            "--pass", "forward", "--profile", "none", "--budget", 30, *args,
                            UNIEP_TUNE_CACHE=str(self.cache), **environment)

    def test_bench(self):
        for groups in (1, 2, 4):
            text, file = self.bench("--ranks", 4, "--hosts", 2, "--combine-groups", groups,
                                    "--schedule", "sequential", "single")
            self.assertRegex(text, "# ranks +4 on 2 hosts\n")
            self.assertEqual({(r["ranks"], r["hosts"]) for r in file["records"]}, {(4, 2)})
            stages = {r["direction"] for r in file["records"] if "pass" in r}
            self.assertTrue({"send", "relay"} <= stages, stages)
        text, file = self.bench("--ranks", 4)
        self.assertNotIn("host", text)
        self.assertEqual({r["hosts"] for r in file["records"]}, {1})

    def test_run(self):
        path = self.folder / "run.json"
        for processes in ([], ["--processes"]):
            self.succeed("run", "--shape", "tiny,tokens=16", "--ranks", 4, "--hosts", 2, *processes,
                         "--json", path)
            records = json.loads(path.read_text())["records"]
            self.assertEqual({(r["ranks"], r["hosts"]) for r in records}, {(4, 2)}, processes)

    def test_within_a_memory(self):
        enough = []
        for hosts in (1, 2, 4):
            done = self.refuse("tune", "--shape", "small,tokens=4096", "--ranks", 4, "--hosts", hosts,
                               "--profile", "none", "--memory", 0.001, "--layers", 1,
                               words=("nothing fits", "--memory"))
            enough.append(float(unfolded(done.stderr).split(": --memory ")[1].split()[0]))
        # A rank stands in for one rank of each host.
        first, second = enough[1] - enough[0], enough[2] - enough[1]
        self.assertGreater(first, 0.005)
        self.assertAlmostEqual(second / first, 2, delta=0.2)

    def test_bench_names_the_network(self):
        slow = {"UNIEP_CPU_NETWORK_GBPS": "0.001"}
        text, file = self.bench("--ranks", 2, "--hosts", 2, **slow)
        self.assertIn("0.001 GB/s", text)
        self.assertIn("0.001 GB/s", file["link"])
        self.assertIsNone(self.bench("--ranks", 2, **slow)[1]["link"])
        # Tokens that cross, each way, at 1e6 bytes/s.
        forward, = (r["ms"] for r in file["records"] if r["direction"] == "forward")
        self.assertGreater(forward, 2)

    def test_other_hosts_are_another_circumstance(self):
        self.bench("--ranks", 4, "--hosts", 2)
        earlier = self.folder / "earlier.json"
        (self.folder / "bench.json").rename(earlier)
        text, file = self.bench("--ranks", 4, "--hosts", 4, "--against", earlier)
        self.assertIn("ranks: 4 on 2 hosts then, 4 on 4 hosts now", text)
        self.assertEqual(len(file["against"]["differences"]), 1)
        records = json.loads(earlier.read_text())
        for record in records["records"]:
            del record["hosts"]  # as files were that knew of one host
        earlier.write_text(json.dumps(records))
        self.assertIn("ranks: 4 then, 4 on 4 hosts now",
                      self.bench("--ranks", 4, "--hosts", 4, "--against", earlier)[0])

    def test_what_is_tuned_is_for_its_hosts(self):
        path = self.folder / "tune.json"
        text = self.tune("--hosts", 2, "--combine-groups", 2, "--json", path)
        self.assertRegex(text, "# ranks +4 on 2 hosts\n")
        file = json.loads(path.read_text())
        self.assertEqual((file["ranks"], file["hosts"]), (4, 2))
        self.assertIsNone(file["profile"])
        self.assertIsNone(file["network"], "no model asks for it")
        entry, = json.loads(self.cache.read_text())["entries"]
        self.assertEqual((entry["ranks"], entry["hosts"]), (4, 2))
        self.assertIn(" 4/2 ", self.succeed("cache", "list", UNIEP_TUNE_CACHE=str(self.cache)))
        for hosts, network, origin in ((2, "", "cache"), (1, "", "default"), (4, "", "default"),
                                       (2, "0.01", "default")):
            how = ("--ranks", 4, "--hosts", hosts, "--combine-groups", 2)
            auto = f"(auto: forward {origin}, backward default)"
            text, _ = self.bench(*how, "--schedule", "auto", UNIEP_CPU_NETWORK_GBPS=network)
            self.assertIn(auto, text)
            run = self.succeed("run", "--shape", "tiny,tokens=16", *how,
                               UNIEP_TUNE_CACHE=str(self.cache), UNIEP_CPU_NETWORK_GBPS=network)
            self.assertIn(auto, unfolded(run))
        processes = self.succeed("run", "--shape", "tiny,tokens=16", "--ranks", 4, "--hosts", 2,
                                 "--combine-groups", 2, "--processes",
                                 UNIEP_TUNE_CACHE=str(self.cache))
        self.assertIn("(auto: forward cache, backward default)", unfolded(processes))

    def test_what_is_accepted_is_said(self):
        for command in ("bench", "tune"):
            base = (command, "--shape", "tiny", "--ranks", 4)
            self.refuse(*base, "--hosts", 3, words=["number of hosts is 3 of 4 ranks", "divisor"])
            self.refuse(*base, "--hosts", 0, words=["--hosts", "'0'", "1 to 64"])
            self.refuse(*base, "--hosts", 2, "--backend", "cuda",
                        words=["--hosts is 2", "--backend cpu"])

    def test_a_slow_network_is_known_to_the_model(self):
        path = self.folder / "survey.json"
        seconds = []
        for network in ("0.0003", ""):
            self.succeed("tune", "--shape", "tiny,tokens=64", "--ranks", 4, "--hosts", 2, "--pass",
                         "forward", "--survey", 3, "--json", path, UNIEP_CPU_NETWORK_GBPS=network)
            file = json.loads(path.read_text())
            seconds.append(file["passes"][0]["points"][0]["predicted_ms"])
            if network:
                self.assertAlmostEqual(file["network"]["bytes_per_s"], 3e5, delta=6e4)
            self.assertEqual(set(file["network"]),
                             {"bytes_per_s", "latency_s", "message_s", "message_byte_s"})
            self.assertGreater(file["network"]["latency_s"], 0)
            self.assertGreater(file["network"]["message_s"], 0)
        self.assertGreater(seconds[0], 2 * seconds[1])


if __name__ == "__main__":
    unittest.main()
