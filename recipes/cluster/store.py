"""Where node 0's launcher serves the store.

torchrun's store has no password and listens on all networks, and its c10d rendezvous unpickles what others write there.
So the store is made here, on one address, and the rendezvous is torchrun's static one, which unpickles nothing.
"""

import errno
import os
import socket
from ipaddress import ip_address
from typing import NamedTuple

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError


class Served(NamedTuple):
    """The store of this process, for as long as this object exists."""

    store: TCPStore
    address: str
    port: int


def serve(name: str, port: int, *, remote: bool) -> Served | None:
    """Serve the store at the one address of this machine that the name means; port 0 = any free port.

    torchrun's own TCPStore of this port uses the same server, because both are multi-tenant. remote: whether other
    machines must reach it, so that /etc/hosts may not send a name to the loopback network. None: the name means no
    address of this machine, for example that of a gateway, and torchrun must serve on all. Raises
    RendezvousError.
    """
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(f"the address {name} of node 0: {error.strerror}") from None
    for family, _, _, _, place in addresses:
        address = str(place[0])
        if remote and name not in (address, "localhost") and ip_address(address.partition("%")[0]).is_loopback:
            continue
        try:
            listener = socket.create_server(place[:2], family=family)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            raise RendezvousError(
                f"node 0 cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}"
            ) from None
        port = listener.getsockname()[1]
        store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
        return Served(store, address, port)
    return None


def serve_alone(port: int) -> Served:
    """Serve the store on this machine's loopback network only; port 0 = any free port. Raises RendezvousError."""
    for address in ("127.0.0.1", "::1"):
        if served := serve(address, port, remote=False):
            return served
    raise RendezvousError("this machine has no loopback network (ip link set lo up)")
