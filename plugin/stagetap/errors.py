"""Exceptions that StageTap raises on purpose."""


class StageTapError(Exception):
    """Base class of every exception that StageTap raises on purpose."""


class Refused(StageTapError, ValueError):
    """What was asked cannot be honoured; the message says what is wrong and what to do."""
