"""What the life-of-a-request tests do inside one engine: each scenario returns what it saw."""

from engine.harness import random_prompts

SHORT = random_prompts([20], seed=1)[0]
"""A prompt for where any will do; it runs in one chunk."""
