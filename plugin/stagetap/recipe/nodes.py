"""Names and addresses of nodes. Pure."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

from stagetap.errors import Refused
from stagetap.wording import shown

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_NUMBERS = re.compile(r"[0-9.]+|0[xX][0-9A-Fa-f]+")
"""What a resolver would take for an address, however it is written."""


def check_node(where: str, node: str) -> None:
    """Raises Refused, naming the key, for what is no address that other nodes reach."""
    cure = "name the node as the others reach it, an IPv6 address without brackets"
    try:
        address = ip_address(node)
    except ValueError:
        if not _NAME.fullmatch(node) or _NUMBERS.fullmatch(node):
            raise Refused(f"{where}: {shown(node)} is no name of a node; {cure}") from None
        if node.lower().split(".")[0] == "localhost":
            raise Refused(f"{where}: {node} is another one on each node; {cure}") from None
        return
    if isinstance(address, IPv6Address) and (address.scope_id or address.ipv4_mapped):
        raise Refused(f"{where}: {node} is no plain address; {cure}")
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise Refused(f"{where}: {node} is no one node for the others; {cure}")


def same_node(node: str) -> str:
    """How a node is compared: names by their lower case, addresses by what they mean."""
    try:
        return str(ip_address(node))
    except ValueError:
        return node.lower()


def in_address(node: str) -> str:
    """As an address with a port writes it."""
    return f"[{node}]" if ":" in node else node
