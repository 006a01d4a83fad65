"""Every launch of a step, counted without a GPU, and the time that it predicts: `python -m cdt_fast.bench.ledger`."""
