"""Measurements, installed as `cdt_fast.bench`. Every figure is a ratio within one run; nothing wrong is timed."""
