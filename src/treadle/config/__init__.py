"""What every layer stands on: errors, strict settings, progress, plug-ins, safe writing."""

from treadle.config.errors import TreadleError, UserError
from treadle.config.settings import Settings, load_settings, parse_settings

__all__ = ["Settings", "TreadleError", "UserError", "load_settings", "parse_settings"]
