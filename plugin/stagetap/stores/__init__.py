"""Where samples are kept: a protocol and its implementations."""
