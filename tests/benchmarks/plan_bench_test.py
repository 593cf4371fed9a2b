"""uniep_plan_bench, UNIEP_PLAN_BENCH, on a small layer."""
import os
import subprocess
import unittest


@unittest.skipUnless(os.path.exists("/dev/nvidiactl"), "there is no GPU")
class PlanBench(unittest.TestCase):
    def test_orders_are_those_of_the_gpus_schedules(self):
        tokens, topk, experts, ranks = 256, 2, 8, 1
        done = subprocess.run([os.environ["UNIEP_PLAN_BENCH"],
                               *map(str, (tokens, topk, experts, ranks))],
                              capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        orders = [line for line in done.stdout.splitlines() if " us  order, " in line]
        self.assertEqual(len(orders), 4)
        for line in orders:
            self.assertRegex(line, r"\(launch=.*\btile_m=128,tile_n=256\b")


if __name__ == "__main__":
    unittest.main()
