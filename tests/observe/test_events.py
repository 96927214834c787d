import json
from pathlib import Path

import pytest

from ray_diloco.observe import events
from ray_diloco.observe.events import EVENTS, EventLog, level_of
from ray_diloco.observe.narration import SENTENCES, narrate


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_time_number_kind_and_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5)
    event = log.append("island_lost", island="i1", reason="exit code -9")
    assert event == {"t": 12.5, "seq": 0, "event": "island_lost", "island": "i1", "reason": "exit code -9"}
    assert lines(tmp_path / "events.jsonl") == [event]


def test_numbers_go_on_over_a_resume(tmp_path: Path) -> None:
    for _ in range(3):
        log = EventLog(tmp_path / "events.jsonl")
        log.append("round_opened", round=1)
        log.append("round_closed", round=1)
        log.close()
    assert [line["seq"] for line in lines(tmp_path / "events.jsonl")] == [0, 1, 2, 3, 4, 5]


def test_a_line_torn_by_a_crash_is_cut_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, clock=lambda: 1.0).append("round_opened", round=1)
    with path.open("a") as file:
        file.write('{"t": 2.0, "se')
    EventLog(path, clock=lambda: 3.0)
    assert lines(path)[1:] == [{"t": 3.0, "seq": 1, "event": "log_repaired", "file": "events.jsonl", "bytes": 14}]


def test_an_unknown_kind_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="unknown event kind 'island_lots'; did you mean 'island_lost'"):
        log.append("island_lots")
    assert lines(tmp_path / "events.jsonl") == []


def test_a_field_cannot_hide_what_every_event_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already has the field 'seq'"):
        EventLog(tmp_path / "events.jsonl").append("warning", seq=1)


def test_the_newest_events_are_kept_in_words(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 5.0, remembered=2)
    log.append("island_joined", island="i0")
    log.append("round_opened", round=1)
    log.append("island_lost", island="i0", reason="silent")
    log.append("run_failed", reason="no islands")
    assert [(note.seq, note.level, note.text) for note in log.notes] == [
        (2, "warning", "island i0 lost: silent"),
        (3, "error", "failed: no islands"),
    ]


def test_every_kind_is_written_somewhere_so_that_a_reader_of_the_list_waits_for_nothing_in_vain() -> None:
    package = Path(events.__file__).parents[1]
    writers = [path.read_text() for path in package.rglob("*.py") if path.parent.name != "observe"]
    writers.append(Path(events.__file__).read_text().partition("class EventLog")[2])
    assert [kind for kind in EVENTS if not any(f'"{kind}"' in text for text in writers)] == []


def test_every_kind_is_described_in_one_sentence_and_has_a_narration_or_is_silent_on_purpose() -> None:
    assert SENTENCES.keys() == EVENTS.keys()
    assert all(description.endswith(".") and "\n" not in description for description in EVENTS.values())


@pytest.mark.parametrize("kind", EVENTS)
def test_every_kind_is_narrated_in_one_line_even_without_any_field(kind: str) -> None:
    text = narrate({"t": 0.0, "seq": 0, "event": kind})
    assert text is None or (text and "{" not in text and "[" not in text and "\n" not in text)


def test_fields_are_told_with_their_units() -> None:
    event = {
        "event": "round_committed",
        "round": 3,
        "rounds": 40,
        "loss": 3.21456,
        "islands": ["i0", "i1"],
        "tokens": 819_200,
        "bytes_up": 3_212_400,
    }
    assert narrate(event) == "round 3/40 committed · loss 3.215 · i0, i1 · 819k tokens · up 3.2 MB"


def test_what_is_unknown_is_left_out() -> None:
    assert narrate({"event": "round_committed", "round": 3, "loss": None}) == "round 3 committed"
    assert narrate({"event": "round_closed", "round": 3, "absent": []}) is None
    assert narrate({"event": "round_closed", "round": 3, "absent": ["i1"]}) == "round 3 closed without i1"


def test_a_long_list_of_islands_is_shortened() -> None:
    text = narrate({"event": "run_started", "run": "r", "islands": [f"i{k}" for k in range(1000)], "rounds": 2})
    assert text == "run r starts: i0, i1, i2, i3, i4, i5, … (1000 in all) for 2 rounds"


def test_text_of_a_field_is_not_taken_for_a_template_and_stays_on_one_line() -> None:
    assert narrate({"event": "warning", "text": "odd {island} [x]\nsecond"}) == "warning: odd {island} [x] second"


def test_losses_are_warnings_and_a_failed_run_is_an_error() -> None:
    assert [level_of(kind) for kind in ("island_lost", "run_failed", "round_committed")] == ["warning", "error", "info"]
