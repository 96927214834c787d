"""Will it work here?  Small checks, each of which says pass, warn or fail, and how to mend it.

Facts of a machine are gathered once (`facts.py`, `sockets.py`); the checks are pure functions of facts, so that tests
can make up any machine.  What needs a cluster is in `cluster/doctor.py`.
"""
