"""What a run tells: the event tape, metrics, the live view, a wandb mirror, the summary and the report.

Knows nothing of torch, Ray or the run loop.  `events.jsonl` and `metrics.jsonl` are the truth; display, wandb,
`summary.json` and `report.html` are derived from them and can be made again.
"""
