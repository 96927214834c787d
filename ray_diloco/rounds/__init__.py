"""The protocol: who trains what, when a round closes, and what a commit is, as asyncio over ports.

Knows `outer/`; does not know Ray, DeepSpeed, files or real time.  The cluster and the simulator run this code.
"""
