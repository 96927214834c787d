import sys
from pathlib import Path

# Helper modules that stand beside the tests that use them.
for folder in ("rounds",):
    sys.path.insert(0, str(Path(__file__).parent / folder))
