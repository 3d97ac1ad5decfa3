"""What the tests of the image found, for a table at the end of the run."""

REPORT: dict[str, str] = {}
