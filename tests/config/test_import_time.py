import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "deepspeed", "transformers", "datasets", "pyarrow", "wandb", "numpy")


@pytest.mark.parametrize(
    "statement",
    [
        "from ray_diloco.config import check, compose; check.check(compose.compose(['run.storage=s3://x']).config)",
        "from ray_diloco.config.show import config_yaml",
        "from ray_diloco.cli import main; main(['train', '--print-config', 'experiment=demo'])",
        "from ray_diloco.cli import main; main(['train', 'inner.h=3'])",
        "from ray_diloco.cli import main; main(['version'])",
    ],
)
def test_configuration_and_mistakes_need_none_of_the_heavy_imports(statement: str) -> None:
    code = (
        f"import sys; {statement}; found = [m for m in {HEAVY!r} if m in sys.modules]; sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
