"""Values that somebody set, by key, with where they were written; what nobody set is not in the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray_diloco.config.yamlfile import KeyPath


@dataclass(frozen=True)
class Leaf:
    """A value that somebody set.

    Attributes:
      value: what was written.
      origin: who set it, as `--print-config` says it: a file or `argument`.
      where: the same, precise enough for an error: file and line, or the argument's text.
    """

    value: Any
    origin: str
    where: str


Tree = dict[KeyPath, Leaf]


def put(tree: Tree, path: KeyPath, leaf: Leaf) -> None:
    """Sets a value in place of what was there; an empty mapping adds nothing to one that has entries."""
    below = [other for other in tree if other[: len(path)] == path and other != path]
    if leaf.value == {} and below:
        return
    above = [path[:length] for length in range(1, len(path)) if path[:length] in tree]
    for other in (*below, *above):
        del tree[other]
    tree[path] = leaf
