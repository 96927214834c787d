"""From arguments and files to one typed configuration, with the origin of every value.

Later ones win: defaults of `schema.py`, group files (`conf/`), the experiment file, groups chosen by arguments, single
arguments.  A group that a later layer chooses is read in place of the earlier one, so nothing of the loser remains.
Everything that can be mistyped has a numbered error.  No import of Ray or torch in here: `--print-config` and a mistake
are answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray_diloco.config.groups import GROUPS, Search, group_leaves, search_path
from ray_diloco.config.keys import dotted, nearest
from ray_diloco.config.layers import Choice, Layer, read_arguments, read_experiment
from ray_diloco.config.schema import Config, island_names, slot_names
from ray_diloco.config.tree import Leaf, Tree, put
from ray_diloco.config.typed import DEFAULT_ORIGIN, Composed, leaf_values, typed
from ray_diloco.config.yamlfile import KeyPath
from ray_diloco.errors import ConfigError


def compose(
    arguments: Sequence[str] = (),
    config_file: str | None = None,
    *,
    conf_dir: str | None = None,
    settings: Mapping[str, Any] | None = None,
    experiment: Layer | None = None,
) -> Composed:
    """Puts a configuration together.

    Args:
      arguments: `key=value` texts; values are YAML.
      config_file: an experiment file, YAML.
      conf_dir: folder that is searched for group files before `./conf` and the packaged ones.
      settings: nested or dotted keys from Python; they count as arguments and win over the texts.
      experiment: what stands in the place of an experiment file.

    Raises:
      ConfigError: 101–109, see docs/errors.md.
    """
    search = search_path(conf_dir)
    said = read_arguments(arguments, settings or {})
    composed = typed(tree := _merge(search, experiment or read_experiment(search, said, config_file), said))
    _check_overrides(composed.config, tree)
    return composed


def composed_from(config: Config) -> Composed:
    """Wraps a configuration that was built in Python; what differs from the schema has the origin `python`."""
    unchanged = {dotted(path): value for path, value in leaf_values(Config())}
    values = {dotted(path): value for path, value in leaf_values(config)}
    same = {key for key, value in values.items() if key in unchanged and unchanged[key] == value}
    return Composed(config, {key: DEFAULT_ORIGIN if key in same else "python" for key in values})


def _merge(search: Search, experiment: Layer | None, said: Layer) -> Tree:
    """Lays the layers over one another, in the order of the module docstring."""
    tree: Tree = {}
    if experiment is None or not experiment.complete:
        chosen = experiment.choices if experiment else {}
        for group in GROUPS:
            if not (group in said.choices or group in chosen or (experiment and _defines_inline(experiment, group))):
                _choose(tree, search, group, Choice(GROUPS[group].default, DEFAULT_ORIGIN, by_name=False), None)
    for layer in filter(None, (experiment, said)):
        later = said.choices if layer is experiment else {}
        for group in GROUPS:
            choice = layer.choices.get(group)
            if layer.complete and choice and choice.by_name:
                continue
            if choice is not None and group not in later:
                _choose(tree, search, group, choice, layer)
            elif choice is None and _defines_inline(layer, group):
                _define_inline(tree, layer, group)
        below = experiment.choices.get("overlay") if experiment and layer is said else None
        if below and "algorithm" in said.choices and "overlay" not in said.choices:
            # The algorithm of a later layer comes under the overlay of an earlier one.
            _choose(tree, search, "overlay", below, experiment)
        _lay_over(tree, search, layer)
    return tree


def _defines_inline(layer: Layer, group: str) -> bool:
    return any((leaf := layer.leaves.get((group, key))) and leaf.value is not None for key in GROUPS[group].inline)


def _choose(tree: Tree, search: Search, group: str, choice: Choice, layer: Layer | None) -> None:
    """Reads a chosen group in place of what defined the section so far."""
    origin = layer.origin if layer else DEFAULT_ORIGIN
    own_name = layer is not None and choice.by_name and _defines_inline(layer, group)
    if own_name and search.find(group, choice.value) is None:
        _forget(tree, group)
        return
    found = group_leaves(search, group, choice.value, origin, choice.where)
    _forget(tree, group)
    for path, leaf in found.items():
        put(tree, path, leaf)


def _define_inline(tree: Tree, layer: Layer, group: str) -> None:
    """Starts a section afresh that a layer defines without a group file, and names it after what defines it."""
    _forget(tree, group)
    if group == "tokenizer":
        return
    given = (layer.leaves.get((group, key)) for key in GROUPS[group].inline)
    leaf = next(leaf for leaf in given if leaf and leaf.value is not None)
    put(tree, (group, "name"), Leaf(str(leaf.value).rstrip("/").rsplit("/", 1)[-1], leaf.origin, leaf.where))


def _forget(tree: Tree, group: str) -> None:
    for path in [path for path in tree if path[0] == group and path[1] in GROUPS[group].defining]:
        del tree[path]


def _lay_over(tree: Tree, search: Search, layer: Layer) -> None:
    """Puts the single values of a layer into the tree."""
    names, count = layer.leaves.get(("islands", "names")), ("islands", "count")
    regions = [leaf for path, leaf in layer.leaves.items() if path[:2] == ("islands", "regions") and len(path) == 3]
    if names and isinstance(names.value, list) and names.value and count not in layer.leaves:
        put(tree, count, Leaf(len(names.value), names.origin, names.where))
    if regions and count not in layer.leaves:
        known = {path: leaf.value for path, leaf in (tree | layer.leaves).items() if path[:2] == ("islands", "regions")}
        total = sum(value for path, value in known.items() if len(path) == 3 and isinstance(value, int))
        put(tree, count, Leaf(total, regions[-1].origin, regions[-1].where))
    choosing = [path for path in layer.leaves if path[:2] == ("islands", "overrides") and path[3:] == ("data",)]
    written_out: set[KeyPath] = set() if layer.complete else set(choosing)
    for path in written_out:
        _choose_island_data(tree, search, path[:3], layer.leaves[path])
    for path, leaf in layer.leaves.items():
        if path not in written_out:
            put(tree, path, leaf)


def _choose_island_data(tree: Tree, search: Search, island: KeyPath, leaf: Leaf) -> None:
    """Writes out `islands.<name>.data=<group or path>` as the settings of that island."""
    for path in [p for p in tree if p[:3] == island and p[3] in {"data", "data_path", "data_settings"}]:
        del tree[path]
    if not isinstance(leaf.value, str):
        put(tree, (*island, "data"), leaf)
        return
    for (_, *rest), setting in group_leaves(search, "data", leaf.value, leaf.origin, leaf.where).items():
        key = {"name": ("data",), "path": ("data_path",)}.get(rest[0], ("data_settings", *rest))
        put(tree, (*island, *key), setting)


def _check_overrides(config: Config, tree: Tree) -> None:
    """Refuses settings of an island that the run does not have."""
    names = island_names(config)
    # Where nothing is said of others, a name that is not among these is a mistake.
    slots = set(slot_names(config) if config.islands.max or config.islands.regions else names)
    for path, leaf in tree.items():
        if path[:2] == ("islands", "overrides") and len(path) > 2 and path[2] not in slots:
            close = nearest(str(path[2]), names)
            meant = f"did you mean {close!r}? " if close else ""
            raise ConfigError(
                109, f"{leaf.where}: the run has no island {path[2]!r}", f"{meant}islands: {', '.join(names)}"
            )
