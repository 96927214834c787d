import pickle

from ray_diloco.observe.view import CommitView, IslandView, Note, RunView, TimeSplit


def view(round: int, *steps: int) -> RunView:
    islands = tuple(IslandView(f"i{k}", "eu", "training", step, 50) for k, step in enumerate(steps))
    return RunView("demo", "running", round, 10, islands=islands)


def test_progress_counts_the_open_round_by_its_inner_steps() -> None:
    assert view(0).progress == 0.0
    assert view(2, 25, 50).progress == 0.275
    assert view(10, 0, 0).progress == 1.0


def test_a_view_of_a_hundred_islands_travels_in_a_few_kilobytes() -> None:
    islands = tuple(IslandView(f"island-{k}", "eu-west", "training", 3, 50, 3.0, 2e3) for k in range(100))
    commit = CommitView(3, 3.1, 0.2, 10, 10, TimeSplit(1.0, 2.0, 3.0, 4.0))
    whole = RunView("demo", "running", 3, 10, islands=islands, last_commit=commit, notes=(Note(1, 2.0, "text"),))
    data = pickle.dumps(whole)
    assert pickle.loads(data) == whole
    assert len(data) < 20_000
    assert commit.time.total_s == 10.0
