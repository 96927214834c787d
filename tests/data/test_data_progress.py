"""Progress reports: none for what is quick, about one a second for the rest."""

from ray_diloco.data.progress import Reporter


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_two_quiet_seconds_then_one_report_a_second_and_the_end() -> None:
    clock, reports = Clock(), []
    reporter = Reporter(lambda *report: reports.append((clock.now - 100, *report)), clock)
    reporter.begin("tokenising", 1000)
    for _ in range(16):
        clock.now += 0.25
        reporter.advance(10)
    reporter.end()
    assert reports == [
        (2.0, "tokenising", 80, 1000),
        (3.0, "tokenising", 120, 1000),
        (4.0, "tokenising", 160, 1000),
        (4.0, "tokenising", 160, 160),
    ]


def test_a_quick_stage_says_nothing_even_after_a_slow_one() -> None:
    clock, reports = Clock(), []
    reporter = Reporter(lambda *report: reports.append(report), clock)
    reporter.begin("reading", None)
    clock.now += 5
    reporter.advance(1)
    reporter.begin("tokenising", None)
    clock.now += 1
    reporter.advance(1)
    reporter.end()
    assert reports == [("reading", 1, None)]


def test_without_a_sink_nothing_happens() -> None:
    clock = Clock()
    reporter = Reporter(None, clock)
    reporter.begin("reading", 1)
    clock.now += 5
    reporter.advance(1)
    reporter.end()
