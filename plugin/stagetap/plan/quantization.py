"""Bytes of a weight under a checkpoint's ``quantization_config``, as far as shapes tell.

========================  =====================================================================
``fp8``                   8 bits; one float32 scale a block of ``weight_block_size``, or a tensor
``mxfp4``                 experts only: 4 bits and an 8-bit scale every 32 weights
``awq``, ``gptq``         ``bits``; a 16-bit scale and a zero point of ``bits`` every
                          ``group_size`` weights of a column
``compressed-tensors``    by ``config_groups``: ``num_bits``, and scales by their strategy
========================  =====================================================================

Embeddings, norms and routers stay in the model's dtype. Backends may pad or repack weights when
they have loaded them; that is not in here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from stagetap.config_values import ConfigValues
from stagetap.errors import Refused
from stagetap.plan.weights import Weight
from stagetap.wording import shown

Ignored = Callable[[str], bool]

_PATTERN = "re:"
_MOST_BITS = 32


@dataclass(frozen=True)
class Scheme:
    """How the weights of one layer are stored.

    Attributes:
        bits: of one weight.
        block: rows and columns under one scale; None for a dimension is all of it.
        scale_bits: of one scale, its zero point included.
        strict: vLLM refuses a share of a layer that is no whole number of blocks.
    """

    bits: int
    block: tuple[int | None, int | None]
    scale_bits: int
    strict: bool = False

    def bytes_of(self, weight: Weight) -> int:
        """Bytes of all copies of a weight on one rank, scales included.

        Raises:
            Refused: one rank's share is cut inside a block.
        """
        rows, columns = (
            size if extent is None else extent
            for extent, size in zip(self.block, (weight.rows, weight.columns), strict=True)
        )
        if self.strict:
            self._check(weight, rows, columns)
        scales = -(-weight.rows // rows) * -(-weight.columns // columns)
        bits = weight.rows * weight.columns * self.bits + scales * self.scale_bits
        return weight.copies * -(-bits // 8)

    def _check(self, weight: Weight, rows: int, columns: int) -> None:
        if weight.kind == "replicated":
            return
        for what, size, block in (
            ("outputs", weight.rows, rows),
            ("inputs", weight.columns, columns),
        ):
            if size % block:
                raise Refused(
                    f"{weight.name}: {size} {what} on one rank are no whole number of "
                    f"quantization blocks of {block}; use a smaller --tp"
                    + (", or --expert-parallel" if weight.kind == "routed_experts" else "")
                )


SchemeOf = Callable[[Weight], Scheme | None]


@dataclass(frozen=True)
class Quantization:
    """What is quantized, and how.

    Attributes:
        method: its name, ``none`` where nothing is.
        scheme_of: the scheme of a weight, None where it keeps the model's dtype.
    """

    method: str
    scheme_of: SchemeOf

    def bytes_of(self, weight: Weight, itemsize: int) -> int:
        """Bytes of a weight on one rank; ``itemsize`` is that of the model's dtype."""
        scheme = self.scheme_of(weight) if weight.linear else None
        if scheme is None:
            return weight.local_elements * (weight.itemsize or itemsize)
        return scheme.bytes_of(weight)


UNQUANTIZED = Quantization("none", lambda weight: None)


def read_quantization(config: ConfigValues | None) -> Quantization:
    """What a ``quantization_config`` says.

    Raises:
        Refused: a method whose bits the plan does not know, or one that lacks its sizes.
    """
    if config is None or config.is_empty:
        return UNQUANTIZED
    method = config.text("quant_method") or ""
    if method not in _READERS:
        raise Refused(
            f"{config.where}: the plan does not know the bits of {shown(method or 'no method')}; "
            f"known are {', '.join(sorted(_READERS))}"
        )
    return Quantization(method, _READERS[method](config))


def _fp8(config: ConfigValues) -> SchemeOf:
    block = _block(config, "weight_block_size")
    scheme = Scheme(8, (None, None), 32) if block is None else Scheme(8, block, 32, strict=True)
    return _unless(_names(config, "modules_to_not_convert", "ignored_layers"), scheme)


def _mxfp4(config: ConfigValues) -> SchemeOf:
    experts = _unless(_names(config, "modules_to_not_convert"), Scheme(4, (1, 32), 8))
    return lambda weight: experts(weight) if weight.kind == "routed_experts" else None


def _grouped(config: ConfigValues) -> SchemeOf:
    bits = config.size("bits", "w_bit", most=_MOST_BITS)
    columns = _group(config, "group_size", "q_group_size")
    return _unless(_names(config, "modules_to_not_convert"), Scheme(bits, (1, columns), 16 + bits))


def _compressed(config: ConfigValues) -> SchemeOf:
    ignored = _patterns(config, "ignore")
    groups = [
        (_patterns(group, "targets", linear=True), _compressed_scheme(weights))
        for group in config.sections("config_groups").values()
        if (weights := group.section("weights")) is not None
    ]
    if not groups:
        raise Refused(
            f"{config.where}: compressed-tensors without config_groups says no bits; give the "
            "config.json of the quantized checkpoint"
        )

    def scheme_of(weight: Weight) -> Scheme | None:
        if ignored(weight.name):
            return None
        return next((scheme for targeted, scheme in groups if targeted(weight.name)), None)

    return scheme_of


def _compressed_scheme(weights: ConfigValues) -> Scheme:
    bits = weights.size("num_bits", most=_MOST_BITS)
    strategy = weights.text("strategy")
    # vLLM holds scales of 8-bit weights in float32, those of float4 as they are (E8M0 of mxfp4,
    # E4M3 of nvfp4), and others in the model's dtype.
    scale = 32 if bits == 8 else 8 if weights.text("type") == "float" else 16
    zero = 0 if weights.flag("symmetric", True) else bits
    match strategy:
        case "group" | "tensor_group":
            return Scheme(bits, (1, weights.size("group_size")), scale + zero)
        case "channel":
            return Scheme(bits, (1, None), scale + zero)
        case "block":
            block = _block(weights, "block_structure")
            if block is None:
                raise weights.wrong("block_structure", "two sizes")
            return Scheme(bits, block, 32)
        case "tensor" | None if weights.integer("group_size") is None:
            return Scheme(bits, (None, None), 32)
    raise Refused(
        f"{weights.where}: the plan does not know the strategy {shown(strategy)}; known are "
        "group, tensor_group, channel, block, tensor"
    )


def _block(config: ConfigValues, name: str) -> tuple[int, int] | None:
    """Rows and columns under one scale."""
    sizes = config.integers(name, least=1)
    if sizes is None:
        return None
    if len(sizes) != 2:
        raise config.wrong(name, "two sizes")
    return sizes[0], sizes[1]


def _group(config: ConfigValues, *names: str) -> int | None:
    """Columns under one scale; -1 in the file, None here, is all of them."""
    if any(config.integer(name) == -1 for name in names):
        return None
    return config.size(*names)


def _names(config: ConfigValues, *keys: str) -> Ignored:
    """Modules by name, or by the name of what they stand in; ``lm_head`` anywhere."""
    listed = [name for key in keys for name in config.texts(key) or ()]

    def ignored(name: str) -> bool:
        return any(
            spelled == one or spelled.startswith(f"{one}.") or ("." not in one and one in spelled)
            for one in listed
            for spelled in _spellings(name)
        )

    return ignored


def _patterns(config: ConfigValues, key: str, linear: bool = False) -> Ignored:
    """Modules by name or, behind ``re:``, by pattern; ``Linear`` is every linear layer."""
    listed = config.texts(key) or ()
    names = {one for one in listed if not one.startswith(_PATTERN)}
    try:
        patterns = [re.compile(one.removeprefix(_PATTERN)) for one in listed if one not in names]
    except (re.error, OverflowError, RecursionError):
        raise config.wrong(key, "a list of names and regular expressions") from None

    def matches(name: str) -> bool:
        if linear and "Linear" in names:
            return True
        return any(
            spelled in names or any(pattern.match(spelled) for pattern in patterns)
            for spelled in _spellings(name)
        )

    return matches


def _spellings(name: str) -> tuple[str, str, str]:
    """Multimodal checkpoints keep their decoder under a name of its own."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


def _unless(ignored: Ignored, scheme: Scheme) -> SchemeOf:
    return lambda weight: None if ignored(weight.name) else scheme


_READERS: dict[str, Callable[[ConfigValues], SchemeOf]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _grouped,
    "gptq": _grouped,
    "compressed-tensors": _compressed,
}
