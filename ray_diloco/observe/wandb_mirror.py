"""A mirror of `metrics.jsonl` at Weights & Biases, opened by the driver and by nobody else.

The local files are the truth; the mirror may be slow, late or missing, and then says so in one warning.  Rounds and
committed tokens are our own step metrics and `step=` is never passed, because the library drops what arrives with a
step that goes back, as every resume makes it do.  All calls of the library are made by one thread, so that neither its
import nor its network can hold up a round.
"""

from __future__ import annotations

import importlib
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ray_diloco.observe.lines import read_lines

Mode = Literal["off", "offline", "online"]
INIT_LIMIT_S = 30.0


class WandbMirror:
    """One run of the mirror.

    Args:
      mode: off (nothing is opened), offline (files only, no network) or online.
      project: project at the mirror.
      name: name of the run; also its group where none is given, which a run that had to begin a new history joins.
      run_id: id of an earlier part of this run, from its manifest; None makes a new one.
      config: resolved configuration, nested.
      directory: where the library puts its `wandb/` folder.
      warn: called with one sentence, from another thread, when something does not work.
      group: name of the group of the run.
      parent: id of the run whose history this one replaces, after a roll-back.
      init_limit_s: seconds after which opening counts as slow.
      load: gives the library; a test puts another in its place.
    """

    def __init__(
        self,
        mode: Mode,
        project: str,
        name: str,
        run_id: str | None,
        config: Mapping[str, Any],
        directory: Path,
        *,
        warn: Callable[[str], object],
        group: str | None = None,
        parent: str | None = None,
        init_limit_s: float = INIT_LIMIT_S,
        load: Callable[[], Any] = lambda: importlib.import_module("wandb"),
    ) -> None:
        self.run_id: str | None = None
        self._warn = warn
        self._lines: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._summary: Mapping[str, Any] = {}
        self._tokens = 0
        self._failed = threading.Event()
        self._thread: threading.Thread | None = None
        if mode == "off":
            return
        self.run_id = run_id or secrets.token_hex(4)
        self._settings: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group or name,
            "id": self.run_id,
            "config": {**config, "parent_run": parent} if parent else dict(config),
            "dir": str(directory),
            "mode": mode,
            # Offline there is nobody to ask whether the run exists.
            "resume": "allow" if mode == "online" else None,
        }
        self._load = load
        self._init_limit_s = init_limit_s
        self._late = threading.Timer(init_limit_s, self._say_late)
        self._late.daemon = True
        self._thread = threading.Thread(target=self._serve, name="wandb-mirror", daemon=True)
        self._late.start()
        self._thread.start()

    def log(self, line: Mapping[str, Any]) -> None:
        """Queue a line of `metrics.jsonl`; returns at once.  What comes before the run is open is sent after."""
        if self._thread is not None and not self._failed.is_set():
            self._lines.put(line)

    def finish(self, timeout_s: float, summary: Mapping[str, Any] | None = None) -> bool:
        """Send what is queued and close the run.

        Args:
          timeout_s: seconds to wait for that; when they are over a warning says so and the rest is given up.
          summary: figures for the run's page; nested values are left out.

        Returns:
          Whether everything was handed over.
        """
        if self._thread is None:
            return True
        self._summary = {key: value for key, value in (summary or {}).items() if isinstance(value, int | float | str)}
        self._lines.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up(f"wandb did not take the rest within {timeout_s:g} s; metrics.jsonl has all of it.")
        return not self._failed.is_set()

    def _serve(self) -> None:
        """The life of the mirror's thread: open, forward, close."""
        # The library raises its own exceptions and whatever its transport does; none of them may reach the run.
        try:
            wandb = self._load()
            run = self._open(wandb)
            while (line := self._lines.get()) is not None:
                run.log(self._values(line))
            run.summary.update(self._summary)
            run.finish()
            # finish comes back before the library's own process has written its log; that process' end is the sign.
            wandb.teardown()
        except Exception as error:
            self._give_up(f"the wandb mirror is off: {type(error).__name__}: {error}")
        finally:
            self._late.cancel()

    def _open(self, wandb: Any) -> Any:
        # Console capture would swallow the driver's output; the process ends by itself, without the library's hooks.
        settings = wandb.Settings(init_timeout=self._init_limit_s, console="off", silent=True)
        run = wandb.init(settings=settings, **self._settings)
        self._late.cancel()
        run.define_metric("round", hidden=True)
        run.define_metric("tokens", hidden=True)
        run.define_metric("island/*", step_metric="round")
        run.define_metric("commit/*", step_metric="round")
        run.define_metric("eval/*", step_metric="tokens")
        return run

    def _values(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A line of metrics under the mirror's names, with both step metrics."""
        kind = line["kind"]
        self._tokens = max(self._tokens, line.get("tokens_committed", 0))
        prefix = f"island/{line['island']}" if kind == "island" else kind
        hidden = ("kind", "island", "round", "t")
        values = {f"{prefix}/{key}": value for key, value in line.items() if key not in hidden and value is not None}
        return {"round": line["round"], "tokens": self._tokens, **values}

    def _say_late(self) -> None:
        self._warn(f"wandb has not opened within {self._init_limit_s:g} s; the run goes on and lines are kept for it.")

    def _give_up(self, text: str) -> None:
        """Say once that nothing more is sent; after that the mirror's thread is nobody's business."""
        self._late.cancel()
        if not self._failed.is_set():
            self._failed.set()
            self._warn(text)


def mirror_metrics(path: Path, mirror: WandbMirror) -> int:
    """Play a whole `metrics.jsonl` to a mirror, for a run that had none or lost it; return the number of lines."""
    lines = list(read_lines(path))
    for line in lines:
        mirror.log(line)
    return len(lines)
