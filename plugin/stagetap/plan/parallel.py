"""What tensor and expert parallelism divide, by vLLM's rules, and what they cannot."""

from __future__ import annotations

from dataclasses import dataclass

from stagetap.errors import Refused

VOCABULARY_MULTIPLE = 64
"""``DEFAULT_VOCAB_PADDING_SIZE`` of vLLM's vocabulary-parallel layers."""


@dataclass(frozen=True)
class Parallel:
    """How a model is spread over GPUs.

    Attributes:
        pp: pipeline stages.
        tp: tensor-parallel ranks of each stage.
        expert_parallel: whole experts a rank instead of a slice of each.
    """

    pp: int
    tp: int
    expert_parallel: bool = False

    def share(self, name: str, size: int) -> int:
        """What one rank has of ``size``.

        Raises:
            Refused: ``size`` does not divide by the ranks.
        """
        if size % self.tp:
            raise Refused(f"{name} {size} does not divide by --tp {self.tp}; {_cure(size)}")
        return size // self.tp

    def kv_heads(self, total: int) -> int:
        """KV heads of one rank: a share, or a copy of one where ranks outnumber heads.

        Raises:
            Refused: neither divides the other.
        """
        if total % self.tp and self.tp % total:
            raise Refused(
                f"num_key_value_heads {total} and --tp {self.tp}: neither divides the other, and "
                f"vLLM copies KV heads in whole only; {_cure(total)}"
            )
        return max(1, total // self.tp)

    def vocabulary(self, size: int) -> int:
        """Rows of one rank's part of an embedding, which vLLM pads to a multiple of 64.

        Raises:
            Refused: the padded vocabulary does not divide.
        """
        padded = -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        if padded % self.tp:
            raise Refused(
                f"vocab_size {size}, padded to {padded}, does not divide by --tp {self.tp}; "
                f"{_cure(padded)}"
            )
        return padded // self.tp

    def experts(self, total: int) -> int:
        """Experts that one rank holds.

        Raises:
            Refused: with expert parallelism, they do not divide.
        """
        if not self.expert_parallel:
            return total
        if total % self.tp:
            raise Refused(
                f"{total} experts do not divide by the {self.tp} ranks of --expert-parallel; "
                f"{_cure(total)}"
            )
        return total // self.tp

    def expert_width(self, name: str, size: int) -> int:
        """Width of an expert on one rank: all of it with expert parallelism, else a share."""
        return size if self.expert_parallel else self.share(name, size)


def _cure(size: int) -> str:
    *most, last = (str(tp) for tp in (1, 2, 4, 8, 16, 32) if size % tp == 0)
    return f"use --tp {', '.join(most)} or {last}" if most else f"use --tp {last}"
