"""The process of another framework, as benchmarks/peers.py talks to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from peers import Peer

ANSWERS = """
import sys
print("a library says something")
print('{"loss": 7.5, "argument": "%s"}' % sys.argv[1], flush=True)
for line in sys.stdin:
    print("and again")
    print(int(line) / 8, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    def written(text):
        path = tmp_path / "peer.py"
        path.write_text(text)
        return str(path)

    return written


def test_a_peer_runs_a_block_for_each_question(script):
    peer = Peer("resnet", script=script(ANSWERS))
    assert peer.about == {"loss": 7.5, "argument": "resnet"}
    assert [peer.block(4), peer.block(16)] == [0.5, 2.0]
    peer.close()


def test_a_peer_that_ends_says_why(script):
    with pytest.raises(RuntimeError, match="no such network"):
        Peer("resnet", script=script("raise SystemExit('no such network')"))
