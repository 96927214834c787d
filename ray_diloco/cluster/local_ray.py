"""What a Ray that serves one run on one machine is told; imports without Ray, which reads some of it when imported."""

from __future__ import annotations

# By variable of the environment, where that says nothing else.  Such a Ray shares the processors with the islands.
LOCAL_RAY = {
    "RAY_worker_niceness": "0",
    # No run uses the workers that Ray starts before anybody asks for one: ranks have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
    # The driver keeps the tape, and nobody reads Ray's own: statistics, metrics, events of tasks and of its loops, and
    # the lines of logs that it would look for in every file ten times a second.
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "1e9",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    # Memory of the store that nobody needs any more is there for the next round at once, not after a second: a payload
    # in memory that its writer has not used before takes three times as long.
    "RAY_free_objects_period_milliseconds": "100",
}
