"""What a run will cost before it runs: bytes, time, memory, money; and which H, codec and fragments would be cheaper.

Bytes come from the formulas of the code that sends them (`outer.writer.message_bytes`), speeds from a measurement on
this machine, links from `plan.*` or from what `ray-diloco doctor` measured.  Every step is a pure function.
"""
