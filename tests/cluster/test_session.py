"""What a session with Ray leaves as it was."""

import os
import signal
import subprocess
import sys

import pytest
from ray._private import services

from ray_diloco.cluster.session import _in_groups_of_their_own, _signal_handlers_kept


def test_a_signal_that_comes_while_ray_starts_interrupts_and_its_handler_stays():
    def ours(number, frame):
        raise AssertionError("Ray has it in hand")

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with pytest.raises(KeyboardInterrupt), _signal_handlers_kept():
            # As Ray does.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is ours
        with pytest.raises(SystemExit), _signal_handlers_kept():
            sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_processes_of_ray_are_out_of_reach_of_signals_to_the_group_of_the_command():
    command = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]
    usual = services.ConsolePopen
    with _in_groups_of_their_own():
        process = services.ConsolePopen(command, stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0] == "True\n"
    assert services.ConsolePopen is usual
