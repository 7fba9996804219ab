"""Exit codes of ``assay eval``."""


class ExitCode:
    """What a run or a comparison came to, for scripts."""

    PASSED = 0
    REGRESSED = 1
    USAGE = 2
    NOT_COMPARABLE = 3
    SETTINGS_DIFFER = 4
    FAILURES = 5
    INCONCLUSIVE = 6
    INTERRUPTED = 130
