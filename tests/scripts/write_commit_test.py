"""cmake/WriteCommit.cmake: whose commit it writes."""
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = os.environ["WRITE_COMMIT"]


def git(folder, *arguments):
    of_nobody = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *of_nobody, *arguments],
                          capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def written(sources):
    """What the build of these sources says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder, "commit.h")
        subprocess.run([os.environ["CMAKE"], f"-DSOURCE_DIR={sources}", f"-DOUTPUT={header}",
                        "-P", SCRIPT], timeout=30, check=True)
        return header.read_text().split('"')[1]


class WriteCommit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.checkout = Path(folder.name, "a checkout")
        self.sources = self.checkout / "third_party" / "uniep"
        self.sources.mkdir(parents=True)
        git(self.checkout, "init", "-q")
        (self.checkout / "file").write_text("1")
        git(self.checkout, "add", "file")
        git(self.checkout, "commit", "-q", "-m", "one")
        self.commit = git(self.checkout, "rev-parse", "--short=10", "HEAD")

    def test_that_of_the_checkout(self):
        self.assertEqual(written(self.checkout), self.commit)
        (self.checkout / "file").write_text("2")
        self.assertEqual(written(self.checkout), self.commit + "+")

    def test_that_of_a_checkout_by_way_of_a_link(self):
        link = self.checkout.with_name("link")
        link.symlink_to(self.checkout)
        self.assertEqual(written(link), self.commit)

    def test_none_within_a_repository_of_somebody_else(self):
        self.assertEqual(written(self.sources), "")

    def test_none_without_a_repository(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(written(folder), "")


if __name__ == "__main__":
    unittest.main()
