"""Prompts of ``stagetap demo-train``: every form with every subject.

What a draft is measured on are subjects that it was not trained on.
"""

from __future__ import annotations

from typing import Any

FORMS = (
    "What is special about {}? Answer in a few sentences.",
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Write a poem of eight lines about {}.",
    "List five facts about {}.",
    "Why do people care about {}?",
    "Describe {} to somebody who has never seen anything like it.",
    "What are the advantages and disadvantages of {}?",
    "Give three pieces of advice about {}.",
    "Write a letter to a friend about {}.",
    "How have people's views of {} changed over the last hundred years?",
    "Write a dialogue between two people about {}.",
    "Which questions could a teacher ask about {}?",
    "Summarize what is known about {}.",
    "What would the world be like without {}?",
    "Write a report for a newspaper about {}.",
    "Compare {} with something similar.",
    "Write the first paragraph of a novel about {}.",
    "How would you plan a lesson about {}?",
    "Write a speech in praise of {}.",
)
SUBJECTS = (
    "rain",
    "bread",
    "bicycles",
    "the moon",
    "old trees",
    "music",
    "libraries",
    "bees",
    "rivers",
    "glass",
    "clocks",
    "salt",
    "mountains",
    "night trains",
    "paper",
    "winter",
    "cats",
)
HELD_OUT_SUBJECTS = ("bridges", "tea", "lighthouses")


def training_prompts() -> list[dict[str, Any]]:
    """Prompts to capture, as the lines of a file for ``stagetap capture``."""
    return _prompts(SUBJECTS)


def held_out_prompts(count: int) -> list[dict[str, Any]]:
    """Prompts to measure drafts on; every subject has its share of them."""
    prompts = _prompts(HELD_OUT_SUBJECTS)
    return [prompts[position * len(prompts) // count] for position in range(count)]


def _prompts(subjects: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{subject}, {number}",
            "messages": [{"role": "user", "content": form.format(subject)}],
        }
        for subject in subjects
        for number, form in enumerate(FORMS)
    ]
