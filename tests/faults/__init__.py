"""Faults: commands killed at random moments, raced, starved of disk, fed with NaN; nothing may be lost or left behind.

`python -m tests.faults --minutes 5 --seed 0` makes trials of every kind until the time is up and prints a table; with
`--json FILE` it adds to the counts of that file.
"""
