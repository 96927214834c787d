"""Where a result comes from: versions, machine, source commit, and digests of configurations."""

from ray_diloco.provenance.digest import canonical_json, digest_json
from ray_diloco.provenance.environment import environment_report

__all__ = ["canonical_json", "digest_json", "environment_report"]
