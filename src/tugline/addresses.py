"""Which network addresses are public."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TUNNELS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16")))
"""IPv6 ranges that can contain any IPv4 address."""


def is_public(address: Address) -> bool:
    """Whether an address is reachable by everybody: not private, link-local or loopback."""
    mapped = getattr(address, "ipv4_mapped", None) or address
    tunnel = any(mapped in network for network in _TUNNELS if network.version == mapped.version)
    return mapped.is_global and not mapped.is_multicast and not tunnel
