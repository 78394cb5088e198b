"""The tiny engine of the serving tests, and the benchmarks' folder on the path."""

import sys
from pathlib import Path

from tests.serve.conftest import engine_of, model, one_thread, tokenizer  # noqa: F401 - fixtures

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
