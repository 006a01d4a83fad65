"""The first ten minutes of a GPU: is it right, how fast is it, what is it bound by, which blocks are the fastest.

    python -m cdt_fast.bench.triage [--out DIR] [--stage NAME ...]

Every stage has a process and a limit of its own, and every result is written at once, as a line of JSON. docs/gpu.md
says what the stages are and how to read what they write.
"""
