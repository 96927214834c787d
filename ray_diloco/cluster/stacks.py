"""Where the threads of a process stand, for whoever asks why it makes no step."""

from __future__ import annotations

import sys
import threading
import traceback

# Of each thread, the innermost so many frames.
FRAMES = 16


def stacks() -> str:
    """A block for each thread of this process that runs Python, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    blocks = []
    for ident, frame in sorted(sys._current_frames().items()):
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame)[-FRAMES:]).rstrip()
            blocks.append(f"{names.get(ident, 'a thread without a name')}:\n{lines}")
    return "\n".join(blocks)
