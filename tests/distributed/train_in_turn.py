"""Trains with collectives in the step, then with sharded parameters; run by ``conftest.py``.

    python tests/distributed/train_in_turn.py FOLDER

One after the other in the same two processes, since starting them takes longer than training.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed import train_sharded, train_with_collectives

if __name__ == "__main__":
    train_with_collectives.main(Path(sys.argv[1]), list(train_with_collectives.CASES))
    train_sharded.main(Path(sys.argv[1], "sharded.json"))
