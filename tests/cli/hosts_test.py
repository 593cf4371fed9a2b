"""simulate --hosts: the ways between hosts that it compares (program.py)."""

import unittest

from program import ProgramTest

SHAPE = "custom,tokens=1024,hidden=256,intermediate=128,experts=16,topk=8"


class Hosts(ProgramTest):
    def ways(self, *args):
        """By pass and way: groups, ms, exposed ms, and MB over network, link and within a rank."""
        text = self.succeed("simulate", "--shape", SHAPE, "--nic-gbps", 10, *args)
        found = {}
        for line in text.splitlines():
            words = line.split()
            if words and words[0] in ("forward", "backward"):
                found[words[0], " ".join(words[1:-6])] = [float(word) for word in words[-6:]]
        return found

    def test_less_crosses_the_network_by_relays(self):
        ways = self.ways("--ranks", 8, "--hosts", 2)
        self.assertEqual(len(ways), 2 * 4)
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

    def test_one_host_has_no_network(self):
        ways = self.ways("--ranks", 4, "--hosts", 1, "--pass", "forward")
        self.assertEqual([way[3] for way in ways.values()], [0] * 4)
        self.assertEqual(len({tuple(way) for way in ways.values()}), 1)

    def test_what_is_accepted_is_said(self):
        base = ("simulate", "--shape", SHAPE, "--ranks", 8)
        nic = ("--nic-gbps", 10)
        self.refuse(*base, "--hosts", 3, *nic, words=["number of hosts is 3", "divisor"])
        self.refuse(*base, "--hosts", 2, words=["--hosts is 2", "--nic-gbps"])
        self.refuse(*base, "--hosts", 2, *nic, "--gpus-per-node", 4, words=["--gpus-per-node"])
        self.refuse(*base, "--hosts", 2, *nic, "--json", self.folder / "f.json", words=["--json"])
        wide = SHAPE.replace("experts=16", "experts=64")
        self.refuse("simulate", "--shape", wide, "--ranks", 64, "--hosts", 2, *nic,
                    words=["--ranks is 64", "at most 32"])


if __name__ == "__main__":
    unittest.main()
