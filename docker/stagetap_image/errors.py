"""What ends a build on purpose."""


class BuildRefused(Exception):
    """The build cannot go on; the message names the thing and the cure."""
