"""Worker processes: the same batches as without them, from a script and from a notebook."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# 20 windows in batches of 4 are 5 batches, also with 2 workers. No absl flags are parsed here.
SCRIPT = """
import json

import numpy as np

from sparsejax.data import array_source, make_loader


def run(worker_count, num_epochs=None):
    tokens = np.arange(20 * 5 + 1) % 101
    source = array_source(tokens, vocab_size=101, eot_id=0)
    return make_loader(
        source,
        batch_size=4,
        seq_len=5,
        seed=3,
        worker_count=worker_count,
        num_epochs=num_epochs,
        mask_documents=True,
    )


def take(loader, count):
    return [{key: array.tolist() for key, array in next(loader).items()} for _ in range(count)]


def main():
    states, finite = {}, []
    with run(2, num_epochs=1) as loader:
        for step in range(6):
            states[step] = json.loads(json.dumps(loader.state()))
            if step < 5:
                finite += take(loader, 1)
        assert next(loader, None) is None
    resumed = {}
    with run(2) as loader:  # runs on into the next epoch
        for step in (4, 5, 6, 0):
            loader.restore(states[step])
            assert loader.step == step
            resumed[step] = take(loader, 1)
            states[step + 1] = loader.state()
            resumed[step] += take(loader, 2)
    print(json.dumps({"finite": finite, "resumed": resumed}))


if __name__ == "__main__":
    main()
"""

# As in a notebook: no file to import, no guard.
INLINE = """
import dataclasses, json
import numpy as np
from sparsejax.data import array_source, make_loader

source = array_source(np.arange(21) % 20, vocab_size=20, eot_id=0)
tokens = source.tokens.copy()
tokens[13] = 99
source = dataclasses.replace(source, tokens=tokens)
loader = make_loader(
    source, batch_size=1, seq_len=5, seed=3, worker_count=1, shuffle=False, num_epochs=1
)
rows = [next(loader)["tokens"].tolist() for _ in range(2)]
try:
    next(loader)
except ValueError as error:
    print(json.dumps({"rows": rows, "error": str(error)}))
loader.close()
"""


def run_python(*arguments):
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reference():
    """The same loader without workers, in this process."""
    scope = {"__name__": "reference"}
    exec(SCRIPT, scope)
    return scope["take"](scope["run"](0), 10)


def test_a_script_with_workers_loses_no_batch_and_resumes(tmp_path, reference):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    seen = run_python(str(script))
    assert len(seen["finite"]) == 5
    assert seen["finite"] == reference[:5]
    for step, batches in seen["resumed"].items():
        assert batches == reference[int(step) : int(step) + 3]


def test_code_without_a_file_may_use_workers_and_sees_their_errors():
    seen = run_python("-c", INLINE)
    assert seen["rows"] == [[[0, 1, 2, 3, 4]], [[5, 6, 7, 8, 9]]]
    assert "array/train: token 13 has id 99, outside the vocabulary of 20 ids" in seen["error"]
