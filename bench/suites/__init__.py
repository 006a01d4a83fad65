"""The suites by name. Each is a module of this package with a function `cases(device, size)`."""

# Names alone: the command line lists them, and must not wait for torch before its help is shown.
SIZES = ("toy", "cpu", "gpu")
NAMES = ("attention", "ops", "step", "cross_entropy")
