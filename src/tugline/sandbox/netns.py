"""Create a listening socket inside another process's network namespace, from outside.

A namespace is a property of the thread that creates a socket, and the socket stays in it wherever
it is used. Root can do this in a thread, which enters the namespace, creates the socket and exits.
Other users need a short-lived process, which first enters the user namespace that owns the network,
and passes the socket back. This file is the program of that process, so it imports nothing but the
standard library.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_NS_GET_USERNS = 0xB701
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_BACKLOG = 128
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded once: each `CDLL` is a class of its own, in cycles of references."""
_HELPER_S = 10.0


def listen(pid: int, port: int) -> socket.socket:
    """Return a TCP socket that listens on loopback in the network namespace of `pid`. Blocks.

    Raises `OSError`.
    """
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="tugline-netns") as thread:
            return thread.submit(_enter, pid, port, with_user=False).result()
    except PermissionError:
        return _in_helper(pid, port)


def _in_helper(pid: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = (sys.executable, "-I", "-S", __file__, str(pid), str(port), str(theirs.fileno()))
        done = subprocess.run(
            argv,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELPER_S,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise OSError(lines[-1] if lines else f"helper ended with {done.returncode}")
        _, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=descriptor)


def _enter(pid: int, port: int, *, with_user: bool) -> socket.socket:
    """Move this thread to the namespace and return a listening socket."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if with_user:
            owner = fcntl.ioctl(network, _NS_GET_USERNS)
            _join(owner, _CLONE_NEWUSER)
            os.close(owner)
        _join(network, _CLONE_NEWNET)
    finally:
        os.close(network)
    _loopback_up()
    return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)


def _join(namespace: int, kind: int) -> None:
    if _LIBC.setns(namespace, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _loopback_up() -> None:
    """Bring the loopback device up, which some tools that create a network do not."""
    with socket.socket() as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        _, flags = struct.unpack("16sh22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        if not flags & _IFF_UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _main(pid: int, port: int, answer: int) -> None:
    with socket.socket(fileno=answer) as channel:
        listener = _enter(pid, port, with_user=True)
        socket.send_fds(channel, [b"."], [listener.fileno()])


if __name__ == "__main__":
    _main(*(int(value) for value in sys.argv[1:]))
