"""The C bridge of compare_torch.py where no GPU is visible. UNIEP_BRIDGE is its file."""
import os
import unittest

os.environ["CUDA_VISIBLE_DEVICES"] = ""
for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(variable, None)

from compare.bridge import Layer, Library, UniepError
from compare.shapes import MODELS

LIBRARY = Library(os.environ["UNIEP_BRIDGE"])


class Bridge(unittest.TestCase):
    def test_stages_have_the_names_of_the_library(self):
        self.assertEqual(
            LIBRARY.stages,
            ["plan", "enter", "send", "dispatch", "redispatch", "expand", "fc1", "fc2", "refc1",
             "dfc2", "dfc1", "wgrad2", "wgrad1", "relay", "reduce"])

    def test_a_schedule_is_given_back_in_full(self):
        full = LIBRARY.full_schedule("sequential,tile_n=128")
        self.assertIn("launch=separate", full)
        self.assertIn("tile_m=128,tile_n=128", full)  # the first by default on a GPU
        self.assertEqual(LIBRARY.full_schedule(full), full)

    def test_the_library_says_what_it_refuses(self):
        with self.assertRaisesRegex(UniepError, "sideways"):
            LIBRARY.full_schedule("sideways")

    def test_without_a_gpu_no_layer_is_made(self):
        for _ in range(2):  # the group is not there, so the next layer asks for it again
            with self.assertRaisesRegex(UniepError, "CUDA driver .* is accepted"):
                Layer(LIBRARY, MODELS["qwen3-30b"], 1, 0, None)


if __name__ == "__main__":
    unittest.main()
