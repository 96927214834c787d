"""What a simulated run came to: goodput, use of the islands' time, bytes, and how it went from tenth to tenth."""

from __future__ import annotations

from dataclasses import dataclass

from ray_diloco.simulate.world import Ending, World

PARTS = 10


@dataclass(frozen=True)
class Tenth:
    """A tenth of a run's time.  `goodput` as a part of what all islands could train in it."""

    until_s: float
    goodput: float
    commits: int
    islands_lost: int


@dataclass(frozen=True)
class Report:
    """A simulated run.

    Attributes:
      status: finished, or failed; `reason` then says why.
      seconds: virtual.
      tokens: committed; `tokens_lost` were trained and are not.
      goodput: committed tokens as a part of what all islands could train in that time without pause.
      utilisation: time that islands spent on training, committed or not, as a part of all their time.
      send, wait, adopt: parts of the time of islands that took part in rounds.
      lives: of the driver.
      events: how often each happened.
    """

    status: str
    reason: str
    islands: int
    rounds: int
    seconds: float
    tokens: int
    tokens_lost: int
    tokens_per_s: float
    goodput: float
    utilisation: float
    send: float
    wait: float
    adopt: float
    bytes_up: int
    bytes_down: int
    contributions: int
    lives: int
    events: dict[str, int]
    timeline: tuple[Tenth, ...]


def ideal_rate(world: World) -> float:
    """Tokens per second that all islands would train if nothing ever stopped them."""
    setup = world.setup
    return sum(
        world.rules.islands[name].blocks_per_step * setup.tokens_per_block / world.conditions.pace(name)
        for name in setup.names
    )


def report_of(world: World, ending: Ending) -> Report:
    """The figures of a run that has ended."""
    seconds, figures, position = max(ending.seconds, 1e-9), world.figures, world.position
    ideal, names = ideal_rate(world), world.setup.names
    in_rounds = max(figures.wall_s, 1e-9)
    return Report(
        status=ending.status,
        reason="" if ending.error is None else str(ending.error),
        islands=len(names),
        rounds=position.round,
        seconds=seconds,
        tokens=position.tokens,
        tokens_lost=figures.trained_tokens - position.tokens,
        tokens_per_s=position.tokens / seconds,
        goodput=position.tokens / seconds / ideal,
        utilisation=figures.trained_s / (seconds * len(names)),
        send=figures.send_s / in_rounds,
        wait=figures.wait_s / in_rounds,
        adopt=figures.adopt_s / in_rounds,
        bytes_up=position.bytes_up,
        bytes_down=position.bytes_down,
        contributions=figures.contributions,
        lives=ending.lives,
        events=dict(sorted(figures.counts.items())),
        timeline=_timeline(world, seconds, ideal),
    )


def _timeline(world: World, seconds: float, ideal: float) -> tuple[Tenth, ...]:
    """Tenths; a life of the driver that ended takes back what it had not made durable."""
    width, parts = seconds / PARTS, []
    tokens = [0] * (PARTS + 1)
    commits, lost = [0] * PARTS, [0] * PARTS
    for event in world.events:
        k = min(PARTS - 1, int(event.t / width))
        if event.kind in ("round_committed", "fragment_committed"):
            tokens[k + 1] = event.fields["tokens"]
            commits[k] += 1
        lost[k] += event.kind == "island_lost"
    for k in range(PARTS):
        tokens[k + 1] = tokens[k + 1] if commits[k] else tokens[k]
        gained = (tokens[k + 1] - tokens[k]) / width / ideal
        parts.append(Tenth((k + 1) * width, gained, commits[k], lost[k]))
    return tuple(parts)
