"""Several hosts on this machine: network namespaces whose links can be cut."""

import os
import shutil
import subprocess
from pathlib import Path

DEVICE = "eth0"
"""The network device of every host."""


def missing() -> str | None:
    """Why network namespaces are not available here, or None."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"shardwright-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip() or made.stdout.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Network:
    """Hosts and a switch between them, each in its own namespace; the machine's network is not changed."""

    def __init__(self, hosts: int) -> None:
        self.hosts = range(hosts)
        self._switch = self._name("switch")
        do("ip", "netns", "add", self._switch)
        self._in_switch("link", "add", "bridge", "type", "bridge")
        self._in_switch("link", "set", "bridge", "up")
        for host in self.hosts:
            name = self._name(host)
            do("ip", "netns", "add", name)
            do("ip", "-n", name, "link", "add", DEVICE, "type", "veth", "peer", "name", f"port{host}")
            do("ip", "-n", name, "link", "set", f"port{host}", "netns", self._switch)
            do("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
            do("ip", "-n", name, "link", "set", "lo", "up")
            do("ip", "-n", name, "link", "set", DEVICE, "up")
            self._in_switch("link", "set", f"port{host}", "master", "bridge")
            self.reconnect(host)

    def address(self, host: int) -> str:
        return f"10.99.0.{host + 1}"

    def namespace(self, host: int) -> Path:
        """The network namespace of a host. GLOO_SOCKET_IFNAME must be DEVICE in it."""
        return Path("/run/netns", self._name(host))

    def disconnect(self, host: int) -> None:
        """Disconnect a host: connections stay open, but nothing arrives."""
        self._in_switch("link", "set", f"port{host}", "down")

    def reconnect(self, host: int) -> None:
        self._in_switch("link", "set", f"port{host}", "up")

    def close(self) -> None:
        for host in ("switch", *self.hosts):
            do("ip", "netns", "delete", self._name(host))

    def _in_switch(self, *words: str) -> None:
        do("ip", "-n", self._switch, *words)

    def _name(self, host: int | str) -> str:
        return f"shardwright-{os.getpid()}-{host}"


def do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
