"""."""


class Model:
    """."""


def load() -> Model:
    """."""
    raise NotImplementedError
