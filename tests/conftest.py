"""What every test process has in common: one thread, no network, and a closing word on the tested versions."""

import os
from importlib import metadata

import pytest

# One thread: the tests start several processes at once, and spinning threads on few cores slow each other down many
# times over.  Set here, before any test imports torch; processes that a test starts inherit it.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TESTED = ("torch", "ray", "deepspeed", "transformers", "datasets", "numpy")

for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line("tested with " + ", ".join(f"{name} {metadata.version(name)}" for name in TESTED))
