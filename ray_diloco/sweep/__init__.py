"""Sweeps: trials of Ray Tune, each of which is a complete run.

What is tried is `config/sweep.py`, what comes out `observe/sweep.py`, and the door is `tuning.py`.
"""
