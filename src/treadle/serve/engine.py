"""."""


class Engine:
    """."""
